//! Negotiation, and information about the daemon.

use serde_json::{Value as Json, json};

use super::{Arguments, Command, CommandRow, Job, Member, Reply, Returns};
use crate::QSD_RELEASE;
use crate::qmp::{Capabilities, schema};
use crate::shape::{Shape, Word};
use crate::table::{self, Context, Field, Kind, Need, Table};
use crate::value::Value;

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: NEGOTIATION,
        help: "end the negotiation, with some capabilities enabled",
        example: r#"{"enable": ["oob"]}"#,
        arguments: Arguments::Table(&Table {
            fields: NEGOTIATE,
            build: |capabilities| Ok(Job::Negotiate(capabilities)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "query-version",
        help: "return the QEMU release with this interface, and the program's version",
        example: "",
        arguments: Arguments::None(|| Job::Answer(version)),
        returns: Returns::Data("the version", Reply::Object(VERSION)),
    },
    CommandRow {
        name: "query-commands",
        help: "list all commands",
        example: "",
        arguments: Arguments::None(|| Job::Answer(query_commands)),
        returns: Returns::Data("one for each command", Reply::List(&Reply::Object(COMMAND_INFO))),
    },
    CommandRow {
        name: "query-qmp-schema",
        help: "describe commands, events and their types, for programs",
        example: "",
        arguments: Arguments::None(|| Job::Answer(schema::schema)),
        returns: Returns::Data(
            "one for each command, event and type",
            Reply::List(&Reply::Object(SCHEMA)),
        ),
    },
    CommandRow {
        name: "x-query-sandbox",
        help: "return the sandbox's limits: capabilities, system calls, paths",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::XQuerySandbox)),
        returns: Returns::Data("what is in force", Reply::Object(SANDBOX)),
    },
    CommandRow {
        name: "x-upgrade",
        help: "replace the daemon by the program now at its path, and hand all connections over",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::Upgrade)),
        returns: Returns::Data("the process that serves now", Reply::Object(UPGRADED)),
    },
    CommandRow {
        name: "quit",
        help: "end the daemon, after completing requests in flight and flushing",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::Quit)),
        returns: Returns::Nothing,
    },
];

static SANDBOX: &[Member] = &[
    Member::new(
        "mode",
        Reply::Word(&["on", "log", "off"]),
        "as of --sandbox; off as well if it could not be put in force after an upgrade",
    ),
    Member::new(
        "no-new-privs",
        Reply::Bool,
        "no program that were executed could have more privileges",
    ),
    Member::optional("user", Reply::Int, "the user that the process has become, by --user"),
    Member::optional("group", Reply::Int, "its group"),
    Member::optional(
        "capabilities",
        Reply::List(&Reply::Text),
        "those that the control thread has kept, without CAP_; the others have none",
    ),
    Member::optional(
        "seccomp",
        Reply::Object(CALLS),
        "how many system calls each kind of thread may make; none: no filter",
    ),
    Member::optional("landlock", Reply::Object(LANDLOCK), "what can be opened; none: no Landlock"),
    Member::new(
        "ring-restrictions",
        Reply::Bool,
        "rings can do what they are used for and no more",
    ),
    Member::new(
        "not-in-force",
        Reply::List(&Reply::Text),
        "mechanisms that are not in force, with the reasons",
    ),
];

static CALLS: &[Member] = &[
    Member::new("control", Reply::Int, "of the control thread"),
    Member::new("io", Reply::Int, "of an I/O thread"),
    Member::new("pool", Reply::Int, "of a thread of a pool"),
];

static LANDLOCK: &[Member] = &[
    Member::new("abi", Reply::Int, "its version"),
    Member::optional(
        "paths",
        Reply::List(&Reply::Text),
        "what the control thread can reach, and what is beneath it; none: any path. I/O threads and \
         pools reach nothing",
    ),
    Member::optional(
        "connect",
        Reply::List(&Reply::Int),
        "ports of TCP that the control thread can connect to; none: any",
    ),
];

static UPGRADED: &[Member] = &[
    Member::new("pid", Reply::Int, "the process's id"),
    Member::new("pause-us", Reply::Int, "time without service, in microseconds"),
];

/// The only command before the negotiation.
pub(in crate::qmp) const NEGOTIATION: &str = "qmp_capabilities";

static NEGOTIATE: &[Field<Capabilities>] = &[Field {
    name: "enable",
    kind: Kind::Nested {
        shape: || {
            let oob = Word { name: "oob", help: "commands with exec-oob" };
            Shape::List(Box::new(Shape::Words(vec![oob])), "")
        },
        read: enable,
    },
    need: Need::Optional("none"),
    help: "capabilities to enable",
}];

/// `enable`: a list of capabilities.
fn enable(capabilities: &mut Capabilities, value: Value, at: &Context) -> table::Set {
    let Value::List(names) = value else {
        return Err(table::wrong_type(at.whole(), "array"));
    };
    for name in names {
        match table::text(name, at.whole(), at)?.as_str() {
            "oob" => capabilities.out_of_band = true,
            other => return Err(table::not_accepted("enable", at, other, ["oob"].into_iter())),
        }
    }
    Ok(())
}

/// The answer to `query-version`: the QEMU release whose interface is implemented, and in `package` the name and version
/// of the program.
pub(in crate::qmp) fn version() -> Json {
    let [major, minor, micro] = QSD_RELEASE;
    json!({
        "qemu": {"micro": micro, "minor": minor, "major": major},
        "package": concat!("ringmill ", env!("CARGO_PKG_VERSION")),
    })
}

static VERSION: &[Member] = &[
    Member::new("qemu", Reply::Object(QEMU_VERSION), "the QEMU release with this interface"),
    Member::new("package", Reply::Text, "the program and its version"),
];

static QEMU_VERSION: &[Member] = &[
    Member::new("major", Reply::Int, "the first of the three numbers"),
    Member::new("minor", Reply::Int, "the second"),
    Member::new("micro", Reply::Int, "the third"),
];

fn query_commands() -> Json {
    super::all().map(|command| json!({"name": command.name()})).collect()
}

/// QEMU describes it as a union; here all members that one of the kinds has are optional.
static SCHEMA: &[Member] = &[
    Member::new("name", Reply::Text, "its name; of a type that has none, a number"),
    Member::new(
        "meta-type",
        Reply::Word(&["builtin", "enum", "array", "object", "alternate", "command", "event"]),
        "what is described",
    ),
    Member::optional("json-type", Reply::Text, "of a builtin: what it is in JSON"),
    Member::optional("values", Reply::List(&Reply::Text), "of an enum: its words"),
    Member::optional("members", Reply::List(&Reply::Any), "of an enum, object or alternate"),
    Member::optional("element-type", Reply::Text, "of an array: the type of its elements"),
    Member::optional("tag", Reply::Text, "of an object: the member that variants go by"),
    Member::optional("variants", Reply::List(&Reply::Any), "of an object: further members"),
    Member::optional("arg-type", Reply::Text, "of a command or event: the type of what is said"),
    Member::optional("ret-type", Reply::Text, "of a command: the type of what is returned"),
];

static COMMAND_INFO: &[Member] = &[Member::new("name", Reply::Text, "the command's name")];
