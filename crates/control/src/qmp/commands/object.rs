//! Objects and their properties.

use super::{Arguments, Command, CommandRow, Job, Member, Reply, Returns};
use crate::object;
use crate::shape::Shape;
use crate::storage_daemon::Action;
use crate::table::{Field, Kind, Need, Table, put};
use crate::value::Value;

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "object-add",
        help: "create an object, as --object does",
        example: r#"{"qom-type": "iothread", "id": "io0", "poll-max-ns": 0}"#,
        arguments: Arguments::Option {
            option: "--object",
            read: |given, at| Ok(Action::Object(object::read(given, at)?)),
            shape: || Shape::Union(object::options()),
        },
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "object-del",
        help: "remove an object that is not in use",
        example: r#"{"id": "io0"}"#,
        arguments: Arguments::Table(&Table {
            fields: DEL,
            build: |del: Del| Ok(Job::Run(Command::ObjectDel { id: del.id })),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "qom-list",
        help: "list the properties of an object, or the objects below /objects",
        example: r#"{"path": "/objects"}"#,
        arguments: Arguments::Table(&Table {
            fields: &[PATH],
            build: |qom: Qom| Ok(Job::Run(Command::QomList { path: qom.path })),
        }),
        returns: Returns::Data("one for each property", Reply::List(&Reply::Object(PROPERTY_INFO))),
    },
    CommandRow {
        name: "qom-get",
        help: "return a property of an object",
        example: r#"{"path": "/objects/io0", "property": "poll-max-ns"}"#,
        arguments: Arguments::Table(&Table {
            fields: &[PATH, PROPERTY],
            build: |qom: Qom| {
                Ok(Job::Run(Command::QomGet { path: qom.path, property: qom.property }))
            },
        }),
        returns: Returns::Data("the property's value, of the property's type", Reply::Any),
    },
    CommandRow {
        name: "qom-set",
        help: "change a property of an object in use",
        example: r#"{"path": "/objects/io0", "property": "poll-max-ns", "value": 50000}"#,
        arguments: Arguments::Table(&Table {
            fields: &[PATH, PROPERTY, VALUE],
            build: |qom: Qom| {
                let Qom { path, property, value } = qom;
                let value = value.unwrap_or(Value::Null);
                Ok(Job::Run(Command::QomSet { path, property, value }))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "query-iothreads",
        help: "list the I/O threads that --object and object-add have created",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::QueryIothreads)),
        returns: Returns::Data("one for each thread", Reply::List(&Reply::Object(IOTHREAD_INFO))),
    },
];

#[derive(Default)]
struct Del {
    id: String,
}

static DEL: &[Field<Del>] = &[Field {
    name: "id",
    kind: Kind::Text { meta: "<id>", set: |del, id| put(&mut del.id, id) },
    need: Need::Required,
    help: "the object's name",
}];

/// Arguments of the `qom-*` commands.
#[derive(Default)]
struct Qom {
    path: String,
    property: String,
    value: Option<Value>,
}

const PATH: Field<Qom> = Field {
    name: "path",
    kind: Kind::Text { meta: "<path>", set: |qom, path| put(&mut qom.path, path) },
    need: Need::Required,
    help: "the object: /objects/<id>, or <id> alone",
};

const PROPERTY: Field<Qom> = Field {
    name: "property",
    kind: Kind::Text { meta: "<name>", set: |qom, name| put(&mut qom.property, name) },
    need: Need::Required,
    help: "the property's name",
};

const VALUE: Field<Qom> = Field {
    name: "value",
    kind: Kind::Nested {
        shape: || Shape::Any,
        read: |qom, value, _| put(&mut qom.value, Some(value)),
    },
    need: Need::Required,
    help: "what the property is set to",
};

static PROPERTY_INFO: &[Member] = &[
    Member::new("name", Reply::Text, "the property's name"),
    Member::new("type", Reply::Text, "what it is; child<type> for an object below this one"),
];

static IOTHREAD_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the thread's name"),
    Member::new("thread-id", Reply::Int, "its number in the system, as gettid(2) gives it"),
    Member::new("poll-max-ns", Reply::Int, "longest time to busy-poll, in nanoseconds; 0: never"),
    Member::new("poll-grow", Reply::Int, "factor by which a poll window grows; 0: the default"),
    Member::new("poll-shrink", Reply::Int, "divisor by which it shrinks; 0: the default"),
    Member::new("poll-weight", Reply::Int, "how slowly it follows intervals; 0: the default"),
    Member::new("aio-max-batch", Reply::Int, "most requests handed over at once; 0: any number"),
];
