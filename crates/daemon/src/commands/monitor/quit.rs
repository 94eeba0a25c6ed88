//! `quit`.

use control::qmp::Returns;

use super::super::{Answer, Command, Leave};

pub(super) static COMMAND: Command<(), Answer> = Command {
    name: "quit",
    help: "end the daemon, after completing requests in flight and flushing",
    example: "",
    arguments: &[],
    returns: Returns::Nothing,
    records: false,
    run: |_, ()| Box::pin(async { Ok(Answer::AfterServing(Leave::Quit)) }),
};
