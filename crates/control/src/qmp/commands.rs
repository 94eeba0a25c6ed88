//! The commands there are: one row each, from which they are found, read and listed.

use serde_json::{Map, Value as Json, json};

use super::session::Capabilities;
use crate::error::OptionError;
use crate::storage_daemon::Action;
use crate::table::{self, Choice, Context, Field, Kind, Need};
use crate::value::{Dialect, Object, Value};
use crate::{blockdev, export, object};

/// What a client may ask of the daemon. The rest is between it and its session.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// `object-add`, `blockdev-add`, `block-export-add`: as the option of the command line.
    Add(Action),
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
    /// `block-export-del`.
    BlockExportDel {
        /// The export's name.
        id: String,
        /// Whether to disturb its client.
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
    QueryNamedBlockNodes,
    /// `query-block-exports`.
    QueryBlockExports,
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

/// What is to be done with a command.
pub(super) enum Job {
    /// Leave the negotiation behind.
    Negotiate(Capabilities),
    /// Answer by this.
    Answer(fn() -> Json),
    /// Have the daemon carry it out.
    Run(Command),
}

/// A command: a row of the table.
pub(super) struct CommandRow {
    /// Its name.
    pub(super) name: &'static str,
    read: Read,
}

/// How arguments are read.
enum Read {
    /// By this table.
    Table(&'static [Field<Arguments>], fn(Arguments) -> Job),
    /// As an option of the command line.
    Option(fn(Object, &Context) -> Result<Action, OptionError>),
}

/// The one command before all others.
pub(super) const NEGOTIATION: &str = "qmp_capabilities";

/// The arguments of a command while they are read.
#[derive(Default)]
struct Arguments {
    enable: Capabilities,
    id: String,
    node_name: String,
    mode: DeleteMode,
    path: String,
    property: String,
    value: Option<Value>,
}

impl CommandRow {
    /// Reads the arguments.
    pub(super) fn read(&self, arguments: Map<String, Json>) -> Result<Job, OptionError> {
        let at = Context::new(Dialect::Json);
        let mut given: Object =
            arguments.into_iter().map(|(name, value)| (name, value.into())).collect();
        match &self.read {
            Read::Table(fields, make) => {
                let mut arguments = Arguments::default();
                table::read(fields, &mut arguments, &mut given, &at)?;
                let known = fields.iter().map(|field| field.name);
                table::refuse_rest(&given, &at, self.name, known)?;
                Ok(make(arguments))
            }
            Read::Option(read) => Ok(Job::Run(Command::Add(read(given, &at)?))),
        }
    }
}

/// The command of that name.
pub(super) fn find(name: &str) -> Option<&'static CommandRow> {
    COMMANDS.iter().find(|row| row.name == name)
}

/// What `query-version` answers: the release of QEMU whose interface this is, and in `package` what
/// carries it out.
pub(super) fn version() -> Json {
    json!({
        "qemu": {"micro": 0, "minor": 1, "major": 11},
        "package": concat!("ringmill ", env!("CARGO_PKG_VERSION")),
    })
}

fn query_commands() -> Json {
    COMMANDS.iter().map(|row| json!({"name": row.name})).collect()
}

const fn text(
    name: &'static str,
    set: fn(&mut Arguments, String) -> table::Set,
    help: &'static str,
) -> Field<Arguments> {
    Field { name, kind: Kind::Text { meta: "<text>", set }, need: Need::Required, help }
}

const ID: Field<Arguments> = text("id", |a, id| put(&mut a.id, id), "its name");
const PATH: Field<Arguments> = text("path", |a, path| put(&mut a.path, path), "the object's path");
const PROPERTY: Field<Arguments> =
    text("property", |a, name| put(&mut a.property, name), "the property's name");
const NODE_NAME: Field<Arguments> =
    text("node-name", |a, name| put(&mut a.node_name, name), "the node's name");

static ENABLE: &[Field<Arguments>] = &[Field {
    name: "enable",
    kind: Kind::Nested { meta: "<capability>", rows: Vec::new, read: enable },
    need: Need::Optional("none"),
    help: "capabilities to enable",
}];
static IDS: &[Field<Arguments>] = &[ID];
static NODE_NAMES: &[Field<Arguments>] = &[NODE_NAME];
static EXPORT_DEL: &[Field<Arguments>] = &[
    ID,
    Field {
        name: "mode",
        kind: Kind::Choice(&[
            Choice {
                name: "safe",
                help: "fail when a client uses it",
                set: |a| put(&mut a.mode, DeleteMode::Safe),
            },
            Choice {
                name: "hard",
                help: "send its client away",
                set: |a| put(&mut a.mode, DeleteMode::Hard),
            },
        ]),
        need: Need::Default("safe"),
        help: "whether its client may be sent away",
    },
];
static QOM_LIST: &[Field<Arguments>] = &[PATH];
static QOM_GET: &[Field<Arguments>] = &[PATH, PROPERTY];
static QOM_SET: &[Field<Arguments>] = &[
    PATH,
    PROPERTY,
    Field {
        name: "value",
        kind: Kind::Nested {
            meta: "<value>",
            rows: Vec::new,
            read: |a, value, _| put(&mut a.value, Some(value)),
        },
        need: Need::Required,
        help: "what the property is set to",
    },
];
static NAMED_BLOCK_NODES: &[Field<Arguments>] = &[Field {
    name: "flat",
    // Of backing chains, which there are none of.
    kind: Kind::Bool(|_, _| Ok(())),
    need: Need::Default("off"),
    help: "leave out what lies below each node's image",
}];

/// All commands.
static COMMANDS: &[CommandRow] = &[
    CommandRow { name: NEGOTIATION, read: Read::Table(ENABLE, |a| Job::Negotiate(a.enable)) },
    CommandRow { name: "query-version", read: Read::Table(&[], |_| Job::Answer(version)) },
    CommandRow { name: "query-commands", read: Read::Table(&[], |_| Job::Answer(query_commands)) },
    CommandRow { name: "quit", read: Read::Table(&[], |_| Job::Run(Command::Quit)) },
    CommandRow {
        name: "object-add",
        read: Read::Option(|given, at| Ok(Action::Object(object::read(given, at)?))),
    },
    CommandRow {
        name: "object-del",
        read: Read::Table(IDS, |a| Job::Run(Command::ObjectDel { id: a.id })),
    },
    CommandRow {
        name: "qom-list",
        read: Read::Table(QOM_LIST, |a| Job::Run(Command::QomList { path: a.path })),
    },
    CommandRow {
        name: "qom-get",
        read: Read::Table(QOM_GET, |a| {
            Job::Run(Command::QomGet { path: a.path, property: a.property })
        }),
    },
    CommandRow {
        name: "qom-set",
        read: Read::Table(QOM_SET, |a| {
            let value = a.value.unwrap_or(Value::Null);
            Job::Run(Command::QomSet { path: a.path, property: a.property, value })
        }),
    },
    CommandRow {
        name: "query-iothreads",
        read: Read::Table(&[], |_| Job::Run(Command::QueryIothreads)),
    },
    CommandRow {
        name: "blockdev-add",
        read: Read::Option(|given, at| Ok(Action::Blockdev(blockdev::read(given, at)?))),
    },
    CommandRow {
        name: "blockdev-del",
        read: Read::Table(NODE_NAMES, |a| {
            Job::Run(Command::BlockdevDel { node_name: a.node_name })
        }),
    },
    CommandRow {
        name: "query-named-block-nodes",
        read: Read::Table(NAMED_BLOCK_NODES, |_| Job::Run(Command::QueryNamedBlockNodes)),
    },
    CommandRow {
        name: "block-export-add",
        read: Read::Option(|given, at| Ok(Action::Export(export::read(given, at)?))),
    },
    CommandRow {
        name: "block-export-del",
        read: Read::Table(EXPORT_DEL, |a| {
            Job::Run(Command::BlockExportDel { id: a.id, mode: a.mode })
        }),
    },
    CommandRow {
        name: "query-block-exports",
        read: Read::Table(&[], |_| Job::Run(Command::QueryBlockExports)),
    },
];

/// `enable`: a list of capabilities.
fn enable(arguments: &mut Arguments, value: Value, at: &Context) -> table::Set {
    let Value::List(names) = value else {
        return Err(table::wrong_type(at.whole(), "array"));
    };
    for name in names {
        match table::text(name, at.whole(), at)?.as_str() {
            "oob" => arguments.enable.out_of_band = true,
            other => return Err(table::not_accepted("enable", at, other, ["oob"].into_iter())),
        }
    }
    Ok(())
}

fn put<V>(into: &mut V, value: V) -> table::Set {
    *into = value;
    Ok(())
}
