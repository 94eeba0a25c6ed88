//! A running connection: requests into the socket, replies out of it, and what happens when it breaks.
//!
//! Both directions use the loop's ring. One receive is always in flight. It takes all replies that have
//! arrived, and the data of a large read goes straight into its memory. One send carries all ready commands
//! with the data of writes in place. Nothing is allocated per request.
//!
//! When the connection breaks, a task on this loop makes a new one, and unanswered requests are sent again:
//! reads, writes, zeroes and trims may be carried out twice. As in QEMU, requests wait for
//! `reconnect-delay`, and fail after that until there is a connection. A connection that ends before the
//! server has answered anything does not count: the next attempt comes after a growing pause, and it does not
//! prolong the wait of requests. A connection over an inherited socket is the last one: requests fail at once.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{DeferredCall, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopFile, TimerId};
use log::{Level, log};
use nbd_wire::reply::ReplyMode;
use nbd_wire::request::{CommandType, RequestHeader};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, send, shutdown};
use tls::{Client, Progress, Secure};

use super::Shared;
use super::connect::{Connected, Pause, connect_on};
use super::state::{ClientState, Next, Violation};
use crate::listeners::Listening;
use crate::node::Channel;
use crate::request::Request;

/// Tokens of the two operations on the socket.
const RECEIVE: u32 = 0;
const SEND: u32 = 1;
/// Bytes of the last command with the closing alert of TLS.
const MAX_GOODBYE: usize = 1024;
/// A connection that has lasted this long counts, even without a request, nanoseconds.
const GOOD_NS: u64 = 16_000_000_000;

/// Why a connection ends.
#[derive(Debug, Clone, Copy)]
enum Broken {
    /// The server or the network ended the connection.
    Left,
    /// The socket failed.
    Socket(Errno),
    /// The server violated the protocol: no reconnection.
    Rules(Violation),
    /// TLS failed.
    Tls(&'static str),
    /// The node is no longer used on this loop.
    Closed,
}

/// The state of the connection.
enum Link {
    /// Not connected; a task is connecting.
    Down,
    /// Connected.
    Up(Socket),
    /// Being closed: operations on the socket are in flight.
    Breaking(Socket, Broken),
    /// Not connected, for good.
    Dead,
}

#[derive(Clone)]
struct Socket {
    fd: Arc<OwnedFd>,
    file: LoopFile,
}

/// A connection for its users: closed when the last of them drops it.
pub(super) struct Connection {
    inner: Rc<Inner>,
    _listening: Listening,
}

struct Inner {
    me: Weak<Inner>,
    event_loop: EventLoop,
    shared: Arc<Shared>,
    state: RefCell<ClientState>,
    link: RefCell<Link>,
    /// With TLS, the layer between socket and state.
    secure: RefCell<Option<Secure<Client>>>,
    /// The lists of segments of the two operations, while these are not in flight.
    receive_bufs: RefCell<IoBufs>,
    send_bufs: RefCell<IoBufs>,
    receiving: Cell<bool>,
    sending: Cell<bool>,
    queued: Cell<bool>,
    /// While not connected: requests wait.
    patient: Cell<bool>,
    patience: Cell<Option<TimerId>>,
    /// Loop time at which waiting requests fail, counted from the end of the last good connection.
    deadline: Cell<Option<u64>>,
    /// Loop time at which the connection was made.
    up_since_ns: Cell<u64>,
    /// The server has answered something on this connection.
    answered: Cell<bool>,
    /// Pause before the next attempt, unless the last connection was good.
    pause: Cell<Option<Pause>>,
    closed: Cell<bool>,
}

impl Connection {
    /// Takes a connection, or makes one. `None`: out of memory.
    pub(super) fn new(
        event_loop: &EventLoop,
        shared: &Arc<Shared>,
        connected: Option<Connected>,
    ) -> Option<Rc<Self>> {
        let state = ClientState::new(shared.agreed)?;
        let inner = Rc::new_cyclic(|me| Inner {
            me: me.clone(),
            event_loop: event_loop.clone(),
            shared: shared.clone(),
            state: RefCell::new(state),
            link: RefCell::new(Link::Down),
            secure: RefCell::default(),
            receive_bufs: RefCell::default(),
            send_bufs: RefCell::default(),
            receiving: Cell::new(false),
            sending: Cell::new(false),
            queued: Cell::new(false),
            patient: Cell::new(true),
            patience: Cell::new(None),
            deadline: Cell::new(None),
            up_since_ns: Cell::new(0),
            answered: Cell::new(false),
            pause: Cell::new(None),
            closed: Cell::new(false),
        });
        match connected {
            Some(connected) => inner.up(connected),
            None => inner.reconnect(),
        }
        let me = Rc::downgrade(&inner);
        let listening = shared.impatience.listen(event_loop, me, |me: &Rc<Inner>| {
            me.stop_timer();
            me.lose_patience();
        });
        Some(Rc::new(Connection { inner, _listening: listening }))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.inner.close();
    }
}

impl Channel for Connection {
    fn submit(&self, mut request: Request) {
        let inner = &*self.inner;
        if let Some(result) = inner.shared.prepare(&mut request) {
            return request.complete(result);
        }
        let takes = match &*inner.link.borrow() {
            Link::Up(_) => true,
            Link::Down => inner.patient.get(),
            Link::Breaking(_, why) => {
                matches!(why, Broken::Left | Broken::Socket(_) | Broken::Tls(_))
                    && inner.shared.delay_ns() > 0
            }
            Link::Dead => false,
        };
        if !takes {
            return request.complete(Err(Errno::EIO));
        }
        let done = inner.state.borrow_mut().submit(request);
        match done {
            Some((request, result)) => request.complete(result),
            None => inner.send_later(),
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.state.borrow().requests()
    }
}

impl Inner {
    // ---- out -----------------------------------------------------------------------------------

    /// Sends the commands that are ready at the end of the section.
    fn send_later(&self) {
        if let Some(me) = self.me.upgrade() {
            let me: Rc<dyn DeferredCall> = me;
            self.event_loop.defer(&me);
        }
    }

    fn send(&self, bufs: IoBufs) {
        let Some(me) = self.me.upgrade() else { return };
        let Some(socket) = self.socket() else { return };
        self.sending.set(true);
        let target: Rc<dyn IoTarget> = me;
        let op = IoOp::Write { offset: 0, dsync: false };
        self.event_loop.submit(&socket, op, Engine::Uring, bufs, &target, SEND);
    }

    fn sent(&self, result: i32, mut bufs: IoBufs) {
        self.sending.set(false);
        let up = matches!(*self.link.borrow(), Link::Up(_));
        let broken = match usize::try_from(result) {
            Ok(bytes) if bytes > 0 => {
                bufs.advance(bytes);
                if up && !bufs.is_empty() {
                    return self.send(bufs);
                }
                match self.encrypt(&mut bufs) {
                    Ok(true) if up => return self.send(bufs),
                    Ok(_) => None,
                    Err(why) => Some(Broken::Tls(why)),
                }
            }
            _ => match Errno::from_raw(result.wrapping_neg()) {
                Errno::EINTR | Errno::EAGAIN if up => return self.send(bufs),
                Errno::EPIPE | Errno::ECONNRESET => Some(Broken::Left),
                errno => Some(Broken::Socket(errno)),
            },
        };
        match &mut *self.secure.borrow_mut() {
            None => self.state.borrow_mut().sent(&mut bufs),
            Some(secure) => self.state.borrow_mut().sent(secure.plain()),
        }
        self.send_bufs.replace(bufs);
        if let Some(why) = broken {
            self.take_down(why);
        }
        self.take_answers();
        self.send_later();
        self.down_if_idle();
    }

    // ---- in ------------------------------------------------------------------------------------

    fn receive(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let Some(socket) = self.socket() else { return };
        let mut bufs = self.receive_bufs.take();
        match &mut *self.secure.borrow_mut() {
            None => self.state.borrow_mut().input_memory(&mut bufs),
            Some(secure) => secure.input_memory(&mut bufs),
        }
        self.receiving.set(true);
        let target: Rc<dyn IoTarget> = me;
        let op = IoOp::Read { offset: 0 };
        self.event_loop.submit(&socket, op, Engine::Uring, bufs, &target, RECEIVE);
    }

    fn received(&self, result: i32, mut bufs: IoBufs) {
        self.receiving.set(false);
        let bytes = usize::try_from(result).unwrap_or(0);
        match &mut *self.secure.borrow_mut() {
            None => self.state.borrow_mut().received(bytes, &mut bufs),
            Some(secure) => secure.received(bytes),
        }
        self.receive_bufs.replace(bufs);
        match result {
            0 => self.take_down(Broken::Left),
            1.. => {
                if self.take_input() {
                    self.answered.set(true);
                }
            }
            _ => match Errno::from_raw(result.wrapping_neg()) {
                Errno::EINTR | Errno::EAGAIN => {}
                Errno::ECONNRESET => self.take_down(Broken::Left),
                errno => self.take_down(Broken::Socket(errno)),
            },
        }
        if matches!(*self.link.borrow(), Link::Up(_)) {
            self.receive();
        }
        self.down_if_idle();
    }

    /// Processes received bytes, record by record with TLS. Returns whether a request was answered.
    fn take_input(&self) -> bool {
        let mut any = self.take_answers();
        loop {
            let decrypted = match &mut *self.secure.borrow_mut() {
                None => return any,
                Some(secure) => secure.decrypt(&mut *self.state.borrow_mut()),
            };
            match decrypted {
                Ok(Progress::Data) => any |= self.take_answers(),
                Ok(Progress::Input) => break,
                Ok(Progress::Closed) => {
                    self.take_down(Broken::Left);
                    break;
                }
                Err(why) => {
                    self.take_down(Broken::Tls(why));
                    break;
                }
            }
        }
        if self.secure.borrow().as_ref().is_some_and(Secure::has_words) {
            self.send_later();
        }
        any
    }

    /// With TLS, encrypts the next part of the gathered commands. `false`: nothing is left to send.
    fn encrypt(&self, bufs: &mut IoBufs) -> Result<bool, &'static str> {
        self.secure.borrow_mut().as_mut().map_or(Ok(false), |secure| secure.encrypt(bufs))
    }

    /// Completes answered requests. Returns whether there were any.
    fn take_answers(&self) -> bool {
        let mut any = false;
        loop {
            let next = self.state.borrow_mut().next();
            match next {
                Ok(Next::Complete(request, result)) => {
                    request.complete(result);
                    any = true;
                }
                Ok(Next::Input) => break,
                Err(violation) => {
                    self.take_down(Broken::Rules(violation));
                    break;
                }
            }
        }
        if self.state.borrow().has_commands() {
            self.send_later();
        }
        any
    }

    // ---- the link ------------------------------------------------------------------------------

    fn socket(&self) -> Option<LoopFile> {
        match &*self.link.borrow() {
            Link::Up(socket) => Some(socket.file.clone()),
            _ => None,
        }
    }

    fn up(&self, connected: Connected) {
        let Connected { fd, mut agreed, secured } = connected;
        // Only features that the node's users know of.
        agreed.flags &= self.shared.agreed.flags;
        let file = self.event_loop.register_file(fd.clone());
        self.state.borrow_mut().connected(agreed);
        let secure = secured.map(|secured| {
            Secure::new(secured.session, &secured.plain, &mut *self.state.borrow_mut())
        });
        // If there is no memory for TLS, continue as after any lost connection.
        let is_lost = matches!(secure, Some(None));
        self.secure.replace(secure.flatten());
        self.link.replace(Link::Up(Socket { fd, file }));
        self.up_since_ns.set(self.event_loop.now_ns());
        self.answered.set(false);
        self.patient.set(self.shared.delay_ns() > 0);
        self.stop_timer();
        if is_lost {
            self.take_down(Broken::Socket(Errno::ENOMEM));
            return self.down_if_idle();
        }
        self.receive();
        self.take_answers();
        self.send_later();
    }

    /// Ends a connection after its operations in flight.
    fn take_down(&self, why: Broken) {
        let mut link = self.link.borrow_mut();
        if let Link::Up(socket) = &*link {
            // Ends both operations.
            let _ = shutdown(socket.fd.as_raw_fd(), Shutdown::Both);
            let socket = socket.clone();
            *link = Link::Breaking(socket, why);
        }
    }

    fn down_if_idle(&self) {
        if self.receiving.get() || self.sending.get() {
            return;
        }
        let mut link = self.link.borrow_mut();
        let Link::Breaking(_, why) = *link else { return };
        let gone = self.closed.get() || self.event_loop.is_stopping();
        let is_last = self.shared.target.is_inherited();
        let dead = gone || is_last || matches!(why, Broken::Rules(_) | Broken::Closed);
        *link = if dead { Link::Dead } else { Link::Down };
        drop(link);
        match self.secure.take() {
            None => self.state.borrow_mut().disconnected(&mut self.send_bufs.borrow_mut()),
            Some(mut secure) => self.state.borrow_mut().disconnected(secure.plain()),
        }
        self.take_answers();
        if !gone {
            self.tell(why);
        }
        if dead {
            return self.fail_all();
        }
        if self.answered.get() || self.event_loop.now_ns() - self.up_since_ns.get() >= GOOD_NS {
            self.pause.set(None);
            self.deadline.set(None);
        }
        if self.shared.delay_ns() == 0 {
            self.patient.set(false);
            self.fail_all();
        } else {
            self.patient.set(true);
            self.start_timer();
        }
        self.reconnect();
    }

    /// Logs one line per event that needs attention; requests do not wait for it.
    fn tell(&self, why: Broken) {
        let (name, server) = (&self.shared.name, &self.shared.target.options.server);
        let (level, next) = match self.shared.target.is_inherited() {
            true => {
                let next =
                    "an inherited socket cannot be connected again: all requests fail from now on";
                (Level::Error, next)
            }
            false => (Level::Warn, "connecting again"),
        };
        match why {
            Broken::Left => log!(level, "{name}: the NBD server at {server} left; {next}"),
            Broken::Socket(errno) => {
                let why = errno.desc();
                log!(level, "{name}: the connection to {server} broke: {why}; {next}");
            }
            Broken::Rules(Violation(rule)) => log::error!(
                "{name}: the NBD server at {server} does not keep to the protocol: {rule}; all \
                 requests fail from now on"
            ),
            Broken::Tls(why) => {
                log!(level, "{name}: TLS with the NBD server at {server}: {why}; {next}");
            }
            Broken::Closed => {}
        }
    }

    /// Starts or continues the `reconnect-delay`.
    fn start_timer(&self) {
        self.stop_timer();
        let latest = self.event_loop.now_ns().saturating_add(self.shared.delay_ns());
        let deadline = self.deadline.get().unwrap_or(latest);
        self.deadline.set(Some(deadline));
        let me = self.me.clone();
        let timer = self.event_loop.add_timer(deadline, move || {
            if let Some(me) = me.upgrade() {
                me.patience.set(None);
                me.lose_patience();
            }
        });
        self.patience.set(Some(timer));
    }

    fn stop_timer(&self) {
        if let Some(timer) = self.patience.take() {
            self.event_loop.cancel_timer(timer);
        }
    }

    fn lose_patience(&self) {
        if matches!(*self.link.borrow(), Link::Down) {
            self.patient.set(false);
            self.fail_all();
        }
    }

    fn fail_all(&self) {
        loop {
            let failed = self.state.borrow_mut().next_failed();
            match failed {
                Some(request) => request.complete(Err(Errno::EIO)),
                None => return,
            }
        }
    }

    /// Starts the task that makes a new connection.
    fn reconnect(&self) {
        let (me, shared) = (self.me.clone(), self.shared.clone());
        let Some(connector) = shared.connector.clone() else {
            self.link.replace(Link::Dead);
            return self.fail_all();
        };
        let event_loop = self.event_loop.clone();
        let mut pause = self.pause.get();
        self.event_loop.spawn(async move {
            let mut told = String::new();
            loop {
                if let Some(pause) = &mut pause {
                    event_loop.sleep_until(event_loop.now_ns() + pause.next_ns()).await;
                }
                pause.get_or_insert_default();
                let tried = connect_on(connector.handle(), &shared.target).await;
                let Some(me) = me.upgrade().filter(|me| !me.closed.get()) else { return };
                let why = match tried {
                    Err(error) => error.to_string(),
                    Ok(connected) => match connected.agreed.continues(&shared.agreed) {
                        Ok(()) => {
                            log::info!(
                                "{}: connected to {}",
                                shared.name,
                                shared.target.options.server
                            );
                            me.pause.set(pause);
                            return me.up(connected);
                        }
                        Err(why) => format!("the export is not the one it was: {why}"),
                    },
                };
                if why != told {
                    log::warn!(
                        "{}: {}: {why}; trying again",
                        shared.name,
                        shared.target.options.server
                    );
                    told = why;
                }
                if shared.delay_ns() == 0 {
                    me.lose_patience();
                } else if me.patient.get() && me.patience.get().is_none() {
                    me.start_timer();
                }
            }
        });
    }

    /// Closes the connection after the last user.
    fn close(&self) {
        self.closed.set(true);
        self.stop_timer();
        let link = std::mem::replace(&mut *self.link.borrow_mut(), Link::Dead);
        match link {
            Link::Up(socket) => {
                if self.state.borrow().requests() == 0 && !self.sending.get() {
                    self.say_goodbye(&socket);
                }
                self.link.replace(Link::Up(socket));
                self.take_down(Broken::Closed);
                self.down_if_idle();
            }
            Link::Breaking(socket, _) => {
                self.link.replace(Link::Breaking(socket, Broken::Closed));
            }
            Link::Down | Link::Dead => self.fail_all(),
        }
    }

    fn say_goodbye(&self, socket: &Socket) {
        let extended = self.state.borrow().agreed.mode == ReplyMode::Extended;
        let command = CommandType::Disconnect;
        let header = RequestHeader { flags: 0, command, cookie: 0, offset: 0, len: 0 };
        let (bytes, len) = header.encode(extended);
        let mut record = [0; MAX_GOODBYE];
        let bytes = match &mut *self.secure.borrow_mut() {
            None => &bytes[..len],
            Some(secure) => match secure.last(&bytes[..len], &mut record) {
                Some(len) => &record[..len],
                None => return,
            },
        };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // Not required: the server sees the end of the connection either way.
        let _ = send(socket.fd.as_raw_fd(), bytes, flags);
    }
}

impl IoTarget for Inner {
    fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
        match token {
            RECEIVE => self.received(result, bufs),
            _ => self.sent(result, bufs),
        }
    }
}

impl DeferredCall for Inner {
    fn run(&self) {
        let up = matches!(*self.link.borrow(), Link::Up(_));
        let has_words = self.secure.borrow().as_ref().is_some_and(Secure::has_words);
        if !up || self.sending.get() || !(has_words || self.state.borrow().has_commands()) {
            return;
        }
        let mut bufs = self.send_bufs.take();
        match &mut *self.secure.borrow_mut() {
            None => self.state.borrow_mut().gather(&mut bufs),
            Some(secure) => self.state.borrow_mut().gather(secure.plain()),
        }
        let is_secure = self.secure.borrow().is_some();
        match self.encrypt(&mut bufs) {
            Ok(has_more) if has_more || !is_secure => self.send(bufs),
            Ok(_) => drop(self.send_bufs.replace(bufs)),
            Err(why) => {
                self.send_bufs.replace(bufs);
                self.take_down(Broken::Tls(why));
            }
        }
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_1_2_4_8_and_16_seconds_apart() {
        let mut pause = Pause::default();
        let seconds: Vec<u64> = (0..7).map(|_| pause.next_ns() / 1_000_000_000).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 16, 16]);
    }
}
