//! QMP's commands: each is one item, in a file of its family's folder and in the list of that folder.
//!
//! An item has all that there is to know of a command, and the function that carries it out. There is no other place that
//! a command could be sent to.

mod answer;
mod bitmap;
mod block;
mod command;
mod export;
mod fixed_command;
mod job;
mod monitor;
mod nbd;
mod object;
mod option_command;
mod snapshot;
mod stats;
#[cfg(test)]
mod tests;
mod transaction;

use std::pin::Pin;
use std::sync::Once;

use control::Object;
use control::qmp::{QmpCommand, QmpError};
use serde_json::Value as Json;

pub(super) use self::answer::{Answer, Leave};
use self::command::Command;
pub(super) use self::export::DeleteMode;
use self::fixed_command::FixedCommand;
use self::option_command::OptionCommand;
use super::Daemon;

/// The commands, by family.
static FAMILIES: &[&[&dyn DaemonCommand]] = &[
    monitor::COMMANDS,
    object::COMMANDS,
    block::COMMANDS,
    bitmap::COMMANDS,
    export::COMMANDS,
    nbd::COMMANDS,
    job::COMMANDS,
    snapshot::COMMANDS,
    stats::COMMANDS,
    transaction::COMMANDS,
];

/// A command that is being carried out.
pub(super) type Running<'a, R = Answer> = Pin<Box<dyn Future<Output = Result<R, QmpError>> + 'a>>;

/// A command with its arguments, which the daemon carries out.
pub(super) struct Call {
    /// Whether it may change the configuration in the state file.
    records: bool,
    /// Carries it out.
    run: Box<dyn for<'a> FnOnce(&'a mut Daemon) -> Running<'a>>,
}

/// What becomes of a command whose arguments are right.
pub(super) enum Accepted {
    /// It is answered by this.
    Answer(Json),
    /// The daemon carries it out.
    Call(Call),
}

/// A command that a monitor takes.
trait DaemonCommand: QmpCommand {
    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    fn read(&self, arguments: Object) -> Result<Accepted, QmpError>;
}

fn all() -> impl Iterator<Item = &'static dyn DaemonCommand> {
    FAMILIES.iter().copied().flatten().copied()
}

/// Makes the commands known to sessions, help texts, the schema and the reference. Further calls have no effect.
///
/// # Panics
///
/// Panics if a name is taken: a mistake in the lists.
pub fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let commands = all().map(|command| command as &dyn QmpCommand).collect();
        if let Err(error) = control::qmp::add(commands) {
            panic!("the list of commands is wrong: {error:?}");
        }
    });
}

/// Reads the arguments of the command of that name.
///
/// # Errors
///
/// What is wrong with them, or there is no such command.
pub(super) fn read(name: &str, arguments: Object) -> Result<Accepted, QmpError> {
    let found = all().find(|command| command.name() == name);
    found.ok_or_else(|| QmpError::command_not_found(name))?.read(arguments)
}
