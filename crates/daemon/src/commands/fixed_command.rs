//! A command with an answer that needs no daemon.

use control::Object;
use control::qmp::{QmpCommand, QmpError, Returns};
use options::OptionError;
use options::shape::Shape;
use options::table::{self, Context};
use options::value::Dialect;
use serde_json::Value as Json;

use super::{Accepted, DaemonCommand};

/// A command without arguments that describes the program. The monitor answers the command at once,
/// even while the daemon executes another command.
pub(super) struct FixedCommand {
    pub(super) name: &'static str,
    /// The command's effect, in one sentence without a full stop.
    pub(super) help: &'static str,
    /// The type of the answer.
    pub(super) returns: Returns,
    /// Returns the answer.
    pub(super) answer: fn() -> Json,
}

impl QmpCommand for FixedCommand {
    fn name(&self) -> &'static str {
        self.name
    }

    fn help(&self) -> &'static str {
        self.help
    }

    fn example(&self) -> &'static str {
        ""
    }

    fn arguments(&self) -> Shape {
        Shape::Object(Vec::new())
    }

    fn option(&self) -> &'static str {
        ""
    }

    fn returns(&self) -> &Returns {
        &self.returns
    }

    fn check(&self, arguments: Object) -> Result<(), OptionError> {
        let at = Context::new(Dialect::Json);
        table::refuse_rest(&arguments, &at, self.name, [].into_iter())
    }
}

impl DaemonCommand for FixedCommand {
    fn read(&self, arguments: Object) -> Result<Accepted, QmpError> {
        self.check(arguments)?;
        Ok(Accepted::Answer((self.answer)()))
    }
}
