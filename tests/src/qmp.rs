//! A QMP client, as far as tests need one.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::{PATIENCE, eventually};

/// A connection to a QMP server, past the greeting.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the server at `path`, once it is there, and leaves capabilities negotiation.
    pub fn connect(path: &Path) -> Self {
        let stream = eventually("a QMP server", || UnixStream::connect(path).ok());
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let mut qmp = Self { stream: BufReader::new(stream) };
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
        let message = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{message}").expect("the QMP server listens");
        loop {
            let mut answer = self.receive();
            match answer.get_mut("return") {
                Some(value) => return value.take(),
                None => assert!(answer.get("event").is_some(), "{message}: {answer}"),
            }
        }
    }

    /// Waits for an event of that name.
    pub fn wait_for(&mut self, event: &str) {
        while self.receive().get("event").and_then(Value::as_str) != Some(event) {}
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("an answer over QMP");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line:?}"))
    }
}
