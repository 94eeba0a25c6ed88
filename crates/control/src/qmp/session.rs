//! One client's conversation: its input becomes commands, and their results become lines.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::commands::{self, Command, Job, QmpCommand};
use super::error::QmpError;
use super::events::EventRow;
use super::parser::Parser;
use super::print;
use super::request::{self, Id};
use crate::value::Object;

/// A conversation, from the greeting on. Pure: text in, commands and text out.
pub struct Session {
    parser: Parser,
    pretty: bool,
    capabilities: Option<Capabilities>,
}

/// The capabilities that the client has enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `oob`: commands with `exec-oob`.
    pub out_of_band: bool,
}

/// The handling of a request.
pub enum Step {
    /// Answer with this.
    Reply(String),
    /// Carry out this command; [`Session::answer`] makes a line of its result.
    Run(Ticket, Command),
    /// Carry out this command, which the program has [added](super::add). Its arguments are not parsed yet.
    Call(Ticket, &'static dyn QmpCommand, Object),
}

/// A parsed request.
enum Asked {
    Job(Job),
    Call(&'static dyn QmpCommand, Object),
}

/// Belongs to a command in progress.
#[must_use = "a command is answered"]
pub struct Ticket(Id);

/// An event for clients.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Which one.
    pub row: &'static EventRow,
    /// Its data, an object.
    pub data: Value,
    /// When it happened.
    pub at: SystemTime,
}

impl Session {
    /// Starts a conversation. `pretty`: output is indented.
    pub fn new(pretty: bool) -> Self {
        Session { parser: Parser::new(), pretty, capabilities: None }
    }

    /// Returns the first line for the client.
    pub fn greeting(&self) -> String {
        self.line(json!({"QMP": {"version": commands::version(), "capabilities": ["oob"]}}))
    }

    /// Returns an error line for a client that cannot be served, in place of the greeting.
    pub fn error(&self, error: QmpError) -> String {
        self.answer(Ticket(None), Err(error))
    }

    /// Returns whether the client has completed the negotiation.
    pub fn has_negotiated(&self) -> bool {
        self.capabilities.is_some()
    }

    /// Handles the next request in `input`, and removes it there. Returns `None` if `input` has no complete request.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Step> {
        let parsed = self.parser.next(input)?;
        let takes_oob = self.capabilities.is_some_and(|enabled| enabled.out_of_band);
        let (id, job) = match parsed {
            Ok(value) => {
                let (id, request) = request::parse(value, takes_oob);
                (id, request.and_then(|request| self.look_up(request)))
            }
            Err(desc) => (None, Err(QmpError::generic(desc))),
        };
        let result = match job {
            Ok(Asked::Call(command, arguments)) => {
                return Some(Step::Call(Ticket(id), command, arguments));
            }
            Ok(Asked::Job(Job::Run(command))) => return Some(Step::Run(Ticket(id), command)),
            Ok(Asked::Job(Job::Negotiate(capabilities))) => {
                self.capabilities = Some(capabilities);
                Ok(json!({}))
            }
            Ok(Asked::Job(Job::Answer(answer))) => Ok(answer()),
            Err(error) => Err(error),
        };
        Some(Step::Reply(self.answer(Ticket(id), result)))
    }

    fn look_up(&self, request: request::Request) -> Result<Asked, QmpError> {
        let name = &request.command;
        let negotiates = name == commands::NEGOTIATION;
        match (self.capabilities, negotiates) {
            (None, false) => {
                return Err(QmpError::command_not_found(
                    "Expecting capabilities negotiation with 'qmp_capabilities'",
                ));
            }
            (Some(_), true) => {
                return Err(QmpError::command_not_found(
                    "Capabilities negotiation is already complete, command ignored",
                ));
            }
            _ => {}
        }
        let command = commands::find(name).ok_or_else(|| {
            QmpError::command_not_found(format!("The command {name} has not been found"))
        })?;
        if request.out_of_band {
            // No command is both urgent and fast enough.
            let desc = format!("The command {name} does not support OOB");
            return Err(QmpError::generic(desc));
        }
        let arguments = commands::given(request.arguments);
        match commands::find_row(name) {
            Some(row) => Ok(Asked::Job(row.read(arguments)?)),
            None => Ok(Asked::Call(command, arguments)),
        }
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

    /// Returns the line for an event. `None` before the negotiation.
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
