//! A client of a server's monitor.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value as Json, json};

/// Time limit of a message: a job sends none while it copies.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to a server's monitor.
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
    /// Events that have come before a reply.
    events: Vec<Json>,
}

impl Monitor {
    /// Connects, and waits until commands are taken.
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("connecting to the monitor")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self { stream: BufReader::new(stream), events: Vec::new() };
        monitor.message()?;
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    fn message(&mut self) -> Result<Json> {
        let mut line = String::new();
        self.stream.read_line(&mut line).context("waiting for the monitor")?;
        ensure!(!line.is_empty(), "the monitor has closed the connection");
        serde_json::from_str(&line).with_context(|| format!("the monitor said {line:?}"))
    }

    /// Carries out a command, and waits for the reply.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Json) -> Result<()> {
        let message = json!({"execute": command, "arguments": arguments});
        writeln!(self.stream.get_mut(), "{message}").context("sending to the monitor")?;
        loop {
            let message = self.message()?;
            match message.get("error") {
                _ if message.get("event").is_some() => self.events.push(message),
                Some(error) => bail!("{command}: {error}"),
                None => return Ok(()),
            }
        }
    }

    /// Waits until a job has copied all: it has ended, or is ready.
    pub(crate) fn wait_for_job(&mut self) -> Result<()> {
        loop {
            let event = match self.events.pop() {
                Some(event) => event,
                None => self.message()?,
            };
            ensure!(event["data"]["error"].is_null(), "the job has failed: {event}");
            if matches!(event["event"].as_str(), Some("BLOCK_JOB_READY" | "BLOCK_JOB_COMPLETED")) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn monitor(lines: &[&str]) -> (Monitor, UnixStream) {
        let (ours, mut server) = UnixStream::pair().unwrap();
        for line in lines {
            writeln!(server, "{line}").unwrap();
        }
        (Monitor { stream: BufReader::new(ours), events: Vec::new() }, server)
    }

    #[test]
    fn a_job_that_ends_before_the_reply_has_ended_and_a_failed_one_is_an_error() {
        let (mut ends, _server) =
            monitor(&[r#"{"event": "BLOCK_JOB_COMPLETED", "data": {}}"#, r#"{"return": {}}"#]);
        ends.execute("block-stream", &json!({})).unwrap();
        ends.wait_for_job().unwrap();
        let (mut fails, server) =
            monitor(&[r#"{"event": "BLOCK_JOB_COMPLETED", "data": {"error": "No space"}}"#]);
        assert!(fails.wait_for_job().unwrap_err().to_string().contains("No space"));
        drop(server);
        assert!(fails.wait_for_job().is_err(), "the server has ended");
        let (mut refused, _server) = monitor(&[r#"{"error": {"desc": "not found"}}"#]);
        let error = refused.execute("block-commit", &json!({})).unwrap_err();
        assert!(error.to_string().contains("not found"), "{error}");
    }
}
