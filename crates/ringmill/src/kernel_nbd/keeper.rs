//! The process that makes a device of the kernel's NBD client for an attached image, and removes it after the daemon.
//!
//! The daemon cannot do that itself: it serves the connection that the device is made with, and the sandbox lacks the
//! privilege. The keeper is this program, started again with the same arguments. A socket is its standard input:
//!
//! | line | from | contents |
//! |---|---|---|
//! | first | daemon | the name of the attached image |
//! | second | keeper | `made`, or why there is no device |
//! | third | daemon | `end`: the daemon has ended as it should |
//! | fourth | keeper | `gone`, or `stays`: the device is in use |
//!
//! If the daemon is killed, the device stays for the next one, unless the writes are lost with the daemon.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use control::HostDevice as Kind;
use daemon::DaemonError;
use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::poll::{PollFlags, PollTimeout};
use nix::sys::prctl;
use nix::sys::signal::SigSet;
use nix::unistd::getppid;

use super::{Wanted, disconnect, disconnect_unused, is_of};
use crate::attachments::lock::Wait;
use crate::attachments::{self, Attached, Mode, has_ended_within};
use crate::host_device::HostDevice;

/// Variable with the ID of the daemon that has started this process. The ID is compared, so an inherited variable has no
/// effect.
const DAEMON: &str = "RINGMILL_ATTACH_DAEMON";
/// The name in lists of processes.
const NAME: &std::ffi::CStr = c"nbd-keeper";
/// The line by which a daemon ends.
const END: &str = "end";
/// The line by which a keeper reports a device.
const MADE: &str = "made";
/// Longest line, bytes.
const MAX_LINE: usize = 4096;

/// The daemon's end.
#[derive(Debug)]
pub(crate) struct Keeper(Arc<OwnedFd>);

impl Keeper {
    /// Starts the keeper. Called before the sandbox is in force.
    ///
    /// # Errors
    ///
    /// Those of starting a process.
    pub(crate) fn start() -> Result<Self, DaemonError> {
        let start = || {
            let (ours, theirs) = UnixStream::pair()?;
            let mut arguments = env::args_os();
            let mut command = Command::new("/proc/self/exe");
            if let Some(name) = arguments.next() {
                command.arg0(name);
            }
            command
                .args(arguments)
                .env(DAEMON, std::process::id().to_string())
                .current_dir("/")
                // Ctrl-C is meant for the daemon.
                .process_group(0)
                .stdin(OwnedFd::from(theirs))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            Ok(Keeper(Arc::new(ours.into())))
        };
        start().map_err(|error: io::Error| failed(&error))
    }

    /// Makes the device of a recorded image. The daemon has to serve meanwhile.
    ///
    /// # Errors
    ///
    /// The keeper's.
    pub(crate) async fn make(&self, event_loop: &EventLoop, id: &str) -> Result<(), DaemonError> {
        let events = (PollFlags::POLLIN | PollFlags::POLLOUT).bits().cast_unsigned();
        let socket = Readiness::new(event_loop, self.0.clone(), events.into());
        let line = format!("{id}\n");
        let failed_with = |errno: Errno| failed(&errno.into());
        socket.send_all(line.as_bytes()).await.map_err(failed_with)?;
        let (mut said, mut part) = (Vec::new(), [0; 512]);
        while said.last() != Some(&b'\n') && said.len() < MAX_LINE {
            match socket.receive(&mut part).await.map_err(failed_with)? {
                0 => break,
                len => said.extend(part.iter().take(len)),
            }
        }
        socket.release().await;
        match String::from_utf8_lossy(&said).trim_end() {
            MADE => Ok(()),
            "" => Err(failed(&io::ErrorKind::UnexpectedEof.into())),
            why => Err(DaemonError::new(format!("the kernel's NBD client makes no device: {why}"))),
        }
    }

    /// Removes the device, which the daemon serves no more. A device in use stays.
    pub(crate) fn end(&self) {
        let ended = || {
            let mut socket = UnixStream::from(self.0.try_clone()?);
            socket.write_all(format!("{END}\n").as_bytes())?;
            read_line(&mut BufReader::new(socket))
        };
        // A device that stays can be seen.
        let _: io::Result<String> = ended();
    }
}

fn failed(error: &io::Error) -> DaemonError {
    DaemonError::new(format!("the process that keeps the device does not answer: {error}"))
}

/// Reads a line; empty: there is none.
fn read_line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    let len = io::Read::take(from, MAX_LINE as u64).read_line(&mut line)?;
    Ok(if len > 0 && line.pop() == Some('\n') { line } else { String::new() })
}

/// Returns whether this process is a keeper.
pub(crate) fn is_keeper() -> bool {
    env::var(DAEMON).is_ok_and(|pid| pid.parse() == Ok(getppid().as_raw()))
}

/// Keeps a device.
pub(crate) fn run() -> ExitCode {
    let kept = || {
        // A service manager sends its signals to all processes of a service.
        SigSet::all().thread_block()?;
        prctl::set_name(NAME)?;
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        keep(&socket)
    };
    match kept() {
        Ok(()) => ExitCode::SUCCESS,
        // The daemon sees the end of the connection.
        Err(_) => ExitCode::FAILURE,
    }
}

fn keep(mut socket: &UnixStream) -> io::Result<()> {
    let mut lines = BufReader::new(socket);
    let id = read_line(&mut lines)?;
    let (attached, number) = match begin(&id) {
        Ok(begun) => begun,
        Err(why) => return writeln!(socket, "{}", why.replace('\n', " ")),
    };
    writeln!(socket, "{MADE}")?;
    if read_line(&mut lines).unwrap_or_default() == END {
        let gone = disconnect_unused(number, false).unwrap_or_default();
        return writeln!(socket, "{}", if gone { "gone" } else { "stays" });
    }
    // The daemon was killed, or another process has taken over.
    while let Some(pid) = attached.daemon() {
        has_ended_within(pid, PollTimeout::NONE);
    }
    let was_killed = attached.file("pid").exists();
    let _lock = attached.lock(Wait::Ever);
    if attached.daemon().is_some() || !is_of(number, &id) {
        return Ok(());
    }
    let gone = match (was_killed, attached.mode) {
        // The writes are lost with the daemon.
        (true, Mode::Snapshot) => disconnect(number).is_ok(),
        (true, Mode::Write | Mode::ReadOnly) => false,
        (false, _) => disconnect_unused(number, false)?,
    };
    if gone {
        attached.forget();
    }
    Ok(())
}

/// Makes the device of a recorded image.
fn begin(id: &str) -> Result<(Attached, u32), String> {
    let all = attachments::all().map_err(|error| error.to_string())?;
    let found = all.into_iter().find(|attached| attached.id == id);
    let found = found.and_then(|found| Some((found.host_device()?, found)));
    let Some((HostDevice { kind: Kind::Nbd, number }, attached)) = found else {
        return Err("it is not recorded".into());
    };
    // Without its overlay, a snapshot cannot be continued.
    let recovery = attached.mode != Mode::Snapshot;
    let socket = attached.file("nbd");
    let wanted = Wanted { id, number, socket: &socket, recovery };
    wanted.make().map_err(|error| error.to_string())?;
    Ok((attached, number))
}
