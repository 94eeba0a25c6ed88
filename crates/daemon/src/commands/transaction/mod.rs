//! Transactions: several changes, made together or not at all.

mod actions;
mod transact;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[&transact::COMMAND];
