//! A contender that runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::contender::{Contender, Setup};
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
    /// Starts `contender` on `cpu`. What it prints goes to a file in `directory`.
    pub(crate) fn start(
        contender: &Contender,
        setup: &Setup,
        cpu: Option<usize>,
        directory: &Path,
    ) -> Result<Self> {
        for socket in &setup.sockets {
            let _ = fs::remove_file(socket);
        }
        let log = directory.join(format!("{}.log", contender.name));
        let output = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let command = contender.command(setup);
        let (program, arguments) = command.split_first().context("no program to start")?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let mut spawn =
            || command.spawn().with_context(|| format!("starting {}", program.display()));
        let child = match cpu {
            // A child inherits the affinity of the thread that starts it.
            Some(cpu) => affinity::while_bound_to(cpu, &mut spawn)?,
            None => spawn()?,
        };
        Ok(Self { child, name: contender.name.clone(), log, sockets: setup.sockets.clone() })
    }

    /// The server's process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Waits until export number `export` has its socket, and gives that.
    pub(crate) fn listening(&mut self, export: usize) -> Result<PathBuf> {
        let socket = self.sockets.get(export).context("there is no such export")?.clone();
        let start = Instant::now();
        // Servers have no common way to say that they listen.
        while !socket.exists() {
            self.check()?;
            if start.elapsed() > PATIENCE {
                bail!(
                    "{} has not made its socket within {PATIENCE:?}: {}",
                    self.name,
                    self.words()
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(socket)
    }

    /// Connects a client to export number `export`, as soon as the server takes it.
    pub(crate) fn connect(&mut self, export: usize, load: &Load) -> Result<Client> {
        let start = Instant::now();
        let socket = self.listening(export)?;
        loop {
            // Between bind and listen, connections are refused.
            let refused = match Client::connect(&socket, load) {
                Ok(client) => return Ok(client),
                Err(error) => error,
            };
            let kind = refused.root_cause().downcast_ref::<std::io::Error>().map(|e| e.kind());
            if kind != Some(std::io::ErrorKind::ConnectionRefused) || start.elapsed() > PATIENCE {
                self.check()?;
                return Err(refused.context(format!("{} ({})", self.name, self.words())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
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
