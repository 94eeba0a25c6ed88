//! `query-chardev-backends`.

use control::qmp::{Member, Reply, Returns};
use serde_json::json;

use super::super::FixedCommand;

pub(super) static COMMAND: FixedCommand = FixedCommand {
    name: "query-chardev-backends",
    help: "list the types of character devices",
    returns: Returns::Data("one for each type", Reply::List(&Reply::Object(BACKEND_INFO))),
    answer: || control::chardev_types().map(|name| json!({"name": name})).collect(),
};

static BACKEND_INFO: &[Member] = &[Member::new("name", Reply::Text, "the type's name")];
