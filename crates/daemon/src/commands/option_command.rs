//! A command with the arguments of a command-line option.

use control::qmp::{QmpCommand, QmpError, Returns};
use control::{Action, Object, Step, Value};
use options::OptionError;
use options::shape::Shape;
use options::table::Context;
use options::value::Dialect;
use serde_json::Value as Json;

use super::{Accepted, Call, DaemonCommand};

/// A command with the same effect as a command-line option.
pub(super) struct OptionCommand {
    pub(super) name: &'static str,
    /// The command's effect, in one sentence without a full stop.
    pub(super) help: &'static str,
    /// Example of arguments, as JSON.
    pub(super) example: &'static str,
    /// The option, with its dashes.
    pub(super) option: &'static str,
    /// The shape of the option's arguments.
    pub(super) arguments: fn() -> Shape,
    /// Parses the option's arguments.
    pub(super) read: fn(Object, &Context) -> Result<Action, OptionError>,
}

impl OptionCommand {
    fn parse(&self, arguments: Object) -> Result<Step, OptionError> {
        // The inventory stores the option.
        let origin = format!("{} {}", self.option, Json::from(Value::Object(arguments.clone())));
        let action = (self.read)(arguments, &Context::new(Dialect::Json))?;
        Ok(Step { origin, action })
    }
}

impl QmpCommand for OptionCommand {
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
        (self.arguments)()
    }

    fn option(&self) -> &'static str {
        self.option
    }

    fn returns(&self) -> &Returns {
        &Returns::Nothing
    }

    fn check(&self, arguments: Object) -> Result<(), OptionError> {
        self.parse(arguments).map(drop)
    }
}

impl DaemonCommand for OptionCommand {
    fn read(&self, arguments: Object) -> Result<Accepted, QmpError> {
        let step = self.parse(arguments)?;
        Ok(Accepted::Call(Call {
            records: true,
            again: None,
            run: Box::new(move |daemon| {
                Box::pin(async move { Ok(daemon.add_for_monitor(step).await?) })
            }),
        }))
    }
}
