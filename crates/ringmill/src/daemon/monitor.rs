//! Monitors: clients that speak QMP, each on a task of the control loop.
//!
//! A client has one command under way at a time; its next one is read when that is answered. So what
//! a client can occupy is bounded: the bytes of one command, and what it does not read of what it is
//! sent.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::SystemTime;

use control::qmp::events::EventRow;
use control::qmp::{Command, Event, QmpError, Session, Step};
use event_loop::{EventLoop, oneshot, take_turns};
use nix::errno::Errno;

use super::chardev::{Chardev, Stream};
use super::signal::{Signal, until};
use super::turn::Turn;

/// Bytes that a client may leave unread before its commands are not read any more.
const MAX_UNREAD: usize = 64 << 10;

/// Bytes that it may leave unread before it is sent away instead of being told of one more event.
const MAX_UNREAD_EVENTS: usize = 1 << 20;

/// How long a client that sends no more has to read what it was sent, nanoseconds.
pub(super) const LINGER_NS: u64 = 1_000_000_000;

/// How a command ended.
pub(super) type Outcome = Result<serde_json::Value, QmpError>;

/// A command, and where its outcome goes.
pub(super) struct Request {
    pub(super) command: Command,
    pub(super) answer: oneshot::Sender<Outcome>,
}

/// All clients of all monitors.
#[derive(Clone, Default)]
pub(super) struct Clients(Rc<RefCell<Vec<Weak<Client>>>>);

/// A monitor in the making.
pub(super) struct Monitor<F> {
    /// Of the character device.
    pub(super) id: String,
    pub(super) event_loop: EventLoop,
    pub(super) pretty: bool,
    pub(super) clients: Clients,
    pub(super) turn: Rc<Turn>,
    /// Takes its clients' commands.
    pub(super) requests: F,
}

struct Client {
    session: RefCell<Session>,
    unread: RefCell<VecDeque<u8>>,
    /// A command is under way.
    waits: Cell<bool>,
    /// It has left too much unread.
    lost: Cell<bool>,
    changed: Signal,
}

impl Clients {
    fn all(&self) -> Vec<Rc<Client>> {
        let mut clients = self.0.borrow_mut();
        clients.retain(|client| client.strong_count() > 0);
        clients.iter().filter_map(Weak::upgrade).collect()
    }

    /// Tells all clients that have negotiated.
    pub(super) fn tell(&self, row: &'static EventRow, data: serde_json::Value) {
        let event = Event { row, data, at: SystemTime::now() };
        for client in self.all() {
            let line = client.session.borrow().event(&event);
            if let Some(line) = line {
                client.tell(&line);
            }
        }
    }

    /// Waits until all have been sent, and have taken, what there is for them.
    pub(super) async fn settle(&self) {
        for client in self.all() {
            client.changed.until(|| client.is_settled().then_some(())).await;
        }
    }
}

impl<F: Fn(Request)> Monitor<F> {
    /// Serves the clients of `chardev`, one after the other.
    pub(super) async fn run(self, chardev: Chardev) {
        self.turn.begun().await;
        match chardev {
            Chardev::Connected(stream) => self.serve(&stream).await,
            Chardev::Listening { listener, first } => {
                if let Some(stream) = first {
                    self.serve(&stream).await;
                }
                let who = format!("chardev {}", self.id);
                loop {
                    match self.turn.unless_over(listener.accept(&who)).await {
                        Ok(socket) => {
                            self.serve(&Stream::of_socket(&self.event_loop, socket)).await;
                        }
                        Err(error) => {
                            log::error!("{who}: takes no more clients: accept failed: {error}");
                            return;
                        }
                    }
                }
            }
        }
    }

    async fn serve(&self, stream: &Stream) {
        let client = Rc::new(Client::new(Session::new(self.pretty)));
        self.clients.0.borrow_mut().push(Rc::downgrade(&client));
        log::info!("chardev {}: client connected", self.id);
        let greeting = client.session.borrow().greeting();
        client.say(&greeting);
        let end = match until(self.listen(&client, stream), client.write_all(stream)).await {
            Ok(Ok(())) => {
                // It may have closed only the direction it sends in.
                let deadline = self.event_loop.now_ns() + LINGER_NS;
                let settled = client.changed.until(|| client.is_settled().then_some(()));
                let sent = async { until(settled, client.write_all(stream)).await };
                let _ = until(sent, self.event_loop.sleep_until(deadline)).await;
                None
            }
            Ok(Err(error)) | Err(Some(error)) => Some(error.desc()),
            Err(None) => Some("it does not read what it is sent"),
        };
        match end {
            None => log::info!("chardev {}: client disconnected", self.id),
            Some(why) => log::warn!("chardev {}: closed the connection: {why}", self.id),
        }
    }

    /// Reads and carries out what the client sends, until it sends no more.
    async fn listen(&self, client: &Client, stream: &Stream) -> Result<(), Errno> {
        let mut buf = [0; 4096];
        loop {
            let len = match stream.read(&mut buf).await {
                Ok(0) | Err(Errno::ECONNRESET) => return Ok(()),
                Ok(len) => len,
                Err(errno) => return Err(errno),
            };
            let mut input = buf.get(..len).unwrap_or_default();
            loop {
                client.has_room().await;
                let step = client.session.borrow_mut().next(&mut input);
                match step {
                    None => break,
                    Some(Step::Reply(line)) => client.say(&line),
                    Some(Step::Run(ticket, command)) => {
                        client.waits.set(true);
                        let (answer, outcome) = oneshot::channel();
                        (self.requests)(Request { command, answer });
                        // Without an answer the daemon is about to end.
                        if let Ok(outcome) = outcome.await {
                            let line = client.session.borrow().answer(ticket, outcome);
                            client.say(&line);
                        }
                        client.waits.set(false);
                        client.changed.notify();
                    }
                }
                take_turns().await;
            }
        }
    }
}

impl Client {
    fn new(session: Session) -> Self {
        Client {
            session: RefCell::new(session),
            unread: RefCell::default(),
            waits: Cell::new(false),
            lost: Cell::new(false),
            changed: Signal::default(),
        }
    }

    fn unread(&self) -> usize {
        self.unread.borrow().len()
    }

    fn is_settled(&self) -> bool {
        self.lost.get() || (!self.waits.get() && self.unread() == 0)
    }

    /// Sends a line that the client waits for.
    fn say(&self, line: &str) {
        self.unread.borrow_mut().extend(line.as_bytes());
        self.changed.notify();
    }

    /// Sends a line that it has not asked for.
    fn tell(&self, line: &str) {
        if self.unread() > MAX_UNREAD_EVENTS {
            self.lost.set(true);
            self.changed.notify();
        } else {
            self.say(line);
        }
    }

    async fn has_room(&self) {
        self.changed.until(|| (self.unread() < MAX_UNREAD).then_some(())).await;
    }

    /// Writes whatever there is to be written, until that fails; `None`: the client reads too little.
    async fn write_all(&self, stream: &Stream) -> Option<Errno> {
        loop {
            let chunk: Vec<u8> = self
                .changed
                .until(|| {
                    let unread = self.unread.borrow();
                    let chunk = unread.as_slices().0;
                    let chunk = chunk.get(..4096).unwrap_or(chunk);
                    (self.lost.get() || !chunk.is_empty()).then(|| chunk.to_vec())
                })
                .await;
            let lost = self.changed.until(|| self.lost.get().then_some(()));
            match until(stream.write(&chunk), lost).await {
                Ok(Ok(written)) => {
                    self.unread.borrow_mut().drain(..written);
                    self.changed.notify();
                }
                Ok(Err(errno)) => return Some(errno),
                Err(()) => return None,
            }
            take_turns().await;
        }
    }
}
