//! The operator's side of a QMP connection.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use serde_json::{Value as Json, json};

use crate::world::World;

/// Interval at which a pending answer is checked, nanoseconds: at first, and at most.
const LOOK_NS: u64 = 2_000;
const MOST_NS: u64 = 200_000;

/// How long an answer or event may take, nanoseconds.
const PATIENCE_NS: u64 = 10_000_000_000;

/// The daemon was killed, or has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

/// The answer to a command: the value, or the description of the error.
pub(crate) type Answer = Result<Json, String>;

/// A connection to a monitor.
pub(crate) struct Qmp {
    world: Rc<World>,
    stream: UnixStream,
    /// Number of killed daemons before the connection.
    kills: u64,
    input: Vec<u8>,
    /// Place for what the socket has.
    buffer: Box<[u8]>,
    /// Events not yet looked at.
    events: VecDeque<Json>,
    /// A command may have changed the configuration since [`is_known`](Qmp::is_known).
    changed: bool,
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.world.fds.forget(self.stream.as_raw_fd());
        self.world.poke_control();
    }
}

impl Qmp {
    /// Connects and negotiates.
    pub(crate) fn connect(world: &Rc<World>) -> Result<Qmp, Gone> {
        let stream = world.monitor().connect();
        stream.set_nonblocking(true).expect("a socket");
        world.fds.keep(stream.as_raw_fd());
        world.poke_control();
        let (input, events) = (Vec::new(), VecDeque::new());
        let kills = world.kills();
        let buffer = vec![0; 65536].into();
        let world_of = world.clone();
        let mut qmp = Qmp { world: world_of, stream, kills, input, buffer, events, changed: false };
        let greeting = qmp.line()?;
        if greeting.get("QMP").is_none() {
            world.fail(&format!("no greeting of QMP: {greeting}"));
        }
        let ready = qmp.command("qmp_capabilities", json!({}))?;
        ready.unwrap_or_else(|error| world.fail(&format!("qmp_capabilities: {error}")));
        Ok(qmp)
    }

    /// Sends a command and waits for its answer.
    pub(crate) fn command(&mut self, name: &str, arguments: Json) -> Result<Answer, Gone> {
        self.changed |=
            !name.starts_with("query-") && name != "qom-get" && name != "qmp_capabilities";
        let mut line = json!({"execute": name, "arguments": arguments}).to_string();
        line.push('\n');
        self.world.machine.say(|| format!("operator: {}", line.trim_end()));
        // The socket's buffer is larger than a command.
        self.stream.write_all(line.as_bytes()).map_err(|_| Gone)?;
        self.world.poke_control();
        loop {
            let mut line = self.line()?;
            if let Some(value) = line.get_mut("return") {
                self.world.coverage.commands.one();
                return Ok(Ok(value.take()));
            }
            if let Some(error) = line.get("error") {
                self.world.coverage.commands.one();
                self.world.machine.say(|| format!("operator: {error}"));
                return Ok(Err(error["desc"].as_str().unwrap_or_default().to_owned()));
            }
            self.events.push_back(line);
        }
    }

    /// The configuration is known.
    pub(super) fn is_known(&mut self) {
        self.changed = false;
    }

    /// Whether a command may have changed it since.
    pub(super) fn has_changed(&self) -> bool {
        self.changed
    }

    /// Waits for an event that `wanted` accepts. Drops the events before it.
    pub(crate) fn event<T>(
        &mut self,
        what: &str,
        wanted: impl Fn(&str, &Json) -> Option<T>,
    ) -> Result<T, Gone> {
        let until = self.world.machine.now_ns() + PATIENCE_NS;
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.line()?,
            };
            let name = event["event"].as_str().unwrap_or_default();
            if let Some(found) = wanted(name, &event["data"]) {
                return Ok(found);
            }
            if self.world.machine.now_ns() > until {
                self.world.fail(&format!("the operator waits in vain for {what}"));
            }
        }
    }

    /// Waits for a line of the daemon.
    fn line(&mut self) -> Result<Json, Gone> {
        let machine = &self.world.machine;
        let (until, mut pause) = (machine.now_ns() + PATIENCE_NS, LOOK_NS);
        loop {
            if self.world.kills() != self.kills {
                // Answers of a killed daemon may be about what a power cut has taken back.
                return Err(Gone);
            }
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                let parsed = serde_json::from_slice(&line);
                return Ok(parsed.unwrap_or_else(|error| {
                    let line = String::from_utf8_lossy(&line);
                    self.world.fail(&format!("not JSON from a monitor: {error}: {line}"))
                }));
            }
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(Gone),
                Ok(len) => {
                    self.input.extend(&self.buffer[..len]);
                    // The daemon may wait for room in the socket.
                    self.world.poke_control();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if machine.now_ns() > until {
                        let actors = machine.actors();
                        self.world.fail(&format!("a monitor does not answer:\n{actors}"));
                    }
                    machine.sleep(pause);
                    pause = (pause * 2).min(MOST_NS);
                }
                Err(_) => return Err(Gone),
            }
        }
    }
}
