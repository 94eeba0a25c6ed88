//! `nbd-server-stop`.

use control::qmp::Returns;

use super::super::export::when_ended;
use super::super::{Answer, Command};

pub(super) static COMMAND: Command<(), Answer> = Command {
    name: "nbd-server-stop",
    help: "stop the NBD server, and end all exports on it",
    example: "",
    arguments: &[],
    returns: Returns::Nothing,
    records: true,
    run: |daemon, ()| {
        Box::pin(async {
            let ends = daemon.stop_nbd_server().await?;
            Ok(when_ended(daemon, ends))
        })
    },
};
