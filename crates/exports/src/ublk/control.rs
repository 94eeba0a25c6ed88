//! Commands to `/dev/ublk-control`, by a process with the privilege for them.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::process::{Command as Program, Stdio};

use event_loop::EventLoop;
use nix::errno::Errno;

use super::commands;
use super::wire::{Command, Info};

/// The file of the commands.
pub const CONTROL: &str = "/dev/ublk-control";

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// What to do.
    pub command: Command,
    /// The device's number.
    pub id: u32,
    /// The command's number, such as a size. [`Command::Start`] and [`Command::EndRecovery`] get that of the process.
    /// A start is over once the partitions are block devices, too.
    pub data: u64,
    /// The command's structure; the driver's answer is of the same length.
    pub memory: Vec<u8>,
}

/// The end of a command.
pub type Outcome = Result<Vec<u8>, Failed>;

/// A failure: of what, and the errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// Opening [`CONTROL`].
    Open(Errno),
    /// The command.
    Command(Errno),
}

impl Failed {
    /// Returns the failure of a command with an error of the system.
    pub fn of(error: &io::Error) -> Failed {
        Failed::Command(errno_of(error))
    }

    /// Returns the errno.
    pub fn errno(self) -> Errno {
        match self {
            Failed::Open(errno) | Failed::Command(errno) => errno,
        }
    }
}

/// Completes once, on the control loop.
pub type Later<T> = Pin<Box<dyn Future<Output = T>>>;

/// Carries out commands, in this process or in another one.
pub trait Control {
    /// Carries out a command.
    fn command(&self, order: Order) -> Later<Outcome>;

    /// Carries out a command, and blocks the thread until its end: when there is no time left for tasks.
    fn command_now(&self, order: Order) -> Outcome;

    /// Opens the file of a device, `/dev/ublkcN`.
    fn open(&self, id: u32) -> Later<Result<OwnedFd, Errno>>;
}

/// Carries out commands on the pool threads of a loop.
pub struct Here(pub EventLoop);

impl Control for Here {
    fn command(&self, order: Order) -> Later<Outcome> {
        let done = self.0.offload(move || carry_out(order));
        Box::pin(async move { done.await.unwrap_or(Err(Failed::Command(Errno::ECANCELED))) })
    }

    fn command_now(&self, order: Order) -> Outcome {
        carry_out(order)
    }

    fn open(&self, id: u32) -> Later<Result<OwnedFd, Errno>> {
        let opened = self.0.offload(move || open(id));
        Box::pin(async move { opened.await.unwrap_or(Err(Errno::ECANCELED)) })
    }
}

/// Carries out a command in this process, and waits for its end.
///
/// # Errors
///
/// The driver's, or those of opening [`CONTROL`].
pub fn carry_out(order: Order) -> Outcome {
    let Order { command, id, mut data, mut memory } = order;
    if matches!(command, Command::Start | Command::EndRecovery) {
        // The kernel insists on the process that has opened the device's file.
        data = std::process::id().into();
    }
    let file = File::options().read(true).write(true).open(CONTROL);
    let file = file.map_err(|error| Failed::Open(errno_of(&error)))?;
    let done = commands::control(file.as_fd(), command, id, data, &mut memory);
    done.map_err(|error| Failed::of(&error))?;
    if command == Command::Start {
        // A disk serves without its partitions, too, and their table may be damaged.
        let _ = find_partitions(&format!("/dev/ublkb{id}"));
    }
    Ok(memory)
}

/// Makes the partitions of a disk block devices.
fn find_partitions(disk: &str) -> io::Result<()> {
    match commands::read_partitions(&File::open(disk)?) {
        // The kernel does not look at disks that threads without CAP_SYS_ADMIN serve, as in the sandbox.
        Err(error) if errno_of(&error) == Errno::EINVAL => {
            let mut partx = Program::new("partx");
            partx.args(["--add", "--", disk]).stdin(Stdio::null());
            partx.stdout(Stdio::null()).stderr(Stdio::null()).status().map(drop)
        }
        read => read,
    }
}

/// Returns what the driver knows of each device of this host.
///
/// # Errors
///
/// Those of opening [`CONTROL`], and of the commands. A device that goes in the meantime is left out.
pub fn devices() -> Result<Vec<Info>, Failed> {
    let mut found = Vec::new();
    let names = std::fs::read_dir("/dev").map_err(|error| Failed::of(&error))?;
    for name in names.flatten().map(|entry| entry.file_name()) {
        let number = name.to_str().and_then(|name| name.strip_prefix("ublkc"));
        let Some(id) = number.and_then(|id| id.parse().ok()) else { continue };
        found.extend(info(id)?);
    }
    found.sort_by_key(|info| info.id);
    Ok(found)
}

/// Returns what the driver knows of a device; `None`: there is no such device.
///
/// # Errors
///
/// Those of opening [`CONTROL`], and of the command.
pub fn info(id: u32) -> Result<Option<Info>, Failed> {
    let order = Order { command: Command::GetInfo, id, data: 0, memory: vec![0; Info::SIZE] };
    match carry_out(order) {
        Ok(memory) => Ok(Info::decode(&memory)),
        Err(Failed::Command(Errno::ENODEV)) => Ok(None),
        Err(failed) => Err(failed),
    }
}

/// Opens the file of a device in this process.
///
/// # Errors
///
/// As of open(2).
pub fn open(id: u32) -> Result<OwnedFd, Errno> {
    let file = File::options().read(true).write(true).open(format!("/dev/ublkc{id}"));
    file.map(OwnedFd::from).map_err(|error| errno_of(&error))
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
