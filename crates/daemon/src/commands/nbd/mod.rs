//! Commands about the NBD server, and about exports with equal name and id.

mod nbd_server_add;
mod nbd_server_remove;
mod nbd_server_start;
mod nbd_server_stop;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &nbd_server_start::COMMAND,
    &nbd_server_stop::COMMAND,
    &nbd_server_add::COMMAND,
    &nbd_server_remove::COMMAND,
];
