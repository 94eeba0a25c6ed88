//! QMP's commands: each is one item, in a file of its family's folder and in the list of that folder.
//!
//! An item has all that there is to know of a command, and the function that carries it out. There is no other place that
//! a command could be sent to.

mod bitmap;
mod block;
mod job;
mod monitor;
mod object;
mod transaction;

use std::pin::Pin;

use control::Object;
use control::qmp::{QmpCommand, QmpError, Returns};
use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context, Field};
use options::value::Dialect;

use super::Daemon;
use super::monitor::Outcome;

/// The commands, by family.
static FAMILIES: &[&[&dyn DaemonCommand]] = &[
    bitmap::COMMANDS,
    block::COMMANDS,
    job::COMMANDS,
    monitor::COMMANDS,
    object::COMMANDS,
    transaction::COMMANDS,
];

/// A command, with arguments that are read into an `A`.
pub(super) struct Command<A: 'static> {
    /// Its name.
    pub(super) name: &'static str,
    /// What it does, in one sentence.
    pub(super) help: &'static str,
    /// Arguments it can have, as JSON; empty when it needs none.
    pub(super) example: &'static str,
    /// Its arguments.
    pub(super) arguments: &'static [Field<A>],
    /// What comes back.
    pub(super) returns: Returns,
    /// Whether it may change the configuration in the state file.
    pub(super) records: bool,
    /// Carries it out.
    pub(super) run: for<'a> fn(&'a mut Daemon, A) -> Running<'a>,
}

/// A command that is being carried out.
pub(super) type Running<'a> = Pin<Box<dyn Future<Output = Outcome> + 'a>>;

/// A command with its arguments.
pub(super) struct Call {
    /// Whether it may change the configuration in the state file.
    pub(super) records: bool,
    /// Carries it out.
    pub(super) run: Box<dyn for<'a> FnOnce(&'a mut Daemon) -> Running<'a>>,
}

/// A [`Command`], whatever its arguments are.
pub(super) trait DaemonCommand: QmpCommand {
    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    fn read(&self, arguments: Object) -> Result<Call, OptionError>;
}

impl<A: Default> Command<A> {
    fn parse(&self, mut arguments: Object) -> Result<A, OptionError> {
        let (at, mut read) = (Context::new(Dialect::Json), A::default());
        table::read(self.arguments, &mut read, &mut arguments, &at)?;
        table::refuse_rest(&arguments, &at, self.name, table::names(self.arguments))?;
        Ok(read)
    }
}

impl<A: Default + 'static> QmpCommand for Command<A> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn help(&self) -> &'static str {
        self.help
    }

    fn example(&self) -> &'static str {
        self.example
    }

    fn arguments(&self) -> Shape {
        Shape::Object(table::members(self.arguments))
    }

    fn option(&self) -> &'static str {
        ""
    }

    fn returns(&self) -> &Returns {
        &self.returns
    }

    fn check(&self, arguments: Object) -> Result<(), OptionError> {
        self.parse(arguments).map(drop)
    }
}

impl<A: Default + 'static> DaemonCommand for Command<A> {
    fn read(&self, arguments: Object) -> Result<Call, OptionError> {
        let (arguments, run) = (self.parse(arguments)?, self.run);
        Ok(Call { records: self.records, run: Box::new(move |daemon| run(daemon, arguments)) })
    }
}

fn all() -> impl Iterator<Item = &'static dyn DaemonCommand> {
    FAMILIES.iter().copied().flatten().copied()
}

/// Makes the commands known to sessions, help texts, the schema and the reference.
///
/// # Panics
///
/// Panics if a name is taken or the function was called before: a mistake in the lists.
pub fn register() {
    let commands = all().map(|command| command as &dyn QmpCommand).collect();
    if let Err(error) = control::qmp::add(commands) {
        panic!("the list of commands is wrong: {error:?}");
    }
}

/// Reads the arguments of a command.
///
/// # Errors
///
/// What is wrong with them.
pub(super) fn read(command: &dyn QmpCommand, arguments: Object) -> Result<Call, QmpError> {
    let name = command.name();
    let found = all().find(|own| own.name() == name);
    let own = found.ok_or_else(|| QmpError::command_not_found(name))?;
    Ok(own.read(arguments)?)
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value as Json};

    use super::*;

    #[test]
    fn examples_are_right() {
        for command in all() {
            let arguments: Map<String, Json> = match command.example() {
                "" => Map::new(),
                example => serde_json::from_str(example)
                    .unwrap_or_else(|error| panic!("{}: {error}", command.name())),
            };
            let arguments = arguments.into_iter().map(|(name, value)| (name, value.into()));
            if let Err(error) = command.check(arguments.collect()) {
                panic!("{}: {error}", command.name());
            }
        }
    }

    #[test]
    fn each_command_has_a_name_of_its_own_and_help_for_each_argument() {
        register();
        for command in all() {
            let arguments = ["ringmill", "ctl", "m.sock", command.name(), "help"];
            let parsed = control::parse_args(arguments.map(Into::into));
            let Ok(control::Command::Print(text)) = parsed else { panic!("{}", command.name()) };
            // A list of words is not broken.
            let fits = |line: &str| line.chars().count() <= 80 || !line.trim().contains(' ');
            assert!(text.lines().all(fits), "{text}");
            let short = |line: &&str| line.trim_end().ends_with('=') || line.len() < 12;
            let bare = text.lines().filter(|line| line.starts_with("  ")).find(short);
            assert_eq!(bare, None, "{text}");
        }
    }
}
