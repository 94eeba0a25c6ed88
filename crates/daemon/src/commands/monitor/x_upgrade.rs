//! `x-upgrade`.

use control::qmp::{Member, Reply, Returns};

use super::super::{Answer, Command, Leave};

pub(super) static COMMAND: Command<(), Answer> = Command {
    name: "x-upgrade",
    help: "replace the daemon by the program now at its path, and hand all connections over",
    example: "",
    arguments: &[],
    returns: Returns::Data("the process that serves now", Reply::Object(UPGRADED)),
    records: false,
    run: |_, ()| Box::pin(async { Ok(Answer::AfterServing(Leave::Upgrade)) }),
};

static UPGRADED: &[Member] = &[
    Member::new("pid", Reply::Int, "the process's id"),
    Member::new("pause-us", Reply::Int, "time without service, in microseconds"),
];
