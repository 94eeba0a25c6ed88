//! Exports.

use super::{Arguments, Command, CommandRow, DeleteMode, Job, Member, Reply, Returns};
use crate::export;
use crate::shape::Shape;
use crate::storage_daemon::Action;
use crate::table::{Choice, Field, Kind, Need, Table, put};

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "block-export-add",
        help: "export a block node, as --export does",
        example: r#"{"type": "nbd", "id": "e0", "node-name": "disk0", "writable": true}"#,
        arguments: Arguments::Option {
            option: "--export",
            read: |given, at| Ok(Action::Export(export::read(given, at)?)),
            shape: || Shape::Union(export::options()),
        },
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-export-del",
        help: "end an export; the event BLOCK_EXPORT_DELETED follows when it has ended",
        example: r#"{"id": "e0", "mode": "hard"}"#,
        arguments: Arguments::Table(&Table {
            fields: DEL,
            build: |del: Del| Ok(Job::Run(Command::BlockExportDel { id: del.id, mode: del.mode })),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "x-block-export-resume",
        help: "resume an export that an error has stopped; its held requests are done again, in order",
        example: r#"{"id": "e0"}"#,
        arguments: Arguments::Table(&Table {
            fields: RESUME,
            build: |Resume { id }| Ok(Job::Run(Command::XBlockExportResume { id })),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "query-block-exports",
        help: "list the exports",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::QueryBlockExports)),
        returns: Returns::Data("one for each export", Reply::List(&Reply::Object(EXPORT_INFO))),
    },
];

#[derive(Default)]
struct Del {
    id: String,
    mode: DeleteMode,
}

static DEL: &[Field<Del>] = &[
    Field {
        name: "id",
        kind: Kind::Text { meta: "<id>", set: |del, id| put(&mut del.id, id) },
        need: Need::Required,
        help: "the export's name",
    },
    Field {
        name: "mode",
        kind: Kind::Choice(&[
            Choice {
                name: "safe",
                help: "fail when a client uses it",
                set: |del| put(&mut del.mode, DeleteMode::Safe),
            },
            Choice {
                name: "hard",
                help: "send its client away",
                set: |del| put(&mut del.mode, DeleteMode::Hard),
            },
        ]),
        need: Need::Default("safe"),
        help: "whether its client may be sent away",
    },
];

#[derive(Default)]
struct Resume {
    id: String,
}

static RESUME: &[Field<Resume>] = &[Field {
    name: "id",
    kind: Kind::Text { meta: "<id>", set: |resume, id| put(&mut resume.id, id) },
    need: Need::Required,
    help: "the export's name",
}];

/// What becomes of an export's requests.
const IO_STATUS: Reply = Reply::Word(&["ok", "nospace", "failed"]);

static EXPORT_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the export's name"),
    Member::new("type", Reply::As(|| export::options().tag().shape), "its type"),
    Member::new("node-name", Reply::Text, "the block node that it offers"),
    Member::optional(
        "luns",
        Reply::List(&Reply::Text),
        "the block nodes of its logical units, LUN 0 first; of vhost-user-scsi only",
    ),
    Member::optional(
        "namespaces",
        Reply::List(&Reply::Text),
        "the block nodes of its namespaces, number 1 first; of vfio-user-nvme only",
    ),
    Member::new("shutting-down", Reply::Bool, "it is ending"),
    Member::optional(
        "io-status",
        IO_STATUS,
        "of one whose rerror or werror is not report: whether it is stopped, and by which error",
    ),
];
