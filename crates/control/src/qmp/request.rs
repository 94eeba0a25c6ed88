//! What one JSON value from a client asks for.

use serde_json::{Map, Value};

use super::error::QmpError;

/// A command by its name, its arguments not looked at yet.
pub(super) struct Request {
    pub(super) command: String,
    /// It asks to be carried out at once, before others (`exec-oob`).
    pub(super) out_of_band: bool,
    pub(super) arguments: Map<String, Value>,
}

/// What the client told the command from others by; the answer has it, too.
pub(super) type Id = Option<Value>;

/// Reads a request, with `exec-oob` where the client may use it.
pub(super) fn parse(value: Value, takes_oob: bool) -> (Id, Result<Request, QmpError>) {
    let Value::Object(mut members) = value else {
        return (None, Err(QmpError::generic("QMP input must be a JSON object")));
    };
    let id = members.shift_remove("id");
    (id, request(members, takes_oob))
}

fn request(members: Map<String, Value>, takes_oob: bool) -> Result<Request, QmpError> {
    let mut command: Option<(String, bool)> = None;
    let mut arguments = None;
    for (name, value) in members {
        match (name.as_str(), value) {
            ("execute", Value::String(text)) => put(&mut command, text, false)?,
            ("exec-oob", Value::String(text)) if takes_oob => put(&mut command, text, true)?,
            ("arguments", Value::Object(members)) => arguments = Some(members),
            ("execute", _) => return Err(wrong_type(&name, "a string")),
            ("exec-oob", _) if takes_oob => return Err(wrong_type(&name, "a string")),
            ("arguments", _) => return Err(wrong_type(&name, "an object")),
            _ => {
                let desc = format!("QMP input member '{name}' is unexpected");
                return Err(QmpError::generic(desc));
            }
        }
    }
    let Some((command, out_of_band)) = command else {
        return Err(QmpError::generic("QMP input lacks member 'execute'"));
    };
    Ok(Request { command, out_of_band, arguments: arguments.unwrap_or_default() })
}

fn put(command: &mut Option<(String, bool)>, text: String, oob: bool) -> Result<(), QmpError> {
    match command.replace((text, oob)) {
        None => Ok(()),
        Some(_) => Err(QmpError::generic("QMP input member 'execute' clashes with 'exec-oob'")),
    }
}

fn wrong_type(name: &str, expected: &str) -> QmpError {
    QmpError::generic(format!("QMP input member '{name}' must be {expected}"))
}
