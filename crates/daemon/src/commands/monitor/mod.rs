//! Monitors, and the character devices that they are on.

mod query_chardev;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[&query_chardev::COMMAND];
