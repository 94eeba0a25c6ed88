//! Objects and their types.

mod qom_list_types;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[&qom_list_types::COMMAND];
