//! Monitors: clients that speak QMP, each on a task of the control loop.
//!
//! A socket takes up to [`MAX_CLIENTS`] clients at once. Each client has its own session, and events go to all
//! clients. A further client gets a QMP error, and its connection is closed.
//!
//! A client has one command under way at a time: the next command is read once the first is answered. This
//! bounds the memory of a client to the bytes of one command and its unread output.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};

use control::qmp::events::EventRow;
use control::qmp::{Event, QmpError, Received, Session, Ticket};
use event_loop::{EventLoop, oneshot, take_turns, until};
use log::Level;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use super::chardev::{Chardev, Stream};
use super::commands::{self, Accepted, Call};
use super::host::Host;
use super::signal::Signal;
use super::turn::Turn;

/// Limit of unread output in bytes. Above the limit, no commands of the client are read.
const MAX_UNREAD: usize = 64 << 10;

/// Limit of unread output in bytes. Above the limit, a further event disconnects the client.
const MAX_UNREAD_EVENTS: usize = 1 << 20;

/// Most clients of one socket at a time.
const MAX_CLIENTS: usize = 8;

/// How long a client may take to negotiate before another client takes its place, nanoseconds.
const NEGOTIATION_NS: u64 = 10_000_000_000;

/// Time that a client has to read its output after it has stopped sending, nanoseconds.
pub(super) const LINGER_NS: u64 = 1_000_000_000;

/// How a command ended.
pub(super) type Outcome = Result<serde_json::Value, QmpError>;

/// A command, and where its outcome goes.
pub(super) struct Request {
    pub(super) call: Call,
    pub(super) answer: oneshot::Sender<Outcome>,
}

/// All clients of all monitors.
#[derive(Clone)]
pub(super) struct Clients {
    clients: Rc<RefCell<Vec<Weak<Client>>>>,
    host: Rc<dyn Host>,
}

/// A monitor.
pub(super) struct Monitor<F> {
    /// The id of the character device.
    pub(super) id: String,
    pub(super) event_loop: EventLoop,
    pub(super) pretty: bool,
    pub(super) clients: Clients,
    pub(super) turn: Rc<Turn>,
    /// Takes its clients' commands.
    pub(super) requests: F,
    /// The clients of this monitor.
    pub(super) here: RefCell<Vec<Weak<Client>>>,
}

/// A client of a monitor.
pub(super) struct Client {
    connected_ns: u64,
    session: RefCell<Session>,
    unread: RefCell<VecDeque<u8>>,
    /// Bytes of events among them, and of those read since none was unread.
    events: Cell<usize>,
    /// A command is under way.
    waits: Cell<bool>,
    /// Why the connection is to be closed; `None` while it stays open.
    lost: Cell<Option<&'static str>>,
    changed: Signal,
}

impl Clients {
    /// Returns an empty list. Events have the time of `host`.
    pub(super) fn new(host: Rc<dyn Host>) -> Self {
        Clients { clients: Rc::default(), host }
    }

    fn all(&self) -> Vec<Rc<Client>> {
        let mut clients = self.clients.borrow_mut();
        clients.retain(|client| client.strong_count() > 0);
        clients.iter().filter_map(Weak::upgrade).collect()
    }

    /// Sends an event to all clients that have negotiated.
    pub(super) fn tell(&self, row: &'static EventRow, data: serde_json::Value) {
        let event = Event { row, data, at: self.host.time_of_day() };
        for client in self.all() {
            let line = client.session.borrow().event(&event);
            if let Some(line) = line {
                client.tell(&line);
            }
        }
    }

    /// Waits until all clients have their answers and events.
    pub(super) async fn settle(&self) {
        for client in self.all() {
            client.changed.until(|| client.is_settled().then_some(())).await;
        }
    }
}

impl<F: Fn(Request) + 'static> Monitor<F> {
    /// Serves the clients of `chardev`.
    pub(super) async fn run(self, chardev: Chardev) {
        self.turn.begun().await;
        let monitor = Rc::new(self);
        match chardev {
            Chardev::Connected(stream) => {
                let client = monitor.client();
                monitor.serve(&client, &stream).await;
            }
            Chardev::Listening { listener, first } => {
                first.into_iter().for_each(|socket| monitor.take(socket));
                let who = format!("chardev {}", monitor.id);
                loop {
                    match monitor.turn.unless_over(listener.accept(&who)).await {
                        Ok(socket) => monitor.take(socket),
                        Err(error) => {
                            log::error!("{who}: takes no more clients: accept failed: {error}");
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Serves a client that has connected, or refuses it if there is no place.
    fn take(self: &Rc<Self>, socket: OwnedFd) {
        if !self.has_place() {
            log::warn!("chardev {}: refused a client: there are {MAX_CLIENTS} already", self.id);
            let why = format!(
                "chardev '{}' has {MAX_CLIENTS} clients, which is the limit: try again when one of \
                 them has disconnected",
                self.id
            );
            let line = Session::new(self.pretty).error(QmpError::generic(why));
            // A new socket's buffer is empty: a line fits without waiting.
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let _ = send(socket.as_raw_fd(), line.as_bytes(), flags);
            return;
        }
        // Registered before the task runs, since the next client to connect must count this one.
        let client = self.client();
        let (monitor, stream) = (self.clone(), Stream::of_socket(&self.event_loop, socket));
        self.event_loop.spawn(async move { monitor.serve(&client, &stream).await });
    }

    /// Whether one more client can be served. If necessary, drops a client that does not negotiate.
    fn has_place(&self) -> bool {
        let here: Vec<_> = self.here.borrow().iter().filter_map(Weak::upgrade).collect();
        let mut staying = here.iter().filter(|client| client.lost.get().is_none());
        if staying.clone().count() < MAX_CLIENTS {
            return true;
        }
        let now_ns = self.event_loop.now_ns();
        let silent = staying.find(|client| {
            let since_ns = now_ns.saturating_sub(client.connected_ns);
            since_ns > NEGOTIATION_NS && !client.session.borrow().has_negotiated()
        });
        if let Some(silent) = silent {
            silent.lose("it has not negotiated, and another client wants its place");
        }
        silent.is_some()
    }

    fn client(&self) -> Rc<Client> {
        let client = Rc::new(Client::new(Session::new(self.pretty), self.event_loop.now_ns()));
        self.clients.clients.borrow_mut().push(Rc::downgrade(&client));
        let mut here = self.here.borrow_mut();
        here.retain(|client| client.strong_count() > 0);
        here.push(Rc::downgrade(&client));
        client
    }

    async fn serve(&self, client: &Client, stream: &Stream) {
        log::debug!("chardev {}: client connected", self.id);
        let greeting = client.session.borrow().greeting();
        client.say(&greeting);
        let end = match until(self.listen(client, stream), client.write_all(stream)).await {
            // As in QSD, standard output has events after the end of standard input.
            Ok(Ok(())) if stream.is_of_two_files() => Some(client.write_all(stream).await),
            Ok(Ok(())) => {
                // The client may have closed only its sending direction.
                let deadline = self.event_loop.now_ns() + LINGER_NS;
                let settled = client.changed.until(|| client.is_settled().then_some(()));
                let sent = async { until(settled, client.write_all(stream)).await };
                let _ = until(sent, self.event_loop.sleep_until(deadline)).await;
                None
            }
            Ok(Err(errno)) => Some(errno.desc()),
            Err(why) => Some(why),
        };
        match end {
            None => log::debug!("chardev {}: client disconnected", self.id),
            Some(why) => {
                // A client that disconnects with unread answers or events makes writes fail: no reason for a
                // warning.
                let is_sent_away = client.lost.get().is_some();
                let level = if is_sent_away { Level::Warn } else { Level::Debug };
                log::log!(level, "chardev {}: closed the connection: {why}", self.id);
            }
        }
    }

    /// Reads and carries out the client's commands until the end of its input.
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
                    Some(Received::Reply(line)) => client.say(&line),
                    Some(Received::Call(ticket, command, arguments)) => {
                        match commands::read(command.name(), arguments) {
                            Ok(Accepted::Call(call)) => self.carry_out(client, ticket, call).await,
                            Ok(Accepted::Answer(answer)) => client.answer(ticket, Ok(answer)),
                            Err(error) => client.answer(ticket, Err(error)),
                        }
                    }
                }
                take_turns().await;
            }
            // More may have come of a line without end.
            take_turns().await;
        }
    }

    /// Carries out a command, and sends the answer.
    async fn carry_out(&self, client: &Client, ticket: Ticket, call: Call) {
        client.waits.set(true);
        let (answer, outcome) = oneshot::channel();
        (self.requests)(Request { call, answer });
        // Without an answer the daemon is about to end.
        if let Ok(outcome) = outcome.await {
            client.answer(ticket, outcome);
        }
        client.waits.set(false);
        client.changed.notify();
    }
}

impl Client {
    fn new(session: Session, connected_ns: u64) -> Self {
        Client {
            connected_ns,
            session: RefCell::new(session),
            unread: RefCell::default(),
            events: Cell::new(0),
            waits: Cell::new(false),
            lost: Cell::new(None),
            changed: Signal::default(),
        }
    }

    fn unread(&self) -> usize {
        self.unread.borrow().len()
    }

    fn is_settled(&self) -> bool {
        self.lost.get().is_some() || (!self.waits.get() && self.unread() == 0)
    }

    /// Sends the answer to a command.
    fn answer(&self, ticket: Ticket, outcome: Outcome) {
        let line = self.session.borrow().answer(ticket, outcome);
        self.say(&line);
    }

    /// Sends a line that the client waits for.
    fn say(&self, line: &str) {
        self.unread.borrow_mut().extend(line.as_bytes());
        self.changed.notify();
    }

    /// Sends an event, or disconnects a client that does not read.
    fn tell(&self, line: &str) {
        // A long answer, which the client may be reading, does not count.
        if self.unread().min(self.events.get()) > MAX_UNREAD_EVENTS {
            self.lose("it does not read what it is sent");
        } else {
            self.events.update(|bytes| bytes + line.len());
            self.say(line);
        }
    }

    /// Closes the connection of the client.
    fn lose(&self, why: &'static str) {
        self.lost.set(Some(why));
        self.changed.notify();
    }

    async fn has_room(&self) {
        self.changed.until(|| (self.unread() < MAX_UNREAD).then_some(())).await;
    }

    /// Writes queued lines until the connection fails or is to be closed. Returns the reason.
    async fn write_all(&self, stream: &Stream) -> &'static str {
        let written = async {
            loop {
                let chunk: Vec<u8> = self
                    .changed
                    .until(|| {
                        let unread = self.unread.borrow();
                        let chunk = unread.as_slices().0;
                        let chunk = chunk.get(..4096).unwrap_or(chunk);
                        (!chunk.is_empty()).then(|| chunk.to_vec())
                    })
                    .await;
                match stream.write(&chunk).await {
                    Ok(written) => {
                        let mut unread = self.unread.borrow_mut();
                        unread.drain(..written);
                        if unread.is_empty() {
                            self.events.set(0);
                            unread.shrink_to(MAX_UNREAD);
                        }
                        drop(unread);
                        self.changed.notify();
                    }
                    Err(errno) => return errno.desc(),
                }
                take_turns().await;
            }
        };
        until(self.changed.until(|| self.lost.get()), written).await.unwrap_or_else(|why| why)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use event_loop::LoopConfig;
    use nix::sys::socket::recv;

    use super::*;
    use crate::Environment;

    #[test]
    fn a_line_without_end_is_read_in_turns() {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let turn = Rc::new(Turn::default());
        turn.begin();
        let monitor = Rc::new(Monitor {
            id: "monitor".into(),
            event_loop: event_loop.clone(),
            pretty: false,
            clients: Clients::new(Environment::default().host),
            turn,
            requests: drop::<Request>,
            here: RefCell::default(),
        });
        let (mut client, served) = UnixStream::pair().unwrap();
        let unread = served.try_clone().unwrap();
        let mut bytes = vec![b'x'; 1 << 20];
        client.set_nonblocking(true).unwrap();
        let mut left = 0;
        while let Ok(more) = client.write(&bytes[..4096]) {
            left += more;
        }
        assert!(left > 100_000, "{left} bytes wait");
        let turns = Rc::new(Cell::new(0));
        let taken = turns.clone();
        event_loop.spawn(async move {
            loop {
                take_turns().await;
                taken.update(|turns| turns + 1);
            }
        });
        monitor.take(served.into());
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        let reads = left / 4096;
        while recv(unread.as_raw_fd(), &mut bytes, flags).is_ok() {
            event_loop.run_once(false).unwrap();
        }
        assert!(turns.get() >= reads, "another task had {} turns in {reads} reads", turns.get());
    }
}
