//! The command line and `--help`, from a table of commands and a table of options.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lexopt::prelude::{Long, Short, Value, ValueExt};

use crate::peers::contender::Places;

/// A command of this program.
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// What it measures, how long that takes, and its defaults.
    pub about: &'static str,
    /// The names of its options, in groups.
    pub options: &'static [&'static [&'static str]],
    /// Carries it out.
    pub run: fn(&Options) -> Result<()>,
}

/// Options of the commands that measure in rounds.
pub const ROUNDS: &[&str] = &["quick", "rounds", "runtime", "dir", "json"];
/// Options of the commands that start daemons.
pub(crate) const SERVERS: &[&str] = &["ringmill", "client-cpu", "server-cpu"];
/// Options of the commands that also start other servers.
pub(crate) const PEERS: &[&str] = &["contenders", "qsd-chroot"];

/// The value of an option.
#[derive(Clone, Copy)]
enum Kind {
    /// None.
    Flag,
    /// Any text, called so by the help.
    Text(&'static str),
    Number,
    Seconds,
    /// One of these words.
    Words(&'static [&'static str]),
}

use Kind::{Flag, Number, Seconds, Text, Words};

/// All options: name, value, what it is for.
const OPTIONS: &[(&str, Kind, &str)] = &[
    ("quick", Flag, "a short run, to see that all of it works"),
    ("full", Flag, "the rows with something to reach, and the bare ring"),
    ("rows", Text("TEXT,..."), "only rows whose names contain one of these"),
    ("rounds", Number, "rounds per row; 1 with --quick"),
    ("runtime", Seconds, "measured time per round"),
    ("size", Number, "MiB of data in an image (1024; with --quick 64)"),
    (
        "contenders",
        Text("NAME,..."),
        "only these; the first is what others are compared with. One named twice shows the noise",
    ),
    (
        "client",
        Words(&["fio", "own"]),
        "sends the load; by default fio with --full and --quick if scripts/setup-peers.sh has made it",
    ),
    ("exports", Text("N,..."), "numbers of exports (1,10,100,500; with --quick 1,20)"),
    ("qsd", Text("PATH"), "qemu-storage-daemon to run"),
    (
        "qsd-chroot",
        Text("DIR"),
        "Debian tree with the peers (that of scripts/setup-peers.sh, if there is one, else PATH)",
    ),
    ("ringmill", Text("PATH"), "ringmill to run (the one beside this program)"),
    ("dir", Text("DIR"), "for logs and data files, whose file system is measured (target/bench)"),
    ("client-cpu", Number, "CPU of the client (the first)"),
    ("server-cpu", Number, "CPU of the servers (the second)"),
    (
        "json",
        Text("FILE"),
        "also write the report into FILE; docs/plots/draw draws from such files",
    ),
    ("record", Flag, "record the counts"),
    ("output", Text("FILE"), "the graph (docs/benchmarks/flame-read-64.svg)"),
    ("socket", Text("PATH"), "the server's"),
    ("rw", Words(&["read", "write", "randread", "randwrite"]), "what requests do (randread)"),
    ("bs", Number, "block size, bytes (4096)"),
    ("depth", Number, "requests in flight per queue (1)"),
    ("queues", Number, "virtqueues (1)"),
    ("threads", Words(&["one", "per-queue"]), "client threads (one)"),
    ("rate", Number, "requests per second, by the clock (as fast as served)"),
    ("burst", Number, "requests that arrive together, with --rate (1)"),
    ("wait", Words(&["signal", "poll"]), "for completions (signal)"),
    ("warm-up", Seconds, "load before anything counts (0.5)"),
    ("cpu", Number, "CPU to bind the client to (none)"),
    ("server-pid", Number, "also print this process's CPU time per request"),
];

impl Kind {
    fn shown(self) -> String {
        match self {
            Flag => String::new(),
            Text(name) => format!(" {name}"),
            Number => " N".into(),
            Seconds => " SECONDS".into(),
            Words(words) => format!(" {}", words.join("|")),
        }
    }

    fn check(self, name: &str, text: &str) -> Result<()> {
        let context = || format!("--{name}={text}");
        match self {
            Flag | Text(_) => {}
            Number => drop(text.parse::<f64>().with_context(context)?),
            Seconds => drop(seconds(text).with_context(context)?),
            Words(words) => {
                ensure!(words.contains(&text), "{}: known are {}", context(), words.join(", "));
            }
        }
        Ok(())
    }
}

fn seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.parse()?)?)
}

/// The options that were given.
#[derive(Debug, Default)]
pub struct Options(Vec<(&'static str, String)>);

/// Reads the command line. `None`: `--help`.
pub(crate) fn parse(
    commands: &'static [Command],
    mut parser: lexopt::Parser,
) -> Result<Option<(&'static Command, Options)>> {
    let known = || commands.iter().map(|command| command.name).collect::<Vec<_>>().join(", ");
    let command = match parser.next()? {
        Some(Value(name)) => {
            commands.iter().find(|command| command.name == name).with_context(|| {
                format!("unknown command {}; known are {}", name.display(), known())
            })?
        }
        Some(Short('h') | Long("help")) => return Ok(None),
        Some(argument) => return Err(argument.unexpected().into()),
        None => bail!("no command; known are {} (bench --help tells more)", known()),
    };
    let mut options = Options::default();
    while let Some(argument) = parser.next()? {
        let name = match argument {
            Short('h') | Long("help") => return Ok(None),
            Long(name) => name.to_owned(),
            argument => return Err(argument.unexpected().into()),
        };
        let accepted = command.options.concat().contains(&name.as_str());
        let option = OPTIONS.iter().find(|(known, ..)| accepted && *known == name);
        let Some(&(name, kind, _)) = option else {
            return Err(lexopt::Error::UnexpectedOption(format!("--{name}")).into());
        };
        let text = match kind {
            Flag => String::new(),
            _ => parser.value()?.string()?,
        };
        kind.check(name, &text)?;
        options.0.push((name, text));
    }
    ensure!(options.number::<f64>("rounds")? != Some(0.0), "--rounds has to be at least 1");
    Ok(Some((command, options)))
}

/// Carries out the command line.
pub fn run(commands: &'static [Command]) -> Result<()> {
    match parse(commands, lexopt::Parser::from_env())? {
        Some((command, options)) => (command.run)(&options),
        None => {
            print!("{}", help(commands));
            Ok(())
        }
    }
}

/// `bench --help`.
fn help(commands: &[Command]) -> String {
    let mut text = "Measures vhost-user-blk servers, and event loops.\n\n".to_owned();
    for command in commands {
        text += &format!("bench {:12} {}\n", command.name, command.about);
        let names = command.options.concat();
        text += &format!("{:19}--{}\n", "", names.join(" --"));
    }
    text += "\noptions:\n";
    for (name, kind, about) in OPTIONS {
        text += &format!("  {:28} {about}\n", format!("--{name}{}", kind.shown()));
    }
    text
}

impl Options {
    /// Whether an option was given.
    pub fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// The value of an option; of several the last.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(given, _)| *given == name).map(|(_, text)| text.as_str())
    }

    /// The value of an option that names a file or a folder.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.text(name).map(PathBuf::from)
    }

    /// The value of an option as a number.
    pub fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        let parse = |text: &str| text.parse().with_context(|| format!("--{name}={text}"));
        self.text(name).map(parse).transpose()
    }

    /// The value of an option as seconds.
    pub fn duration(&self, name: &str) -> Option<Duration> {
        self.text(name).and_then(|text| seconds(text).ok())
    }

    /// The items of a list; none if it was not given.
    pub fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').filter(|item| !item.is_empty()).map(String::from).collect()
    }

    /// Whether the run is a short one, to check that everything works.
    pub fn quick(&self) -> bool {
        self.has("quick")
    }

    /// Whether to measure the row with that name.
    pub fn wants(&self, row: &str) -> bool {
        let rows = self.list("rows");
        rows.is_empty() || rows.iter().any(|part| row.contains(part))
    }

    /// Keeps the rows that are to be measured. Fails if that is none.
    pub fn choose<R>(&self, mut rows: Vec<R>, name: impl Fn(&R) -> String) -> Result<Vec<R>> {
        let known = rows.iter().map(&name).collect::<Vec<_>>().join("; ");
        rows.retain(|row| self.wants(&name(row)));
        ensure!(!rows.is_empty(), "--rows matches none of: {known}");
        Ok(rows)
    }

    /// The number of rounds: by default one in a short run, else `usual`.
    pub fn rounds(&self, usual: usize) -> Result<usize> {
        Ok(self.number("rounds")?.unwrap_or(if self.quick() { 1 } else { usual }))
    }

    /// The duration of each measurement: by default these milliseconds.
    pub fn run_time(&self, quick: u64, usual: u64) -> Duration {
        let milliseconds = if self.quick() { quick } else { usual };
        self.duration("runtime").unwrap_or(Duration::from_millis(milliseconds))
    }

    /// Directory of logs and of data files: `target/bench`, beside the directory this program was built into.
    pub fn directory(&self) -> Result<PathBuf> {
        if let Some(directory) = self.path("dir") {
            return Ok(directory);
        }
        let this = std::env::current_exe().context("finding this program's own path")?;
        let target = this.parent().and_then(|profile| profile.parent());
        Ok(target.context("this program is not in a target directory; use --dir")?.join("bench"))
    }

    /// Paths of servers.
    pub(crate) fn places(&self) -> Places {
        Places {
            qsd: self.path("qsd"),
            qsd_tree: self.path("qsd-chroot"),
            ringmill: self.path("ringmill"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::COMMANDS;

    fn parsed(arguments: &str) -> Result<Option<(&'static Command, Options)>> {
        parse(COMMANDS, lexopt::Parser::from_args(arguments.split_whitespace()))
    }

    #[test]
    fn options_are_read() {
        let (command, options) =
            parsed("peers --quick --contenders qsd,qsd --client own --runtime 0.5")
                .unwrap()
                .unwrap();
        assert_eq!(command.name, "peers");
        assert!(options.quick() && !options.has("full"));
        assert_eq!(options.list("contenders"), ["qsd", "qsd"]);
        assert_eq!(options.text("client"), Some("own"));
        assert_eq!(
            (options.rounds(3).unwrap(), options.run_time(1, 2)),
            (1, Duration::from_millis(500))
        );
        assert!(parsed("load --socket s --help").unwrap().is_none());
    }

    #[test]
    fn the_help_has_all_commands_and_options_and_each_option_is_of_a_command() {
        let help = help(COMMANDS);
        for command in COMMANDS {
            assert!(help.contains(&format!("bench {}", command.name)));
            for name in command.options.concat() {
                assert!(
                    OPTIONS.iter().any(|(known, ..)| *known == name),
                    "{}: {name}",
                    command.name
                );
            }
        }
        for (name, ..) in OPTIONS {
            let is_used = |command: &Command| command.options.concat().contains(name);
            assert!(COMMANDS.iter().any(is_used), "--{name}");
        }
    }

    #[test]
    fn errors_name_what_is_wrong() {
        for (arguments, word) in [
            ("", "no command"),
            ("frobnicate", "frobnicate"),
            ("peers --frobnicate", "--frobnicate"),
            ("peers --client dd", "--client=dd"),
            ("peers --rounds x", "--rounds=x"),
            ("peers --rounds 0", "--rounds"),
            ("polling --contenders qsd", "--contenders"),
            ("peers --runtime -1", "--runtime=-1"),
            ("load --socket s --rw trim", "--rw=trim"),
        ] {
            let error = format!("{:#}", parsed(arguments).err().unwrap());
            assert!(error.contains(word), "{arguments}: {error}");
        }
        // What only the command itself can judge.
        for (arguments, word) in [
            ("scale --exports 1,x", "--exports"),
            ("results --rows f9", "--rows"),
            ("load", "--socket"),
            ("load --socket s --bs 1000", "--bs=1000"),
        ] {
            let (command, options) = parsed(arguments).unwrap().unwrap();
            let error = format!("{:#}", (command.run)(&options).unwrap_err());
            assert!(error.contains(word), "{arguments}: {error}");
        }
    }
}
