//! What all commands that measure servers need: places, CPUs, times, and what the report says of them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::host::{affinity, machine, syscalls};
use crate::options::Options;
use crate::peers::contender::{Contender, Places, beside_this};
use crate::peers::server::Server;
use crate::peers::tree::{LIBRARY_PATH, Tree};
use crate::report::DEBUG;

/// One run of a command.
#[derive(Debug)]
pub(crate) struct Session {
    /// Directory of logs and data files.
    pub(crate) directory: PathBuf,
    /// Directory of sockets.
    pub(crate) sockets: SocketDirectory,
    /// The tree of peers.
    pub(crate) tree: Tree,
    /// Who runs where.
    pub(crate) cpus: Cpus,
    /// Rounds per row.
    pub(crate) rounds: usize,
    /// Duration of each measurement.
    pub(crate) run_time: Duration,
    /// Duration before the measurement.
    pub(crate) warm_up: Duration,
    /// Whether system calls can be counted.
    pub(crate) counts_syscalls: bool,
    /// The machine, before the run; a fact each.
    pub(crate) machine: Vec<String>,
}

impl Session {
    /// Prepares a run of `rounds` rounds of `usual` milliseconds, or `quick` in a short run. Builds ringmill if need be. Binds
    /// this thread, which reads /proc while servers are measured, to the client's CPU.
    pub(crate) fn new(options: &Options, rounds: usize, times: [u64; 2]) -> Result<Self> {
        let cpus = Cpus::choose(options)?;
        let session = Self { cpus, ..Self::unbound(options, rounds, times)? };
        if let Some(cpu) = cpus.client {
            affinity::bind_this_thread(cpu)?;
        }
        Ok(session)
    }

    /// The same, with clients and servers on any CPU.
    pub(crate) fn unbound(
        options: &Options,
        rounds: usize,
        [quick, usual]: [u64; 2],
    ) -> Result<Self> {
        build_ringmill(&options.places())?;
        let directory = make_directory(&options.directory()?)?;
        Ok(Self {
            machine: machine::describe(&directory),
            directory,
            sockets: SocketDirectory::new()?,
            tree: options.places().tree(),
            cpus: Cpus { client: None, server: None },
            rounds: options.rounds(rounds)?,
            run_time: options.run_time(quick, usual),
            warm_up: Duration::from_millis(if options.quick() { 100 } else { 500 }),
            counts_syscalls: syscalls::can_count(),
        })
    }

    /// Starts a server on its CPU.
    pub(crate) fn start(
        &self,
        name: &str,
        command: &[OsString],
        sockets: &[PathBuf],
    ) -> Result<Server> {
        Server::spawn(name, command, sockets, self.cpus.server, &self.directory)
    }

    /// How it is measured, for the report.
    pub(crate) fn method(&self, of: &str) -> String {
        let (rounds, run_time) = (self.rounds, self.run_time);
        format!("Method: {rounds} round(s) of {run_time:?} {of}; {}{DEBUG}", self.cpus.describe())
    }

    /// A contender with its version and a command, without machine-dependent paths, for the report.
    pub(crate) fn describe(&self, contender: &Contender, commands: &[Vec<OsString>]) -> String {
        let places = [
            (&*self.directory, "$DIR"),
            (&*self.sockets.0, "$SOCKETS"),
            (self.tree.path(), "$RINGMILL_PEERS"),
        ];
        let mut text = format!("{}: {}", contender.name, contender.version);
        for command in commands {
            text += &format!("\n  {}", command_to_show(command, &places));
        }
        text
    }
}

/// A command with names in place of directories.
fn command_to_show(command: &[OsString], places: &[(&Path, &str)]) -> String {
    // The loader of another tree and its options precede the program.
    let loader = command.iter().position(|word| word == LIBRARY_PATH).map_or(0, |at| at + 2);
    let show = |(i, word): (usize, &OsString)| match i {
        0 => Path::new(word).file_name().unwrap_or(word).to_string_lossy().into_owned(),
        _ => places.iter().fold(word.to_string_lossy().into_owned(), |word, (path, name)| {
            word.replace(&*path.to_string_lossy(), name)
        }),
    };
    command[loader..].iter().enumerate().map(show).collect::<Vec<_>>().join(" ")
}

/// The CPUs of client and server, if they are bound.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpus {
    /// That of the client's threads.
    pub(crate) client: Option<usize>,
    /// That of the servers.
    pub(crate) server: Option<usize>,
}

impl Cpus {
    /// The given ones; by default apart where there are two, unbound where there is one.
    pub(crate) fn choose(options: &Options) -> Result<Self> {
        let allowed = affinity::allowed()?;
        let pick = |option, nth: usize| match options.number(option)? {
            Some(cpu) if !allowed.contains(&cpu) => bail!("CPU {cpu} is not one of {allowed:?}"),
            Some(cpu) => Ok(Some(cpu)),
            None if allowed.len() < 2 => Ok(None),
            None => Ok(allowed.get(nth).copied()),
        };
        Ok(Self { client: pick("client-cpu", 0)?, server: pick("server-cpu", 1)? })
    }

    /// For the report.
    pub(crate) fn describe(self) -> String {
        match (self.client, self.server) {
            (Some(client), Some(server)) if client != server => {
                format!("client on CPU {client}, server on CPU {server}")
            }
            _ => "client and server share the CPUs, so that figures of both are mixed up".into(),
        }
    }
}

/// A directory for sockets, removed when dropped. Not below the target directory, whose path may exceed the limit of a
/// socket's path (108 bytes, unix(7)).
#[derive(Debug)]
pub(crate) struct SocketDirectory(pub(crate) PathBuf);

impl SocketDirectory {
    fn new() -> Result<Self> {
        let template = std::env::temp_dir().join("bench-XXXXXX");
        let path = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("making a directory like {}", template.display()))?;
        Ok(Self(path))
    }

    /// The socket of that name.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes the directory for logs and data.
fn make_directory(directory: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("making the directory {}", directory.display()))?;
    // Absolute, since servers may change their working directory.
    directory.canonicalize().with_context(|| format!("resolving {}", directory.display()))
}

/// Builds ringmill beside this program, unless another one is to be run. Only if cargo has started this program: `cargo run -p
/// bench` does not build ringmill, and an old one would be measured.
fn build_ringmill(places: &Places) -> Result<()> {
    if places.ringmill.is_some() || std::env::var_os("CARGO").is_none() {
        return Ok(());
    }
    let this = beside_this("ringmill")?;
    let mut command = cargo();
    command.args(["build", "-p", "ringmill"]);
    if this.parent().and_then(Path::file_name).is_some_and(|name| name == "release") {
        command.arg("--release");
    }
    let status = command.status().context("running cargo to build ringmill")?;
    ensure!(status.success(), "building ringmill failed ({status})");
    Ok(())
}

/// The cargo that has started this program, or any.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // What cargo tells this program of its package would have it build anew what depends on such variables.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}
