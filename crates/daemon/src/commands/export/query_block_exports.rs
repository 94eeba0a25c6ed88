//! `query-block-exports`.

use block::policy::IoStatus;
use control::export_union;
use control::qmp::{Member, Reply, Returns};
use serde_json::{Value as Json, json};

use super::super::Command;
use crate::exports::ExportInfo;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "query-block-exports",
    help: "list the exports",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each export", Reply::List(&Reply::Object(EXPORT_INFO))),
    records: false,
    run: |daemon, ()| {
        Box::pin(async { Ok(daemon.exports.all(&daemon.inventory).map(export_info).collect()) })
    },
};

fn export_info(export: ExportInfo<'_>) -> Json {
    let mut info = json!({
        "node-name": export.node_name,
        "shutting-down": export.shutting_down,
        "type": export.kind,
        "id": export.id,
    });
    if let Some((list, nodes)) = export.list {
        info[list] = nodes.into();
    }
    if let Some(device) = export.device {
        info["device"] = device.to_string_lossy().into();
    }
    if let Some(status) = export.io_status {
        info["io-status"] = match status {
            IoStatus::Ok => "ok",
            IoStatus::NoSpace => "nospace",
            IoStatus::Failed => "failed",
        }
        .into();
    }
    info
}

/// The I/O status of an export.
const IO_STATUS: Reply = Reply::Word(&["ok", "nospace", "failed"]);

static EXPORT_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the export's name"),
    Member::new("type", Reply::As(|| export_union().tag().shape), "its type"),
    Member::new("node-name", Reply::Text, "the block node that it offers"),
    Member::optional(
        "drives",
        Reply::List(&Reply::Text),
        "the block nodes of its drives, port 0 first; of vfio-user-ahci only",
    ),
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
    Member::optional("device", Reply::Text, "the path of the block device; of ublk only"),
    Member::new("shutting-down", Reply::Bool, "it is ending"),
    Member::optional(
        "io-status",
        IO_STATUS,
        "if rerror or werror is not report: whether an error has stopped the export, and which",
    ),
];
