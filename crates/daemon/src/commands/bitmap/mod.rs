//! Dirty bitmaps.

mod add;
pub(super) mod arguments;
mod clear;
mod disable;
mod enable;
mod merge;
mod remove;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &add::COMMAND,
    &remove::COMMAND,
    &clear::COMMAND,
    &enable::COMMAND,
    &disable::COMMAND,
    &merge::COMMAND,
];
