//! Commands to `/dev/ublk-control`, by a process with the privilege for them.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;

use event_loop::EventLoop;
use nix::errno::Errno;

use super::commands;
use super::wire::Command;

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
    Ok(memory)
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
