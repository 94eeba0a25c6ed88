//! A QMP client, as far as tests need one.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::{PATIENCE, eventually};

/// A connection to a QMP server, past the greeting.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// Came while an answer was waited for.
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to the server at `path`, once it is there, and leaves capabilities negotiation.
    pub fn connect(path: &Path) -> Self {
        let stream = eventually("a QMP server", || UnixStream::connect(path).ok());
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let mut qmp = Self { stream: BufReader::new(stream), events: VecDeque::new() };
        let greeting = qmp.receive();
        assert!(greeting.get("QMP").is_some(), "not a greeting: {greeting}");
        qmp.execute("qmp_capabilities", json!({}));
        qmp
    }

    /// Executes `command`; gives what it returned.
    ///
    /// # Panics
    ///
    /// When the server answers with an error.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments);
        match answer.get_mut("return") {
            Some(value) => value.take(),
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
        writeln!(self.stream.get_mut(), "{text}").expect("the QMP server listens");
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
        loop {
            let mut message = self.events.pop_front().unwrap_or_else(|| self.receive());
            if message.get("event").and_then(Value::as_str) == Some(event) {
                return message.get_mut("data").map_or(Value::Null, Value::take);
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
