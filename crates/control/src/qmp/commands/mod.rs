//! The commands there are: one row each, from which they are found, read, listed and described.
//!
//! A command is a [`QmpCommand`]. The daemon has most of them, each with the function that carries it out, and
//! [adds](add) them. Those below are still carried out by a match in the daemon: each family has a file, with a table of
//! [`CommandRow`]s, and a line in [`FAMILIES`].

mod block;
mod export;
mod job;
mod monitor;
mod nbd;
mod object;
mod snapshot;
mod stats;

use std::sync::OnceLock;

use ::block::options::BlockdevOptions;
use serde_json::{Map, Value as Json};

pub(super) use self::monitor::{NEGOTIATION, version};
pub use self::snapshot::SnapshotSync;
pub use self::stats::LatencyBoundaries;
use super::reply::{Member, Reply, Returns};
use super::session::Capabilities;
use crate::error::OptionError;
use crate::job::JobCommand;
use crate::shape::Shape;
use crate::storage_daemon::{Action, Step};
use crate::table::{self, Context, Reads};
use crate::value::{Dialect, Object, Value};

/// The commands that are a [`Command`].
static FAMILIES: &[&[CommandRow]] = &[
    monitor::COMMANDS,
    object::COMMANDS,
    block::COMMANDS,
    export::COMMANDS,
    nbd::COMMANDS,
    job::COMMANDS,
    snapshot::COMMANDS,
    stats::COMMANDS,
];

/// A command, as help texts, the schema and the reference describe it.
pub trait QmpCommand: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// What it does, in one sentence.
    fn help(&self) -> &'static str;

    /// Arguments it can have, as JSON; empty when it needs none.
    fn example(&self) -> &'static str;

    /// Returns what the arguments may be.
    fn arguments(&self) -> Shape;

    /// Returns the option of the command line that has the same arguments; empty when there is none.
    fn option(&self) -> &'static str;

    /// Returns what comes back.
    fn returns(&self) -> &Returns;

    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    fn check(&self, arguments: Object) -> Result<(), OptionError>;
}

/// The daemon's commands.
static ADDED: OnceLock<Vec<&'static dyn QmpCommand>> = OnceLock::new();

/// Adds the commands that the program carries out by itself. Called at most once, before anything reads a command.
///
/// # Errors
///
/// Commands were added before, or the name is taken.
pub fn add(commands: Vec<&'static dyn QmpCommand>) -> Result<(), AddError> {
    let taken = |command: &&&'static dyn QmpCommand| find(command.name()).is_some();
    if let Some(command) = commands.iter().find(taken) {
        return Err(AddError::Taken(command.name()));
    }
    ADDED.set(commands).map_err(|_| AddError::Twice)
}

/// Why commands were not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddError {
    /// There is a command of that name.
    Taken(&'static str),
    /// Commands were added before.
    Twice,
}

/// A command: a row of the table.
pub(crate) struct CommandRow {
    name: &'static str,
    help: &'static str,
    example: &'static str,
    arguments: Arguments,
    returns: Returns,
}

/// How arguments are read.
enum Arguments {
    /// There are none.
    None(fn() -> Job),
    /// By this table, which makes the job of them.
    Table(&'static dyn Reads<Job>),
    /// As an option of the command line.
    Option {
        /// The option.
        option: &'static str,
        /// Reads it.
        read: fn(Object, &Context) -> Result<Action, OptionError>,
        /// What it may be.
        shape: fn() -> Shape,
    },
}

/// What is to be done with a command.
pub(crate) enum Job {
    /// Leave the negotiation behind.
    Negotiate(Capabilities),
    /// Answer by this.
    Answer(fn() -> Json),
    /// Have the daemon carry it out.
    Run(Command),
}

/// What a client may ask of the daemon. The rest is between it and its session.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// `object-add`, `blockdev-add`, `block-export-add`: as the option of the command line.
    Add(Box<Step>),
    /// `object-del`.
    ObjectDel {
        /// The object's name.
        id: String,
    },
    /// `blockdev-del`.
    BlockdevDel {
        /// The node's name.
        node_name: String,
    },
    /// `blockdev-set-active`.
    BlockdevSetActive {
        /// The node's name; `None`: all.
        node_name: Option<String>,
        /// Whether it is to be active.
        active: bool,
    },
    /// `block_resize`.
    BlockResize {
        /// `device`, which no node here has.
        device: Option<String>,
        /// The node's name.
        node_name: Option<String>,
        /// Bytes, as given.
        size: i64,
    },
    /// `block-export-del`.
    BlockExportDel {
        /// The export's name.
        id: String,
        /// Whether to disturb its client.
        mode: DeleteMode,
    },
    /// `x-block-export-resume`.
    XBlockExportResume {
        /// The export's name.
        id: String,
    },
    /// `nbd-server-stop`.
    NbdServerStop,
    /// `nbd-server-add`.
    NbdServerAdd {
        /// The node's name.
        device: String,
        /// The export's name, and its id.
        name: String,
        /// For people.
        description: String,
        /// Whether clients may write, if the node can be written to.
        writable: bool,
        /// A dirty bitmap that clients can ask for.
        bitmap: Option<String>,
    },
    /// `nbd-server-remove`.
    NbdServerRemove {
        /// The export's id.
        name: String,
        /// Whether to disturb its clients.
        mode: DeleteMode,
    },
    /// `qom-list`.
    QomList {
        /// Of the object: `/objects/ID`, or just `ID`.
        path: String,
    },
    /// `qom-get`.
    QomGet {
        /// Of the object.
        path: String,
        /// The property's name.
        property: String,
    },
    /// `qom-set`.
    QomSet {
        /// Of the object.
        path: String,
        /// The property's name.
        property: String,
        /// What it is set to.
        value: Value,
    },
    /// `query-iothreads`.
    QueryIothreads,
    /// `query-named-block-nodes`.
    QueryNamedBlockNodes {
        /// Without what lies below each node's image.
        flat: bool,
    },
    /// `query-block-exports`.
    QueryBlockExports,
    /// `query-blockstats`.
    QueryBlockstats {
        /// Of nodes, not of exports.
        nodes: bool,
    },
    /// `block-latency-histogram-set`.
    BlockLatencyHistogramSet {
        /// The export's name.
        id: String,
        /// What it is to be counted by; `None`: not at all any more.
        boundaries: Option<LatencyBoundaries>,
    },
    /// `x-query-export-stats`.
    XQueryExportStats,
    /// `x-query-iothread-stats`.
    XQueryIothreadStats,
    /// `x-query-sandbox`.
    XQuerySandbox,
    /// `blockdev-reopen`.
    BlockdevReopen {
        /// All options of each node.
        options: Vec<BlockdevOptions>,
    },
    /// `blockdev-snapshot-sync`.
    BlockdevSnapshotSync(Box<SnapshotSync>),
    /// `blockdev-snapshot`.
    BlockdevSnapshot {
        /// The node that stays as it is.
        node: String,
        /// The image that comes above it.
        overlay: String,
    },
    /// Those about jobs.
    Job(Box<JobCommand>),
    /// `x-upgrade`.
    Upgrade,
    /// `quit`.
    Quit,
}

/// `mode` of `block-export-del`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeleteMode {
    /// Fail when a client uses it.
    #[default]
    Safe,
    /// Send the client away.
    Hard,
}

impl CommandRow {
    /// Reads the arguments.
    pub(crate) fn read(&self, given: Object) -> Result<Job, OptionError> {
        let at = Context::new(Dialect::Json);
        match &self.arguments {
            Arguments::None(job) => {
                table::refuse_rest(&given, &at, self.name, [].into_iter())?;
                Ok(job())
            }
            Arguments::Table(table) => table.read(given, &at, &[], self.name),
            Arguments::Option { option, read, .. } => {
                // As the command line would have it.
                let origin = format!("{option} {}", Json::from(Value::Object(given.clone())));
                let step = Step { origin, action: read(given, &at)? };
                Ok(Job::Run(Command::Add(Box::new(step))))
            }
        }
    }
}

impl QmpCommand for CommandRow {
    fn name(&self) -> &'static str {
        self.name
    }

    fn help(&self) -> &'static str {
        self.help
    }

    fn example(&self) -> &'static str {
        self.example
    }

    fn arguments(&self) -> Shape {
        match &self.arguments {
            Arguments::None(_) => Shape::Object(Vec::new()),
            Arguments::Table(table) => Shape::Object(table.members()),
            Arguments::Option { shape, .. } => shape(),
        }
    }

    fn option(&self) -> &'static str {
        match self.arguments {
            Arguments::Option { option, .. } => option,
            Arguments::None(_) | Arguments::Table(_) => "",
        }
    }

    fn returns(&self) -> &Returns {
        &self.returns
    }

    fn check(&self, arguments: Object) -> Result<(), OptionError> {
        self.read(arguments).map(drop)
    }
}

/// Reads the arguments of a command that is a [`Command`]: an action of a transaction.
///
/// # Errors
///
/// What is wrong with them, or the command is another one.
pub fn read_command(name: &str, arguments: Object) -> Result<Command, OptionError> {
    let row = find_row(name).map(|row| row.read(arguments)).transpose()?;
    match row {
        Some(Job::Run(command)) => Ok(command),
        _ => Err(OptionError::new(format!("The command {name} has not been found"))),
    }
}

/// Returns what the arguments of a command may be.
pub fn arguments_of(name: &str) -> Shape {
    find(name).map_or(Shape::Object(Vec::new()), |command| command.arguments())
}

/// Arguments as the tables read them.
pub(crate) fn given(arguments: Map<String, Json>) -> Object {
    arguments.into_iter().map(|(name, value)| (name, value.into())).collect()
}

/// The command of that name.
pub(crate) fn find(name: &str) -> Option<&'static dyn QmpCommand> {
    all().find(|command| command.name() == name)
}

/// The command of that name, if it is a [`Command`].
pub(crate) fn find_row(name: &str) -> Option<&'static CommandRow> {
    rows().find(|row| row.name == name)
}

fn rows() -> impl Iterator<Item = &'static CommandRow> {
    FAMILIES.iter().copied().flatten()
}

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static dyn QmpCommand> {
    let added = ADDED.get().into_iter().flatten().copied();
    rows().map(|row| row as &dyn QmpCommand).chain(added)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_right() {
        for row in rows() {
            let arguments = match row.example {
                "" => Map::new(),
                example => serde_json::from_str(example).expect(row.name),
            };
            if let Err(error) = row.check(given(arguments)) {
                panic!("{}: {error}", row.name);
            }
        }
    }
}
