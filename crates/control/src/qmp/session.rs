//! One client's session: turns its input into commands, and results into lines of output.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::command::{self, QmpCommand};
use super::error::QmpError;
use super::events::EventRow;
use super::negotiation::{Capabilities, NEGOTIATION};
use super::parser::Parser;
use super::print;
use super::request::{self, Id, Request};
use super::version::version;
use crate::value::Object;

/// A conversation from its greeting on. Pure: text in, commands and text out.
pub struct Session {
    parser: Parser,
    pretty: bool,
    capabilities: Option<Capabilities>,
}

/// What becomes of something a client has sent.
pub enum Received {
    /// It is answered by this.
    Reply(String),
    /// It is a command with its arguments, which are to be read. [`Session::answer`] makes a line of the outcome.
    Call(Ticket, &'static dyn QmpCommand, Object),
}

/// Belongs to a command under way.
#[must_use = "a command is answered"]
pub struct Ticket(Id);

/// A message to clients that answers no command.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Which one.
    pub row: &'static EventRow,
    /// What it was about; an object.
    pub data: Value,
    /// When.
    pub at: SystemTime,
}

impl Session {
    /// Begins a client's session. `pretty`: output is indented.
    pub fn new(pretty: bool) -> Self {
        Session { parser: Parser::new(), pretty, capabilities: None }
    }

    /// Returns the greeting, the first line for the client.
    pub fn greeting(&self) -> String {
        self.line(json!({"QMP": {"version": version(), "capabilities": ["oob"]}}))
    }

    /// Returns an error line for a client, in place of the greeting.
    ///
    /// The client cannot be served.
    pub fn error(&self, error: QmpError) -> String {
        self.answer(Ticket(None), Err(error))
    }

    /// Returns whether the client has completed capabilities negotiation.
    pub fn has_negotiated(&self) -> bool {
        self.capabilities.is_some()
    }

    /// Returns the result of the client's next message.
    ///
    /// Removes the message from `input`. `None`: all input was read.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Received> {
        let parsed = self.parser.next(input)?;
        let takes_oob = self.capabilities.is_some_and(|enabled| enabled.out_of_band);
        let (id, request) = match parsed {
            Ok(value) => request::parse(value, takes_oob),
            Err(desc) => (None, Err(QmpError::generic(desc))),
        };
        let called = match request {
            Ok(request) if self.capabilities.is_none() => self.negotiate(request).map(|()| None),
            Ok(request) => look_up(request).map(Some),
            Err(error) => Err(error),
        };
        Some(match called {
            Ok(Some((command, arguments))) => Received::Call(Ticket(id), command, arguments),
            Ok(None) => Received::Reply(self.answer(Ticket(id), Ok(json!({})))),
            Err(error) => Received::Reply(self.answer(Ticket(id), Err(error))),
        })
    }

    /// Carries out the first command.
    fn negotiate(&mut self, request: Request) -> Result<(), QmpError> {
        if request.command != NEGOTIATION.name() {
            return Err(QmpError::command_not_found(
                "Expecting capabilities negotiation with 'qmp_capabilities'",
            ));
        }
        self.capabilities = Some(NEGOTIATION.parse(command::given(request.arguments))?);
        Ok(())
    }

    /// Returns the answer to a command.
    pub fn answer(&self, ticket: Ticket, result: Result<Value, QmpError>) -> String {
        let mut answer = Map::new();
        match result {
            Ok(value) => {
                answer.insert("return".into(), value);
                answer.extend(ticket.0.map(|id| ("id".into(), id)));
            }
            Err(QmpError { class, desc }) => {
                answer.extend(ticket.0.map(|id| ("id".into(), id)));
                answer.insert("error".into(), json!({"class": class.name(), "desc": desc}));
            }
        }
        self.line(Value::Object(answer))
    }

    /// Returns the line for an event. `None` until the client has negotiated.
    pub fn event(&self, event: &Event) -> Option<String> {
        self.capabilities?;
        let since = event.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, microseconds) = (since.as_secs(), since.subsec_micros());
        Some(self.line(json!({
            "timestamp": {"seconds": seconds, "microseconds": microseconds},
            "event": event.row.name,
            "data": event.data,
        })))
    }

    fn line(&self, value: Value) -> String {
        print::line(&value, self.pretty)
    }
}

/// Finds a command that comes after the negotiation.
fn look_up(request: Request) -> Result<(&'static dyn QmpCommand, Object), QmpError> {
    let name = &request.command;
    if name == NEGOTIATION.name() {
        return Err(QmpError::command_not_found(
            "Capabilities negotiation is already complete, command ignored",
        ));
    }
    let found = command::find(name).ok_or_else(|| {
        QmpError::command_not_found(format!("The command {name} has not been found"))
    })?;
    if request.out_of_band {
        // No command is both urgent and quick enough.
        let desc = format!("The command {name} does not support OOB");
        return Err(QmpError::generic(desc));
    }
    Ok((found, command::given(request.arguments)))
}
