//! A contender that runs.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::affinity;
use crate::load::{Client, Load};

/// How long a server may take until its socket takes a connection, and to end when told to.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server process. It is ended when this is dropped.
pub(crate) struct Server {
    child: Child,
    name: String,
    log: PathBuf,
    sockets: Vec<PathBuf>,
}

impl Server {
    /// Starts a server called `name` by a command on `cpu`, with the sockets that it will have. What it prints goes to a file
    /// in `directory`.
    pub(crate) fn spawn(
        name: &str,
        command: &[OsString],
        sockets: &[PathBuf],
        cpu: Option<usize>,
        directory: &Path,
    ) -> Result<Self> {
        for socket in sockets {
            let _ = fs::remove_file(socket);
        }
        let log = directory.join(format!("{name}.log"));
        let output = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let (program, arguments) = command.split_first().context("no program to start")?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // A child inherits the affinity of the thread that starts it.
        let child = affinity::while_bound_to(cpu, || {
            command.spawn().with_context(|| format!("starting {}", program.display()))
        })?;
        Ok(Self { child, name: name.to_owned(), log, sockets: sockets.to_owned() })
    }

    /// The server's process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// The socket of export number `export`, as soon as the server listens on it.
    pub(crate) fn listening(&mut self, export: usize) -> Result<PathBuf> {
        let socket = self.sockets.get(export).context("there is no such export")?.clone();
        // Servers have no common way to say that they listen, and most take one client only, so
        // that it cannot be tried. Of the server before, the kernel may still be closing a socket of
        // the same name (a ring's files are put after its process has ended): hence the file too.
        self.wait_until(|| Ok(socket.exists() && is_listening(&socket)?))?;
        Ok(socket)
    }

    /// Waits until the server listens, which `listens` finds out.
    pub(crate) fn wait_until(&mut self, listens: impl Fn() -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while !listens()? {
            self.check()?;
            if start.elapsed() > PATIENCE {
                bail!(
                    "{} has not listened on its socket within {PATIENCE:?}: {}",
                    self.name,
                    self.words()
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Connects a client to export number `export`, as soon as the server takes it.
    pub(crate) fn connect(&mut self, export: usize, load: &Load) -> Result<Client> {
        let socket = self.listening(export)?;
        Client::connect(&socket, load)
            .or_else(|refused| {
                self.check()?;
                Err(refused)
            })
            .with_context(|| format!("{} ({})", self.name, self.words()))
    }

    /// Fails if the server has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait().context("asking after the server")? {
            Some(status) => bail!("{} has ended ({status}): {}", self.name, self.words()),
            None => Ok(()),
        }
    }

    /// Ends the server, as its user would.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.check()?;
        if !self.terminate() {
            bail!("{} has not ended within {PATIENCE:?} of SIGTERM", self.name);
        }
        Ok(())
    }

    /// What the server has printed last.
    fn words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        match lines.is_empty() {
            true => "it has printed nothing".into(),
            false => lines.into_iter().rev().collect::<Vec<_>>().join("\n"),
        }
    }

    fn terminate(&mut self) -> bool {
        let _ = kill(self.pid(), Signal::SIGTERM);
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        false
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.terminate();
        }
        for socket in &self.sockets {
            let _ = fs::remove_file(socket);
        }
    }
}

/// Whether a process listens on the socket: it is bound before, and refuses connections until then.
fn is_listening(socket: &Path) -> Result<bool> {
    /// `__SO_ACCEPTCON` (include/linux/net.h).
    const ACCEPTS: u32 = 1 << 16;
    let sockets = fs::read_to_string("/proc/net/unix").context("reading /proc/net/unix")?;
    let path = format!(" {}", socket.display());
    // Num RefCount Protocol Flags Type St Inode Path
    Ok(sockets.lines().filter(|line| line.ends_with(&path)).any(|line| {
        let flags = line.split_whitespace().nth(3);
        let flags = flags.and_then(|flags| u32::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & ACCEPTS != 0)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_without_a_listener_is_not_ready() {
        let name = format!("bench-listening-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        assert!(!is_listening(&socket).unwrap());
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(is_listening(&socket).unwrap());
        drop(listener);
        assert!(!is_listening(&socket).unwrap());
        fs::remove_file(&socket).unwrap();
    }
}
