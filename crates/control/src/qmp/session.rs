//! One client's conversation: what it sends becomes commands, what comes of them lines for it.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::commands::{self, Command, Job, QmpCommand};
use super::error::QmpError;
use super::events::EventRow;
use super::parser::Parser;
use super::print;
use super::request::{self, Id};
use crate::value::Object;

/// A conversation from its greeting on. Pure: text in, commands and text out.
pub struct Session {
    parser: Parser,
    pretty: bool,
    capabilities: Option<Capabilities>,
}

/// What the client has enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `oob`: commands with `exec-oob`.
    pub out_of_band: bool,
}

/// What becomes of something a client has sent.
pub enum Step {
    /// It is answered by this.
    Reply(String),
    /// It is to be carried out; [`Session::answer`] makes a line of the outcome.
    Run(Ticket, Command),
    /// The same, of a command that the program has [added](super::add). Its arguments are to be read.
    Call(Ticket, &'static dyn QmpCommand, Object),
}

/// What a request comes to.
enum Asked {
    Job(Job),
    Call(&'static dyn QmpCommand, Object),
}

/// Belongs to a command under way.
#[must_use = "a command is answered"]
pub struct Ticket(Id);

/// Something that clients are told without having asked.
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
    /// A new client. `pretty`: what it is sent is indented.
    pub fn new(pretty: bool) -> Self {
        Session { parser: Parser::new(), pretty, capabilities: None }
    }

    /// What it is sent first.
    pub fn greeting(&self) -> String {
        self.line(json!({"QMP": {"version": commands::version(), "capabilities": ["oob"]}}))
    }

    /// Returns an error line for a client that cannot be served, in place of the greeting.
    pub fn error(&self, error: QmpError) -> String {
        self.answer(Ticket(None), Err(error))
    }

    /// Whether the client has completed capabilities negotiation.
    pub fn has_negotiated(&self) -> bool {
        self.capabilities.is_some()
    }

    /// What comes of the next thing that it has sent; cuts that off `input`. `None`: all was read.
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
            // None is both urgent and quick enough.
            let desc = format!("The command {name} does not support OOB");
            return Err(QmpError::generic(desc));
        }
        let arguments = commands::given(request.arguments);
        match commands::find_row(name) {
            Some(row) => Ok(Asked::Job(row.read(arguments)?)),
            None => Ok(Asked::Call(command, arguments)),
        }
    }

    /// The answer to a command.
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

    /// What tells of an event; nothing before the client has negotiated.
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
