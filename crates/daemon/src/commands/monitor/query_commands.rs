//! `query-commands`.

use control::qmp::{self, Member, Reply, Returns};
use serde_json::json;

use super::super::FixedCommand;

pub(super) static COMMAND: FixedCommand = FixedCommand {
    name: "query-commands",
    help: "list all commands",
    returns: Returns::Data("one for each command", Reply::List(&Reply::Object(COMMAND_INFO))),
    answer: || qmp::commands().map(|command| json!({"name": command.name()})).collect(),
};

static COMMAND_INFO: &[Member] = &[Member::new("name", Reply::Text, "the command's name")];
