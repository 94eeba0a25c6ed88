//! A QMP client, as far as tests need one.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::schema::Schema;
use crate::{PATIENCE, eventually};

/// An object with the members of `base` and of `more`, which wins.
pub fn merged(mut base: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().expect("an object") {
        base[name] = value.clone();
    }
    base
}

/// A connection to a QMP server, past the greeting.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// Came while an answer was waited for.
    events: VecDeque<Value>,
    /// What the server says of itself; each answer is held to it.
    schema: Schema,
}

impl Qmp {
    /// Connects to the server at `path`, once it is there, and leaves capabilities negotiation.
    pub fn connect(path: &Path) -> Self {
        Self::on(eventually("a QMP server", || UnixStream::connect(path).ok()))
    }

    /// Leaves capabilities negotiation on a new connection.
    pub fn on(stream: UnixStream) -> Self {
        let (mut qmp, greeting) = Self::with_greeting(stream);
        let mut returned = |command| {
            let mut answer = qmp.ask(command, json!({}));
            // QSD, which has `oob`, may greet twice a client that comes while it starts.
            while answer == greeting && greeting["QMP"]["capabilities"] == json!(["oob"]) {
                answer = qmp.answer();
            }
            match answer.get_mut("return") {
                Some(returned) => returned.take(),
                None => panic!("{command}: {answer}"),
            }
        };
        returned("qmp_capabilities");
        let schema = returned("query-qmp-schema");
        qmp.schema = Schema::new(&schema);
        qmp
    }

    /// Connects to the server at `path`, once it is there, and stays in capabilities negotiation.
    pub fn greeted(path: &Path) -> Self {
        Self::with_greeting(eventually("a QMP server", || UnixStream::connect(path).ok())).0
    }

    fn with_greeting(stream: UnixStream) -> (Self, Value) {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let (events, schema) = (VecDeque::new(), Schema::default());
        let mut qmp = Self { stream: BufReader::new(stream), events, schema };
        let greeting = qmp.receive();
        assert!(greeting.get("QMP").is_some(), "not a greeting: {greeting}");
        (qmp, greeting)
    }

    /// Executes `command`; gives what it returned.
    ///
    /// # Panics
    ///
    /// When the server answers with an error, or with what its own schema does not have.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments);
        match answer.get_mut("return") {
            Some(value) => {
                let wrong = self.schema.wrong(command, value);
                assert!(wrong.is_empty(), "{command}: not as the schema has it: {wrong:?}");
                value.take()
            }
            None => panic!("{command}: {answer}"),
        }
    }

    /// Executes `command`; gives the description of the error that it answers.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn refused(&mut self, command: &str, arguments: Value) -> String {
        let answer = self.ask(command, arguments);
        match answer.pointer("/error/desc").and_then(Value::as_str) {
            Some(desc) => desc.to_owned(),
            None => panic!("{command}: {answer}"),
        }
    }

    /// Executes `command`; gives the answer as it came. Events before it are kept for
    /// [`wait_for`](Self::wait_for).
    pub fn ask(&mut self, command: &str, arguments: Value) -> Value {
        self.send(&json!({ "execute": command, "arguments": arguments }).to_string());
        self.answer()
    }

    /// Sends text, and a line end.
    pub fn send(&mut self, text: &str) {
        // In one write: after `quit` the daemon may be gone before a separate line end.
        let line = format!("{text}\n");
        self.stream.get_mut().write_all(line.as_bytes()).expect("the QMP server listens");
    }

    /// Waits for the next message: an answer or an event.
    pub fn message(&mut self) -> Value {
        self.events.pop_front().unwrap_or_else(|| self.receive())
    }

    /// Waits for the next answer.
    pub fn answer(&mut self) -> Value {
        loop {
            let message = self.receive();
            if message.get("event").is_none() {
                return message;
            }
            self.events.push_back(message);
        }
    }

    /// Waits for an event of that name; gives its data. Those before it are forgotten.
    pub fn wait_for(&mut self, event: &str) -> Value {
        self.wait_for_event(event).get_mut("data").map_or(json!({}), Value::take)
    }

    /// The same; gives all of it.
    pub fn wait_for_event(&mut self, event: &str) -> Value {
        loop {
            let message = self.message();
            if message.get("event").and_then(Value::as_str) == Some(event) {
                let data = message.get("data").cloned().unwrap_or_else(|| json!({}));
                let wrong = self.schema.wrong(event, &data);
                assert!(wrong.is_empty(), "{event}: not as the schema has it: {wrong:?}");
                return message;
            }
        }
    }

    /// Waits until the server closes the connection.
    ///
    /// # Panics
    ///
    /// When it says something instead.
    pub fn closed(&mut self) {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line);
        assert!(!read.is_ok_and(|bytes| bytes > 0), "not the end: {line}");
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("an answer over QMP");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line:?}"))
    }
}
