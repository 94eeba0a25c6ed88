//! `--daemonize`: continues in the background once everything is ready.
//!
//! fork(2) keeps only the calling thread and is unsafe in a program with several. So the program
//! starts itself again with the same arguments. The child gets its own session and a
//! pipe as standard output, through which it reports that it is ready. Until then it has the parent's
//! standard error, so its errors are visible. The parent exits with the child's code.

use std::env;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::prctl;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{self, Pid};

/// Variable with the ID of the parent that waits for this process. The ID is compared, so an inherited variable
/// has no effect.
const PARENT: &str = "RINGMILL_DAEMONIZE_PARENT";

/// The last byte that the background process sends to its parent.
const READY: u8 = 0;

/// Which of the two processes this is.
#[derive(Debug)]
pub(crate) enum Role {
    /// The process that was called.
    Parent {
        /// The code to exit with.
        code: u8,
        /// What the background process has printed until it was ready.
        said: String,
    },
    /// The background process. After the set-up, it calls [`detach`](Daemon::detach) and [`ready`](Detached::ready).
    Child(Daemon),
}

/// The background process while its parent waits for it.
#[derive(Debug)]
pub(crate) struct Daemon {
    parent: Pid,
}

/// The background process with the replacement of the terminal.
///
/// It keeps its working directory, unlike QSD: names of images are written to headers and opened again later.
#[derive(Debug)]
pub(crate) struct Detached {
    null: File,
}

/// Starts the background process. Called before any set-up and before any thread exists, since the child repeats
/// everything.
///
/// # Errors
///
/// The child could not be started, or its session could not be created.
pub(crate) fn split() -> io::Result<Role> {
    let parent = env::var(PARENT).ok().and_then(|pid| pid.parse().ok());
    let starter = unistd::getppid();
    if parent == Some(starter.as_raw()) {
        unistd::setsid()?;
        // As in QSD: no other user writes to new files and sockets, whatever the umask of the caller.
        umask(Mode::S_IWGRP | Mode::S_IRWXO);
        // The kernel named the process after the link it was started by: "exe".
        let name = env::args_os().next().unwrap_or_default();
        let name = Path::new(&name).file_name().unwrap_or_default();
        prctl::set_name(&CString::new(name.as_encoded_bytes())?)?;
        return Ok(Role::Child(Daemon { parent: starter }));
    }
    let (mut ready, child_stdout) = io::pipe()?;
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_else(|| OsString::from("ringmill"));
    let mut child = Command::new("/proc/self/exe")
        .arg0(name)
        .args(arguments)
        .env(PARENT, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(child_stdout)
        .spawn()?;
    // `Command` was a temporary: the pipe's end in this process is closed, so the child's death
    // ends the pipe too.
    let (mut said, mut part) = (Vec::new(), [0; 512]);
    let code = loop {
        match ready.read(&mut part)? {
            0 => {
                let status = child.wait()?;
                if let Some(signal) = status.signal() {
                    let why = format!("the process was killed by signal {signal}");
                    return Err(io::Error::other(why));
                }
                let code = status.code().and_then(|code| u8::try_from(code).ok());
                break code.filter(|code| *code != 0).unwrap_or(1);
            }
            len => said.extend_from_slice(&part[..len]),
        }
        if said.pop_if(|last| *last == READY).is_some() {
            break 0;
        }
    };
    Ok(Role::Parent { code, said: String::from_utf8_lossy(&said).into_owned() })
}

impl Daemon {
    /// The process that was called. Variables of the environment that name it are meant for this process.
    pub(crate) fn parent(&self) -> Pid {
        self.parent
    }

    /// Opens the replacement of the terminal.
    ///
    /// # Errors
    ///
    /// `/dev/null` could not be opened.
    pub(crate) fn detach(self) -> io::Result<Detached> {
        Ok(Detached { null: null()? })
    }
}

/// Has standard error go nowhere.
///
/// # Errors
///
/// `/dev/null` could not be opened, or standard error cannot be replaced.
pub(crate) fn drop_errors() -> io::Result<()> {
    Ok(unistd::dup2_stderr(null()?)?)
}

fn null() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/null")
}

impl Detached {
    /// Reports that everything is ready, which ends the parent, and closes the terminal.
    ///
    /// # Errors
    ///
    /// Standard output or error cannot be replaced.
    pub(crate) fn ready(self) -> io::Result<()> {
        // Fails if the parent was killed meanwhile. That does not concern the daemon.
        let _ = io::stdout().write_all(&[READY]).and_then(|()| io::stdout().flush());
        unistd::dup2_stdout(&self.null)?;
        unistd::dup2_stderr(&self.null)?;
        Ok(())
    }
}
