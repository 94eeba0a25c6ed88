//! `qmp_capabilities`: the first command of a session, which the session carries out.

use super::command::QmpCommand;
use super::reply::Returns;
use crate::error::OptionError;
use crate::shape::{Shape, Word};
use crate::table::{self, Context, Field, Row};
use crate::value::{Dialect, Object, Value};

/// What a client has enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `oob`: commands with `exec-oob`.
    pub out_of_band: bool,
}

/// The command.
pub(super) struct Negotiation;

pub(super) static NEGOTIATION: Negotiation = Negotiation;

impl Negotiation {
    /// Reads the arguments.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    pub(super) fn parse(&self, mut arguments: Object) -> Result<Capabilities, OptionError> {
        let (at, mut enabled) = (Context::new(Dialect::Json), Capabilities::default());
        table::read(ARGUMENTS, &mut enabled, &mut arguments, &at)?;
        table::refuse_rest(&arguments, &at, self.name(), table::names(ARGUMENTS))?;
        Ok(enabled)
    }
}

impl QmpCommand for Negotiation {
    fn name(&self) -> &'static str {
        "qmp_capabilities"
    }

    fn help(&self) -> &'static str {
        "end the negotiation, with some capabilities enabled"
    }

    fn example(&self) -> &'static str {
        r#"{"enable": ["oob"]}"#
    }

    fn arguments(&self) -> Shape {
        Shape::Object(table::members(ARGUMENTS))
    }

    fn option(&self) -> &'static str {
        ""
    }

    fn returns(&self) -> &Returns {
        &Returns::Nothing
    }

    fn check(&self, arguments: Object) -> Result<(), OptionError> {
        self.parse(arguments).map(drop)
    }
}

static ARGUMENTS: &[Field<Capabilities>] =
    &[Row::optional("enable", "none", "capabilities to enable").nested(
        || {
            let oob = Word { name: "oob", help: "commands with exec-oob" };
            Shape::List(Box::new(Shape::Words(vec![oob])), "")
        },
        enable,
    )];

/// `enable`: a list of capabilities.
fn enable(capabilities: &mut Capabilities, value: Value, at: &Context) -> table::Set {
    let Value::List(names) = value else {
        return Err(table::wrong_type(at.whole(), "array"));
    };
    for name in names {
        match table::text(name, at.whole(), at)?.as_str() {
            "oob" => capabilities.out_of_band = true,
            other => return Err(table::not_accepted("enable", at, other, ["oob"].into_iter())),
        }
    }
    Ok(())
}
