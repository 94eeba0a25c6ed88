//! `query-chardev`.

use control::qmp::{Member, Reply, Returns};
use serde_json::{Value as Json, json};

use super::super::Command;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "query-chardev",
    help: "list the character devices",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each device", Reply::List(&Reply::Object(CHARDEV_INFO))),
    records: false,
    run: |daemon, ()| {
        Box::pin(async {
            let all = daemon.inventory.chardevs().map(|(label, filename, used)| {
                json!({"label": label, "filename": filename, "frontend-open": used})
            });
            Ok(all.collect())
        })
    },
};

static CHARDEV_INFO: &[Member] = &[
    Member::new("label", Reply::Text, "the device's name"),
    Member::new("filename", Reply::Text, "where its clients are, for people"),
    Member::new("frontend-open", Reply::Bool, "a monitor is on it"),
];
