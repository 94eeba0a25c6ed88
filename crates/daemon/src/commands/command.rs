//! A command with its own table of arguments.

use control::Object;
use control::qmp::{QmpCommand, QmpError, Returns};
use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context, Field};
use options::value::Dialect;

use super::{Accepted, Answer, Call, DaemonCommand, Running};
use crate::Daemon;

/// A command that parses its arguments into an `A`.
///
/// `R` is the answer: nothing or a value, sent when `run` has ended, or an [`Answer`], sent as `run` decides.
pub(crate) struct Command<A: 'static, R: 'static = ()> {
    pub(super) name: &'static str,
    /// The command's effect, in one sentence without a full stop.
    pub(super) help: &'static str,
    /// Example of arguments, as JSON. Empty: the command needs no arguments.
    pub(super) example: &'static str,
    pub(super) arguments: &'static [Field<A>],
    /// The type of the answer.
    pub(super) returns: Returns,
    /// Whether the command may change the configuration in the state file.
    pub(super) records: bool,
    /// Executes the command.
    pub(super) run: for<'a> fn(&'a mut Daemon, A) -> Running<'a, R>,
}

impl<A: Default, R> Command<A, R> {
    /// Parses the arguments.
    ///
    /// # Errors
    ///
    /// An argument is missing, unknown or invalid.
    fn parse(&self, arguments: Object) -> Result<A, OptionError> {
        self.parse_at(arguments, &Context::new(Dialect::Json))
    }

    /// Parses arguments that are a part of another command's.
    ///
    /// # Errors
    ///
    /// An argument is missing, unknown or invalid.
    pub(super) fn parse_at(&self, mut arguments: Object, at: &Context) -> Result<A, OptionError> {
        let mut read = A::default();
        table::read(self.arguments, &mut read, &mut arguments, at)?;
        table::refuse_rest(&arguments, at, self.name, table::names(self.arguments))?;
        Ok(read)
    }
}

impl<A: Default, R> QmpCommand for Command<A, R> {
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

impl<A: Default, R: Into<Answer>> DaemonCommand for Command<A, R> {
    fn read(&self, arguments: Object) -> Result<Accepted, QmpError> {
        let (arguments, run) = (self.parse(arguments)?, self.run);
        Ok(Accepted::Call(Call {
            records: self.records,
            again: None,
            run: Box::new(move |daemon| {
                Box::pin(async move { Ok(run(daemon, arguments).await?.into()) })
            }),
        }))
    }
}
