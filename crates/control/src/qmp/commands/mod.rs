//! All commands. A row describes each one for look-up, parsing, lists and help.
//!
//! A command is a [`QmpCommand`]. Most are implemented in the daemon, which [adds](add) them. The older ones below are
//! carried out by a match in the daemon. Each of their families has a file with a table of [`CommandRow`]s, and a line in
//! [`FAMILIES`].

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

/// A command, for help texts, the schema and the reference.
pub trait QmpCommand: Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// What it does, in one sentence.
    fn help(&self) -> &'static str;

    /// Example arguments, as JSON; empty if none are required.
    fn example(&self) -> &'static str;

    /// Returns the type of the arguments.
    fn arguments(&self) -> Shape;

    /// Returns the option of the command line that has the same arguments; empty when there is none.
    fn option(&self) -> &'static str;

    /// Returns the type of the result.
    fn returns(&self) -> &Returns;

    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// The error in the arguments.
    fn check(&self, arguments: Object) -> Result<(), OptionError>;
}

/// The daemon's commands.
static ADDED: OnceLock<Vec<&'static dyn QmpCommand>> = OnceLock::new();

/// Adds the commands that the program implements. Call this at most once, before any command is read.
///
/// # Errors
///
/// Commands were added before, or a name is taken.
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
    /// A command of that name exists.
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

/// How arguments are parsed.
enum Arguments {
    /// None.
    None(fn() -> Job),
    /// By this table, which makes the job from them.
    Table(&'static dyn Reads<Job>),
    /// As an option of the command line.
    Option {
        /// The option.
        option: &'static str,
        /// Parses it.
        read: fn(Object, &Context) -> Result<Action, OptionError>,
        /// Its type.
        shape: fn() -> Shape,
    },
}

/// How a command is carried out.
pub(crate) enum Job {
    /// End the negotiation.
    Negotiate(Capabilities),
    /// Answer with this.
    Answer(fn() -> Json),
    /// Let the daemon carry it out.
    Run(Command),
}

/// A command for the daemon. The session handles the others itself.
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
        /// The node's name; `None`: all nodes.
        node_name: Option<String>,
        /// Whether the node becomes active.
        active: bool,
    },
    /// `block_resize`.
    BlockResize {
        /// `device`, which matches no node here.
        device: Option<String>,
        /// The node's name.
        node_name: Option<String>,
        /// The new size in bytes, unchecked.
        size: i64,
    },
    /// `block-export-del`.
    BlockExportDel {
        /// The export's name.
        id: String,
        /// Whether to disconnect its client.
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
        /// Description for people.
        description: String,
        /// Whether clients may write, if the node is writable.
        writable: bool,
    },
    /// `nbd-server-remove`.
    NbdServerRemove {
        /// The export's id.
        name: String,
        /// Whether to disconnect its clients.
        mode: DeleteMode,
    },
    /// `qom-list`.
    QomList {
        /// Of the object: `/objects/ID`, or just `ID`.
        path: String,
    },
    /// `qom-get`.
    QomGet {
        /// Path of the object.
        path: String,
        /// The property's name.
        property: String,
    },
    /// `qom-set`.
    QomSet {
        /// Path of the object.
        path: String,
        /// The property's name.
        property: String,
        /// The new value.
        value: Value,
    },
    /// `query-iothreads`.
    QueryIothreads,
    /// `query-named-block-nodes`.
    QueryNamedBlockNodes {
        /// Omit the nodes below each node's image.
        flat: bool,
    },
    /// `query-block-exports`.
    QueryBlockExports,
    /// `query-blockstats`.
    QueryBlockstats {
        /// For nodes, not for exports.
        nodes: bool,
    },
    /// `block-latency-histogram-set`.
    BlockLatencyHistogramSet {
        /// The export's name.
        id: String,
        /// The boundaries; `None` removes the histograms.
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
        /// The backing node, which no longer changes.
        node: String,
        /// The overlay.
        overlay: String,
    },
    /// Commands about jobs.
    Job(Box<JobCommand>),
    /// `x-upgrade`.
    Upgrade,
    /// `quit`.
    Quit,
}

/// `mode` of `block-export-del`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeleteMode {
    /// Fail if a client uses it.
    #[default]
    Safe,
    /// Disconnect the client.
    Hard,
}

impl CommandRow {
    /// Parses the arguments.
    pub(crate) fn read(&self, given: Object) -> Result<Job, OptionError> {
        let at = Context::new(Dialect::Json);
        match &self.arguments {
            Arguments::None(job) => {
                table::refuse_rest(&given, &at, self.name, [].into_iter())?;
                Ok(job())
            }
            Arguments::Table(table) => table.read(given, &at, &[], self.name),
            Arguments::Option { option, read, .. } => {
                // The equivalent option of the command line.
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
/// The error in the arguments, or the command is not a [`Command`].
pub fn read_command(name: &str, arguments: Object) -> Result<Command, OptionError> {
    let row = find_row(name).map(|row| row.read(arguments)).transpose()?;
    match row {
        Some(Job::Run(command)) => Ok(command),
        _ => Err(OptionError::new(format!("The command {name} has not been found"))),
    }
}

/// Returns the type of a command's arguments.
pub fn arguments_of(name: &str) -> Shape {
    find(name).map_or(Shape::Object(Vec::new()), |command| command.arguments())
}

/// Arguments in the form of the tables.
pub(crate) fn given(arguments: Map<String, Json>) -> Object {
    arguments.into_iter().map(|(name, value)| (name, value.into())).collect()
}

/// Looks a command up by name.
pub(crate) fn find(name: &str) -> Option<&'static dyn QmpCommand> {
    all().find(|command| command.name() == name)
}

/// Looks a [`Command`] up by name.
pub(crate) fn find_row(name: &str) -> Option<&'static CommandRow> {
    rows().find(|row| row.name == name)
}

fn rows() -> impl Iterator<Item = &'static CommandRow> {
    FAMILIES.iter().copied().flatten()
}

/// All commands.
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
