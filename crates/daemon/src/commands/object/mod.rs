//! Objects, their types and their properties.

mod object_add;
mod object_del;
mod qom;
mod qom_get;
mod qom_list;
mod qom_list_types;
mod qom_set;
mod query_iothreads;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &object_add::COMMAND,
    &object_del::COMMAND,
    &qom_list::COMMAND,
    &qom_list_types::COMMAND,
    &qom_get::COMMAND,
    &qom_set::COMMAND,
    &query_iothreads::COMMAND,
];
