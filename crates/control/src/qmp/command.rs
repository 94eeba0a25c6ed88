//! What a session, help texts, the schema and the reference know of a command.
//!
//! The commands themselves belong to the program that carries them out. The program [adds](add) them. Only the
//! [negotiation](super::negotiation) is part of the session.

use std::sync::OnceLock;

use serde_json::{Map, Value as Json};

use super::negotiation::NEGOTIATION;
use super::reply::Returns;
use crate::error::OptionError;
use crate::shape::Shape;
use crate::value::Object;

/// A command, as help texts, the schema and the reference describe it.
pub trait QmpCommand: Sync {
    /// Returns its name.
    fn name(&self) -> &'static str;

    /// Returns what it does, in one sentence.
    fn help(&self) -> &'static str;

    /// Arguments it can have, as JSON; empty when it needs none.
    fn example(&self) -> &'static str;

    /// Returns what the arguments may be.
    fn arguments(&self) -> Shape;

    /// Returns the command line's option with the same arguments.
    ///
    /// Empty when there is none.
    fn option(&self) -> &'static str;

    /// Returns what comes back.
    fn returns(&self) -> &Returns;

    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    fn check(&self, arguments: Object) -> Result<(), OptionError>;
}

/// The program's commands.
static ADDED: OnceLock<Vec<&'static dyn QmpCommand>> = OnceLock::new();

/// Adds the commands that the program carries out by itself.
///
/// Called at most once, before anything reads a command.
///
/// # Errors
///
/// Commands were added before, or the name is taken.
pub fn add(commands: Vec<&'static dyn QmpCommand>) -> Result<(), AddError> {
    let taken = |command: &&&'static dyn QmpCommand| find(command.name()).is_some();
    if let Some(command) = commands.iter().find(taken) {
        return Err(AddError::Taken(command.name()));
    }
    ADDED.set(commands).map_err(|_| AddError::Twice)
}

/// Why commands were not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddError {
    /// There is a command of that name.
    Taken(&'static str),
    /// Commands were added before.
    Twice,
}

/// Arguments as the tables read them.
pub(crate) fn given(arguments: Map<String, Json>) -> Object {
    arguments.into_iter().map(|(name, value)| (name, value.into())).collect()
}

/// Returns the command of that name.
pub(crate) fn find(name: &str) -> Option<&'static dyn QmpCommand> {
    commands().find(|command| command.name() == name)
}

/// Returns all commands.
pub fn commands() -> impl Iterator<Item = &'static dyn QmpCommand> {
    let negotiation: &dyn QmpCommand = &NEGOTIATION;
    [negotiation].into_iter().chain(ADDED.get().into_iter().flatten().copied())
}
