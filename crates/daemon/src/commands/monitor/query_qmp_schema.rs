//! `query-qmp-schema`.

use control::qmp::{self, Member, Reply, Returns};

use super::super::FixedCommand;

pub(super) static COMMAND: FixedCommand = FixedCommand {
    name: "query-qmp-schema",
    help: "describe commands, events and their types, for programs",
    returns: Returns::Data(
        "one for each command, event and type",
        Reply::List(&Reply::Object(SCHEMA)),
    ),
    answer: qmp::schema,
};

/// QEMU describes an entry as a union. This table lists the members of single kinds as optional.
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
