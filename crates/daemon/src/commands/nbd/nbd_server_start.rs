//! `nbd-server-start`.

use control::qmp::Returns;
use control::{NBD_SERVER_START, NbdServerOptions, Step};

use super::super::Command;

pub(super) static COMMAND: Command<NbdServerOptions> = Command {
    name: "nbd-server-start",
    help: "start the NBD server, as --nbd-server does",
    example: r#"{"addr": {"type": "unix", "data": {"path": "nbd.sock"}}}"#,
    arguments: NBD_SERVER_START,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, server| Box::pin(async move { Ok(daemon.add(&Step::from(server)).await?) }),
};
