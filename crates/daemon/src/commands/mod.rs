//! QMP's commands. Each command is one item: in a file of its family's folder, and in that folder's
//! list.
//!
//! An item describes a command completely and holds the function that executes the command. Only
//! these items dispatch commands.

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

pub(super) use self::answer::{Answer, Leave, Rest};
use self::command::Command;
pub(super) use self::export::DeleteMode;
use self::fixed_command::FixedCommand;
use self::option_command::OptionCommand;

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

/// The execution of a command.
pub(super) type Running<'a, R = Answer> = Pin<Box<dyn Future<Output = Result<R, QmpError>> + 'a>>;

/// A command with its parsed arguments, to be executed by the daemon.
pub(super) struct Call {
    /// Whether the command may change the configuration in the state file.
    records: bool,
    /// The command, to be executed again after an image was repaired that it opens. `None`: it is not.
    again: Option<Again>,
    /// Executes the command.
    run: Rest,
}

/// A command and its arguments.
type Again = Box<(String, Object)>;

/// A command after its arguments were accepted.
pub(super) enum Accepted {
    /// The monitor sends this answer at once.
    Answer(Json),
    /// The daemon executes the command.
    Call(Call),
}

/// A command that a monitor accepts.
trait DaemonCommand: QmpCommand {
    /// Parses the arguments.
    ///
    /// # Errors
    ///
    /// An argument is missing, unknown or invalid.
    fn read(&self, arguments: Object) -> Result<Accepted, QmpError>;
}

fn all() -> impl Iterator<Item = &'static dyn DaemonCommand> {
    FAMILIES.iter().copied().flatten().copied()
}

/// Registers the commands for sessions, help texts, the schema and the reference.
///
/// Further calls have no effect.
///
/// # Panics
///
/// Panics if two commands have the same name.
pub fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let commands = all().map(|command| command as &dyn QmpCommand).collect();
        if let Err(error) = control::qmp::add(commands) {
            panic!("the list of commands is wrong: {error:?}");
        }
    });
}

/// Parses the arguments of the command `name`.
///
/// # Errors
///
/// The command does not exist, or an argument is missing, unknown or invalid.
pub(super) fn read(name: &str, arguments: Object) -> Result<Accepted, QmpError> {
    let found = all().find(|command| command.name() == name);
    let command = found.ok_or_else(|| QmpError::command_not_found(name))?;
    let again = Some(Box::new((name.to_owned(), arguments.clone())));
    Ok(match command.read(arguments)? {
        Accepted::Call(call) => Accepted::Call(Call { again, ..call }),
        answer @ Accepted::Answer(_) => answer,
    })
}
