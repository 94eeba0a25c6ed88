//! Commands about the daemon, its monitors, and the commands themselves.

mod query_chardev;
mod query_chardev_backends;
mod query_commands;
mod query_qmp_schema;
mod query_version;
mod quit;
mod x_query_sandbox;
mod x_upgrade;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &query_version::COMMAND,
    &query_commands::COMMAND,
    &query_qmp_schema::COMMAND,
    &query_chardev::COMMAND,
    &query_chardev_backends::COMMAND,
    &x_query_sandbox::COMMAND,
    &x_upgrade::COMMAND,
    &quit::COMMAND,
];
