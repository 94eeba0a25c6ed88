//! `ctl`: a client of QMP for people. What its command line says, as QMP's commands.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use serde_json::{Map, Value as Json};

use crate::error::OptionError;
use crate::qmp::command as qmp;
use crate::shape::{Member, Shape, Union};
use crate::table::{Field, Row};
use crate::value::{Object, Value};
use crate::{help, json, keyval, scalar};

/// Options of `ctl`.
#[derive(Debug, Clone, PartialEq)]
pub struct CtlOptions {
    /// Where the monitor is.
    pub socket: CtlSocket,
    /// `--json`: what comes is printed as it is.
    pub json: bool,
    /// What is to be done.
    pub request: CtlRequest,
}

/// A monitor's socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CtlSocket {
    /// A path.
    Unix(PathBuf),
    /// `HOST:PORT`.
    Inet(String),
}

impl fmt::Display for CtlSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CtlSocket::Unix(path) => write!(f, "{}", path.display()),
            CtlSocket::Inet(address) => f.write_str(address),
        }
    }
}

/// What `ctl` is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum CtlRequest {
    /// No command: list those that the monitor has.
    Commands,
    /// `events`: show events as they come.
    Events,
    /// Any other: have the monitor carry it out.
    Execute(CtlCommand),
}

/// A command with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct CtlCommand {
    /// Its name.
    pub name: String,
    /// Its arguments, as QMP has them.
    pub arguments: Map<String, Json>,
}

impl CtlCommand {
    /// Checks the command as ringmill would, before it is sent.
    ///
    /// Another daemon may take more.
    ///
    /// # Errors
    ///
    /// What ringmill would answer, with what is known.
    pub fn check(&self) -> Result<(), OptionError> {
        let Some(row) = qmp::find(&self.name) else {
            let message = format!("The command {} has not been found", self.name);
            let hint = "'ringmill ctl <socket>' lists the commands.";
            return Err(OptionError::new(message).hint(hint));
        };
        row.check(qmp::given(self.arguments.clone())).map_err(|error| match error.hint {
            Some(_) => error,
            None => {
                let size = size_hint(&self.arguments, "", &error.message);
                let hint = size.unwrap_or_else(|| arguments_hint(row.name()));
                error.hint(hint)
            }
        })
    }
}

/// Returns what to write instead of a size with a suffix, if `message` is about such an argument.
fn size_hint(arguments: &Map<String, Json>, above: &str, message: &str) -> Option<String> {
    arguments.iter().find_map(|(name, value)| {
        let path = format!("{above}{name}");
        match value {
            Json::Object(below) => size_hint(below, &format!("{path}."), message),
            Json::String(text) if message.contains(&format!("'{path}', expected: integer")) => {
                let bytes = scalar::size(text)?;
                Some(format!("QMP takes numbers, sizes in bytes: {path}={bytes} is {text}."))
            }
            Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) | Json::Array(_) => None,
        }
    })
}

fn arguments_hint(command: &str) -> String {
    format!("'ringmill ctl <socket> {command} help' lists its arguments.")
}

/// Returns a text that lists commands of a monitor.
///
/// Each known command has a description.
pub fn command_list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    help::qmp_commands(names)
}

/// What the command line said.
#[derive(Default)]
pub(crate) struct Draft {
    json: bool,
    arguments: Vec<OsString>,
}

/// The options of the command line.
pub(crate) static OPTIONS: &[Field<Draft>] =
    &[Row::optional("json", "tables", "print what comes as JSON, for programs")
        .flag(|draft| draft.json = true)];

/// Takes the socket, the command and its arguments.
pub(crate) fn start(arguments: Vec<OsString>) -> Draft {
    Draft { json: false, arguments }
}

/// What came of the command line: options, or a text to print.
pub(crate) enum Finished {
    Options(CtlOptions),
    Help(String),
}

/// Puts what was said together.
pub(crate) fn finish(draft: Draft) -> Result<Finished, OptionError> {
    let mut arguments = draft.arguments.into_iter();
    let socket = arguments.next().ok_or_else(|| {
        OptionError::new("ctl: a socket is missing")
            .hint("Usage: ringmill ctl <socket> [<command> [<name>=<value>…]]")
    })?;
    let socket = self::socket(socket);
    let words = arguments.map(|word| {
        let text = word.into_string();
        text.map_err(|_| OptionError::new("ctl: an argument is not valid UTF-8"))
    });
    let words: Vec<String> = words.collect::<Result<_, _>>()?;
    let request = match words.split_first() {
        None => CtlRequest::Commands,
        Some((name, [])) if name == "help" => CtlRequest::Commands,
        Some((name, [])) if name == "events" => CtlRequest::Events,
        Some((name, [word, ..])) if name == "events" => {
            return Err(OptionError::new(format!("events: {word}: Unexpected argument")));
        }
        Some((message, rest)) if message.starts_with('{') => match rest.first() {
            Some(word) => {
                return Err(OptionError::new(format!("ctl: {word}: Unexpected argument")));
            }
            None => {
                let request = CtlRequest::Execute(message_of(message)?);
                return Ok(Finished::Options(CtlOptions { socket, json: true, request }));
            }
        },
        Some((name, given)) => match command(name, given)? {
            Said::Help(text) => return Ok(Finished::Help(text)),
            Said::Command(command) => CtlRequest::Execute(command),
        },
    };
    Ok(Finished::Options(CtlOptions { socket, json: draft.json, request }))
}

/// Reads a command that is written as QMP has it: `{"execute": …, "arguments": …}`.
fn message_of(text: &str) -> Result<CtlCommand, OptionError> {
    let of = |why: String| {
        OptionError::new(format!("ctl: {why}")).hint(
            "Usage: ringmill ctl <socket> '{\"execute\": \"<command>\", \"arguments\": {…}}', or ringmill ctl \
             <socket> <command> <name>=<value>…",
        )
    };
    let message: Map<String, Json> =
        serde_json::from_str(text).map_err(|error| of(format!("not a QMP command: {error}")))?;
    let (mut name, mut arguments) = (None, Map::new());
    for (member, value) in message {
        match (member.as_str(), value) {
            ("execute", Json::String(command)) => name = Some(command),
            ("arguments", Json::Object(given)) => arguments = given,
            ("id", _) => {}
            (other, _) => return Err(of(format!("not a QMP command: unexpected '{other}'"))),
        }
    }
    let name = name.ok_or_else(|| of("not a QMP command: 'execute' is missing".to_owned()))?;
    Ok(CtlCommand { name, arguments })
}

/// A path, or `HOST:PORT`.
pub(crate) fn socket(word: OsString) -> CtlSocket {
    let inet = word.to_str().filter(|text| {
        let port = text.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        matches!(port, Some(Ok(_))) && !text.contains('/')
    });
    match inet {
        Some(address) => CtlSocket::Inet(address.to_owned()),
        None => CtlSocket::Unix(word.into()),
    }
}

enum Said {
    Help(String),
    Command(CtlCommand),
}

fn command(name: &str, given: &[String]) -> Result<Said, OptionError> {
    let row = qmp::find(name);
    let shape = row.map(|row| row.arguments()).map(|shape| match shape {
        Shape::Named(_, union) => Shape::Union(union()),
        shape => shape,
    });
    let tag = match &shape {
        Some(Shape::Union(union)) => Some(union.tag),
        _ => None,
    };
    let mut arguments = Map::new();
    let mut text: Vec<&str> = Vec::new();
    let of = |error: OptionError| match error.hint {
        Some(_) => error.of(name),
        None => error.of(name).hint(arguments_hint(name)),
    };
    for word in given {
        match json_value(word).map_err(of)? {
            Some((name, value)) => drop(arguments.insert(name.to_owned(), value)),
            None if word.starts_with('{') => {
                let object = json::parse(word).map_err(of)?;
                arguments.extend(object.into_iter().map(|(name, value)| (name, value.into())));
            }
            None => text.push(word),
        }
    }
    let parsed = keyval::parse(&text.join(","), tag).map_err(of)?;
    if parsed.help {
        let (Some(row), Some(shape)) = (row, shape) else {
            return Err(OptionError::new(format!("{name}: ringmill has no command of this name"))
                .hint("'ringmill ctl <socket>' lists the commands of a daemon."));
        };
        let tag = tag.and_then(|tag| crate::table::look(&parsed.object, tag));
        return Ok(Said::Help(help::qmp_command(row, &shape, tag.and_then(Value::as_text))));
    }
    arguments.extend(match &shape {
        Some(shape) => members(shape, parsed.object),
        None => guessed(parsed.object),
    });
    Ok(Said::Command(CtlCommand { name: name.to_owned(), arguments }))
}

/// Returns name and value of `name={…}` and `name=[…]`, values in JSON. Text may begin with `[`, too.
///
/// # Errors
///
/// The value begins as an object, and is not valid JSON.
fn json_value(word: &str) -> Result<Option<(&str, Json)>, OptionError> {
    let Some((name, value)) = word.split_once('=') else { return Ok(None) };
    if name.contains([',', '.', '{', '[']) || !value.starts_with(['{', '[']) {
        return Ok(None);
    }
    match serde_json::from_str(value) {
        Ok(json) => Ok(Some((name, json))),
        Err(error) if value.starts_with('{') || value.starts_with("[{") => {
            Err(OptionError::new(format!("{name}: not valid JSON: {error}")))
        }
        Err(_) => Ok(None),
    }
}

// ---- text with types ---------------------------------------------------------------------------

/// The members of an object, each as the type that it is to have.
fn members(shape: &Shape, object: Object) -> Map<String, Json> {
    match shape {
        Shape::Object(known) => typed_members(&known.iter().collect::<Vec<_>>(), object),
        Shape::Union(union) => {
            let known = known_of(union, &object);
            typed_members(&known.iter().collect::<Vec<_>>(), object)
        }
        Shape::Named(_, union) => members(&Shape::Union(union()), object),
        Shape::Either(shapes) => match shapes.iter().find(|shape| shape.is_object()) {
            Some(shape) => members(shape, object),
            None => guessed(object),
        },
        _ => guessed(object),
    }
}

/// The members that an object of a union may have.
fn known_of(union: &Union, object: &Object) -> Vec<Member> {
    let said = crate::table::look(object, union.tag).and_then(Value::as_text);
    let variant = union.variants.iter().find(|variant| Some(variant.name) == said);
    let own = variant.map(|variant| variant.members.clone()).unwrap_or_default();
    union.common.iter().cloned().chain(own).collect()
}

fn typed_members(known: &[&Member], object: Object) -> Map<String, Json> {
    let typed = object.into_iter().map(|(name, value)| {
        let member = known.iter().find(|member| member.name == name);
        let value = match member {
            Some(member) => typed(&member.shape, value),
            None => Json::from(value),
        };
        (name, value)
    });
    typed.collect()
}

/// Converts a value to the type of `shape`. Text that does not fit stays text, and the reader of the member
/// refuses it.
fn typed(shape: &Shape, value: Value) -> Json {
    let text = match value {
        Value::Object(object) => return members(shape, object).into(),
        Value::List(list) => {
            let item = match shape {
                Shape::List(item, _) => item,
                _ => shape,
            };
            return list.into_iter().map(|value| typed(item, value)).collect();
        }
        Value::Text(text) => text,
        other => return other.into(),
    };
    let read = match shape {
        Shape::Flag | Shape::Bool => scalar::boolean(&text).map(Json::from),
        // QMP has sizes of both types, such as that of block_resize and that of blockdev-create.
        Shape::Int(_) => {
            let size = || scalar::size(&text).and_then(|size| i64::try_from(size).ok());
            scalar::integer(&text).or_else(size).map(Json::from)
        }
        Shape::Size => scalar::size(&text).map(Json::from),
        Shape::List(item, _) => return Json::Array(vec![typed(item, Value::Text(text))]),
        Shape::Any => return guess(text),
        _ => None,
    };
    read.unwrap_or_else(|| text.into())
}

/// The members of an object of which nothing is known.
fn guessed(object: Object) -> Map<String, Json> {
    let guessed = object.into_iter().map(|(name, value)| {
        let value = match value {
            Value::Text(text) => guess(text),
            Value::Object(object) => guessed(object).into(),
            Value::List(list) => list.into_iter().map(|value| typed(&Shape::Any, value)).collect(),
            other => other.into(),
        };
        (name, value)
    });
    guessed.collect()
}

/// What the text is in JSON, if it is a number, a boolean or something in brackets; else text.
fn guess(text: String) -> Json {
    match serde_json::from_str(&text) {
        Ok(Json::String(_)) | Err(_) => text.into(),
        Ok(json) => json,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_paths_or_ports() {
        let inet = |text: &str| matches!(socket(text.into()), CtlSocket::Inet(_));
        assert!(inet("localhost:4444") && inet("[::1]:4444"));
        assert!(!inet("qmp.sock") && !inet("/run/x:1") && !inet("a:b") && !inet("a:70000"));
    }
}
