//! Options common to the commands that measure in rounds.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lexopt::prelude::{Long, Short, ValueExt};

use crate::peers::contender::Places;

/// Options of all these commands.
const ALWAYS: &[&str] = &["quick", "rounds", "runtime", "dir", "json"];
/// Options of commands that start daemons.
pub(super) const SERVERS: &[&str] = &["ringmill", "client-cpu", "server-cpu"];
/// Options of commands that also start other servers.
pub(super) const PEERS: &[&str] = &["contenders", "qsd-chroot"];

/// The options of a run. A command ignores those that it does not accept.
#[derive(Debug)]
pub(crate) struct RunOptions {
    /// A short run, to check that everything works.
    pub(crate) quick: bool,
    /// Only rows whose name contains one of these; all if empty.
    only: Vec<String>,
    /// Names of the contenders; the default ones if empty.
    pub(crate) contenders: Vec<String>,
    /// Paths of the contenders.
    pub(crate) places: Places,
    /// Rounds per row or figure, at least 1.
    rounds: Option<usize>,
    /// Duration of each measurement.
    run_time: Option<Duration>,
    /// Directory of logs and of the data file, whose file system is measured.
    pub(crate) directory: PathBuf,
    /// The CPUs of client and server; by default the first two.
    pub(crate) client_cpu: Option<usize>,
    /// See [`Self::client_cpu`].
    pub(crate) server_cpu: Option<usize>,
    /// Directory of plots.
    pub(crate) plots: Option<PathBuf>,
    /// The file to write the report into.
    pub(crate) json: Option<PathBuf>,
}

impl RunOptions {
    /// Parses the remaining arguments: options common to all commands, and the `accepted` ones. `own` parses an option of the
    /// command itself, and returns whether it exists. Returns `None` for `--help`.
    pub(super) fn read(
        parser: &mut lexopt::Parser,
        accepted: &[&[&str]],
        mut own: impl FnMut(&str, &mut lexopt::Parser) -> Result<bool>,
    ) -> Result<Option<Self>> {
        let mut options = Self {
            quick: false,
            only: Vec::new(),
            contenders: Vec::new(),
            places: Places::default(),
            rounds: None,
            run_time: None,
            directory: default_directory()?,
            client_cpu: None,
            server_cpu: None,
            plots: None,
            json: None,
        };
        while let Some(argument) = parser.next()? {
            let name = match argument {
                Short('h') | Long("help") => return Ok(None),
                Long(name) => name.to_owned(),
                argument => return Err(argument.unexpected().into()),
            };
            if accepted.iter().chain([&ALWAYS]).any(|group| group.contains(&name.as_str())) {
                options.take(&name, parser)?;
            } else if !own(&name, parser)? {
                return Err(lexopt::Error::UnexpectedOption(format!("--{name}")).into());
            }
        }
        ensure!(options.rounds != Some(0), "--rounds has to be at least 1");
        Ok(Some(options))
    }

    fn take(&mut self, name: &str, parser: &mut lexopt::Parser) -> Result<()> {
        match name {
            "quick" => self.quick = true,
            "rows" => self.only = list(&string(parser)?),
            "contenders" => self.contenders = list(&string(parser)?),
            "qsd" => self.places.qsd = Some(parser.value()?.into()),
            "qsd-chroot" => self.places.qsd_tree = Some(parser.value()?.into()),
            "ringmill" => self.places.ringmill = Some(parser.value()?.into()),
            "rounds" => self.rounds = Some(number(parser, "--rounds")?),
            "runtime" => self.run_time = Some(seconds(parser, "--runtime")?),
            "dir" => self.directory = parser.value()?.into(),
            "client-cpu" => self.client_cpu = Some(number(parser, "--client-cpu")?),
            "server-cpu" => self.server_cpu = Some(number(parser, "--server-cpu")?),
            "plots" => self.plots = Some(parser.value()?.into()),
            "json" => self.json = Some(parser.value()?.into()),
            _ => unreachable!("--{name} is accepted, but not implemented"),
        }
        Ok(())
    }

    /// Whether to measure the row with that name.
    pub(crate) fn wants(&self, row: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| row.contains(part))
    }

    /// The number of rounds: by default one in a short run, else `usual`.
    pub(crate) fn rounds(&self, usual: usize) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { usual })
    }

    /// The duration of each measurement: by default these milliseconds.
    pub(crate) fn run_time(&self, quick: u64, usual: u64) -> Duration {
        let milliseconds = if self.quick { quick } else { usual };
        self.run_time.unwrap_or(Duration::from_millis(milliseconds))
    }
}

/// `target/bench`, beside the directory this program was built into.
pub(super) fn default_directory() -> Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program's own path")?;
    let target = this.parent().and_then(|profile| profile.parent());
    Ok(target.context("this program is not in a target directory; use --dir")?.join("bench"))
}

pub(super) fn string(parser: &mut lexopt::Parser) -> Result<String> {
    Ok(parser.value()?.string()?)
}

pub(super) fn list(text: &str) -> Vec<String> {
    text.split(',').filter(|item| !item.is_empty()).map(String::from).collect()
}

pub(super) fn number<T: FromStr>(parser: &mut lexopt::Parser, option: &str) -> Result<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    let text = string(parser)?;
    text.parse().with_context(|| format!("{option}={text}"))
}

pub(super) fn seconds(parser: &mut lexopt::Parser, option: &str) -> Result<Duration> {
    let seconds: f64 = number(parser, option)?;
    Duration::try_from_secs_f64(seconds).with_context(|| format!("{option}={seconds}"))
}
