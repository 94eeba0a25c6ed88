//! A connection in the transmission phase, on its I/O thread: requests from the socket down the node's
//! channel, replies back.
//!
//! Both ways go through the loop's ring: one receive that brings as many requests as have come, one
//! send of all replies that are ready. Nothing is allocated per request, and a turn is bounded by
//! the input's memory, the slots and what its I/O thread begins at once. A client that does not read
//! its replies waits for itself.

mod pause;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::node::Channel;
use block::request::{Op, Request, RequestOwner};
use block::track::DirtyBitmap;
use event_loop::{DeferredCall, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopFile};
use nix::errno::Errno;
use nix::sys::socket::{Shutdown, shutdown};
use stats::InFlight;
use stats::{Batch, Kind, QueueStats};
use tls::{Progress, Secure, Server};

pub(super) use self::pause::MAX_LEFT;
use self::pause::Pause;
pub use self::pause::SavedClient;
use super::handshake::Secured;
use super::server::is_gone;
use super::session::transmission::{Agreed, Command};
use super::slots::counted;
use super::state::{End, Next, ServerState};
use super::turns::Turns;
use super::wire::reply::Reply;

/// Tokens of the two operations on the socket.
const RECEIVE: u32 = 0;
const SEND: u32 = 1;

/// How long a client that is sent away may take to read its last replies, nanoseconds.
const LAST_REPLIES_NS: u64 = 1_000_000_000;

/// The node, the client's agreements and the options of a connection.
pub(super) struct Service {
    pub(super) channel: Rc<dyn Channel>,
    pub(super) agreed: Agreed,
    /// The export's bitmaps.
    pub(super) bitmaps: Arc<[Arc<DirtyBitmap>]>,
    /// TLS, if it was begun. It moves to where it is used.
    pub(super) secured: Option<Box<Secured>>,
    /// Each write is on stable storage before the reply.
    pub(super) writethrough: bool,
    pub(super) stats: Arc<QueueStats>,
    pub(super) turns: Rc<Turns>,
    /// What another process has left: bytes that came from the client, and bytes that go to it.
    pub(super) left: (Vec<u8>, Arc<Vec<u8>>),
}

/// Called once, when nothing of a connection is under way any more.
pub(super) type Ended = Box<dyn FnOnce(End)>;

pub(super) struct Connection {
    me: Weak<Connection>,
    event_loop: EventLoop,
    fd: Arc<OwnedFd>,
    socket: LoopFile,
    service: Service,
    state: RefCell<ServerState>,
    /// Between the socket and the state, with TLS.
    secure: Option<RefCell<Secure<Server>>>,
    /// The lists of the two operations, while they are not under way.
    receive_bufs: RefCell<IoBufs>,
    send_bufs: RefCell<IoBufs>,
    receiving: Cell<bool>,
    sending: Cell<bool>,
    /// Requests wait in the input for others to end, or for a turn.
    stalled: Cell<bool>,
    /// Requests that the channel has.
    under_way: Cell<u32>,
    /// Requests with costly replies that wait for a turn, and what the node has told.
    costly: RefCell<VecDeque<(u32, IoBufs)>>,
    /// It is among those that wait for a turn.
    pub(super) waits: Cell<bool>,
    /// Why no more requests are taken.
    end: Cell<Option<End>>,
    /// Nothing more can be sent.
    deaf: Cell<bool>,
    ended: Cell<Option<Ended>>,
    queued: Cell<bool>,
    /// Answers that are not counted yet.
    batch: Batch,
    pause: Pause,
}

impl Connection {
    /// A client that is served once it is [started](Self::start). `None`: there is no memory for it.
    pub(super) fn new(
        event_loop: &EventLoop,
        fd: Arc<OwnedFd>,
        mut service: Service,
        ended: Ended,
    ) -> Option<Rc<Self>> {
        let mut state = ServerState::new(
            service.agreed,
            service.bitmaps.clone(),
            service.writethrough,
            fd.as_raw_fd(),
        )?;
        let secure = match service.secured.take() {
            Some(secured) => {
                let Secured { session, plain } = *secured;
                Some(RefCell::new(Secure::new(session, &plain, &mut state)?))
            }
            None => None,
        };
        let (input, output) = std::mem::take(&mut service.left);
        Some(Rc::new_cyclic(|me| Connection {
            me: me.clone(),
            event_loop: event_loop.clone(),
            socket: event_loop.register_file(fd.clone()),
            fd,
            service,
            state: RefCell::new(state),
            secure,
            receive_bufs: RefCell::default(),
            send_bufs: RefCell::default(),
            receiving: Cell::new(false),
            sending: Cell::new(false),
            stalled: Cell::new(false),
            under_way: Cell::new(0),
            costly: RefCell::default(),
            waits: Cell::new(false),
            end: Cell::new(None),
            deaf: Cell::new(false),
            ended: Cell::new(Some(ended)),
            queued: Cell::new(false),
            batch: Batch::default(),
            pause: Pause::new(input, output),
        }))
    }

    /// Begins to take requests.
    pub(super) fn start(&self) {
        // Some may have come already.
        self.go_on();
    }

    /// The export has another size now, bytes.
    pub(super) fn set_size(&self, size: u64) {
        self.state.borrow_mut().set_size(size);
    }

    /// Takes no more requests, finishes those under way, sends their replies, and ends.
    pub(super) fn stop(&self) {
        self.end_input(End::Stopped);
        if self.ended_already() {
            return;
        }
        let me = self.me.clone();
        self.event_loop.add_timer(self.event_loop.now_ns() + LAST_REPLIES_NS, move || {
            if let Some(me) = me.upgrade() {
                me.hang_up(Shutdown::Both);
            }
        });
    }

    // ---- in ------------------------------------------------------------------------------------

    fn receive(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let mut bufs = self.receive_bufs.take();
        match &self.secure {
            None => self.state.borrow_mut().input_memory(&mut bufs),
            Some(secure) => secure.borrow_mut().input_memory(&mut bufs),
        }
        self.receiving.set(true);
        let target: Rc<dyn IoTarget> = me;
        let op = IoOp::Read { offset: 0 };
        self.event_loop.submit(&self.socket, op, Engine::Uring, bufs, &target, RECEIVE);
    }

    fn received(&self, result: i32, bufs: IoBufs) {
        self.receiving.set(false);
        self.receive_bufs.replace(bufs);
        let called_back = self.pause.receive_called_back.take();
        if self.pause.is_paused() {
            self.reply_later();
        }
        if self.end.get().is_some() {
            // Replies that are ready, including the end of a TLS session, are sent first.
            return self.reply_later();
        }
        match usize::try_from(result) {
            Ok(0) => {
                let record =
                    self.secure.as_ref().is_some_and(|tls| tls.borrow().is_within_record());
                self.end_of_input(record);
            }
            Ok(bytes) => {
                match &self.secure {
                    None => self.state.borrow_mut().received(bytes),
                    Some(secure) => secure.borrow_mut().received(bytes),
                }
                self.take_requests();
            }
            Err(_) => match Errno::from_raw(result.wrapping_neg()) {
                Errno::EINTR | Errno::EAGAIN => self.take_requests(),
                Errno::ECANCELED if called_back => self.take_requests(),
                Errno::ECONNRESET => self.end_input(End::Left),
                errno => self.end_input(End::Socket(errno)),
            },
        }
    }

    /// Sends on their way the requests that have come, as far as there is room for them.
    fn take_requests(&self) {
        self.stalled.set(false);
        if self.service.turns.is_open(self.event_loop.now_ns()) {
            self.process_batch();
        } else {
            self.wait_for_turn();
        }
    }

    fn wait_for_turn(&self) {
        self.stalled.set(true);
        if !self.waits.replace(true) {
            self.service.turns.wait(self.me.clone());
        }
    }

    /// It is the first of those that wait for a turn.
    pub(super) fn its_turn(&self) {
        self.waits.set(false);
        // It may have found another reason to wait.
        if self.stalled.take() {
            if is_gone(&self.fd) {
                self.deaf.set(true);
            }
            self.process_batch();
        }
    }

    fn process_batch(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let me: Rc<dyn RequestOwner> = me;
        if self.pause.is_paused() {
            return self.stalled.set(true);
        }
        let now_ns = self.event_loop.now_ns();
        while self.end.get().is_none() {
            if self.service.turns.are_over(now_ns) {
                return self.wait_for_turn();
            }
            let next = self.state.borrow_mut().next(now_ns);
            match next {
                // No reply can be sent. Writes are carried out: the client may have left after its last one.
                Next::Submit { op: Op::Read, tag, .. } if self.deaf.get() => {
                    self.state.borrow_mut().forget(tag);
                }
                Next::Submit { op, offset, len, bufs, tag } => {
                    self.service.stats.taken.add(1);
                    self.service.turns.begin(now_ns, bufs.len());
                    self.under_way.update(|count| count + 1);
                    self.service.channel.submit(Request::new(op, offset, len, bufs, &me, tag));
                }
                Next::OfBitmaps { tag } => {
                    self.service.stats.taken.add(1);
                    self.under_way.update(|count| count + 1);
                    me.complete(tag, Ok(()), IoBufs::new());
                }
                Next::Refused => {
                    self.service.stats.taken.add(1);
                    self.batch.invalid(&self.service.stats, Kind::Other);
                    self.reply_later();
                }
                Next::Answered => self.reply_later(),
                Next::Input if self.decrypt() || self.give_input() => {}
                Next::Input => return self.receive(),
                Next::Wait => return self.stalled.set(true),
                Next::End(end) => self.end_input(end),
            }
        }
    }

    /// With TLS, gives the state what more has come. `false`: there is nothing more.
    fn decrypt(&self) -> bool {
        let Some(secure) = &self.secure else { return false };
        let mut secure = secure.borrow_mut();
        let decrypted = secure.decrypt(&mut *self.state.borrow_mut());
        let has_words = secure.has_words();
        drop(secure);
        if has_words {
            self.reply_later();
        }
        match decrypted {
            Ok(Progress::Input) => return false,
            Ok(Progress::Data) => {}
            Ok(Progress::Closed) => self.end_of_input(false),
            Err(why) => self.end_input(End::Tls(why)),
        }
        true
    }

    /// The client sends no more.
    fn end_of_input(&self, within_record: bool) {
        let within = within_record || self.state.borrow().is_within_message();
        self.end_input(if within { End::CutShort } else { End::Left });
    }

    fn end_input(&self, end: End) {
        if self.end.get().is_some() {
            return;
        }
        self.end.set(Some(end));
        self.stalled.set(false);
        self.state.borrow_mut().end_input();
        // Brings a receive that is under way to its end.
        self.hang_up(Shutdown::Read);
        self.reply_later();
    }

    // ---- out -----------------------------------------------------------------------------------

    /// Sends, at the end of the section, what is ready then.
    fn reply_later(&self) {
        if let Some(me) = self.me.upgrade() {
            let me: Rc<dyn DeferredCall> = me;
            self.event_loop.defer(&me);
        }
    }

    /// Most sockets take replies at once: no operation is needed then, whose completion would wake the
    /// loop up for nothing.
    fn send(&self, mut bufs: IoBufs) {
        match self.socket.send_now(&bufs) {
            Ok(bytes) => bufs.advance(bytes),
            // Also of errors it is better told by its own completion.
            Err(_) => return self.send_when_ready(bufs),
        }
        if bufs.is_empty() { self.all_sent(bufs) } else { self.send_when_ready(bufs) }
    }

    fn send_when_ready(&self, bufs: IoBufs) {
        let Some(me) = self.me.upgrade() else { return };
        if self.holds_output() {
            return self.hold_output(bufs);
        }
        self.sending.set(true);
        let target: Rc<dyn IoTarget> = me;
        let op = IoOp::Write { offset: 0, dsync: false };
        self.event_loop.submit(&self.socket, op, Engine::Uring, bufs, &target, SEND);
    }

    fn sent(&self, result: i32, mut bufs: IoBufs) {
        self.sending.set(false);
        let called_back = self.pause.send_called_back.take();
        match usize::try_from(result) {
            Ok(bytes) if bytes > 0 => {
                bufs.advance(bytes);
                if !bufs.is_empty() {
                    return self.send_when_ready(bufs);
                }
            }
            _ => {
                let errno = Errno::from_raw(result.wrapping_neg());
                let again = matches!(errno, Errno::EINTR | Errno::EAGAIN);
                if again || called_back && errno == Errno::ECANCELED {
                    return self.send_when_ready(bufs);
                }
                self.deaf.set(true);
                self.end_input(match errno {
                    Errno::EPIPE | Errno::ECONNRESET => End::Left,
                    errno => End::Socket(errno),
                });
            }
        }
        self.all_sent(bufs);
    }

    /// All that was to be sent is out, or never will be.
    fn all_sent(&self, mut bufs: IoBufs) {
        if self.encrypt(&mut bufs) {
            // Not at once: a long reply has many parts, and others are to get their turn.
            return self.send_when_ready(bufs);
        }
        self.send_bufs.replace(bufs);
        self.state.borrow_mut().sent();
        self.reply_later();
    }

    /// Sends what is ready, the protocol's own messages, and in the end that it is the end.
    fn send_encrypted(&self, secure: &RefCell<Secure<Server>>) {
        let mut state = self.state.borrow_mut();
        if state.has_replies() {
            state.gather(secure.borrow_mut().plain());
            self.publish();
        } else if self.end.get().is_some() && state.slots.in_use() == 0 {
            secure.borrow_mut().close();
        }
        drop(state);
        let mut bufs = self.send_bufs.take();
        if self.encrypt(&mut bufs) {
            return self.send(bufs);
        }
        self.send_bufs.replace(bufs);
        // There may be replies that were not sent after all.
        self.state.borrow_mut().sent();
    }

    /// With TLS, puts as much as goes out at once of what is to be sent into `bufs`. `false`: there is
    /// nothing.
    fn encrypt(&self, bufs: &mut IoBufs) -> bool {
        let Some(secure) = self.secure.as_ref().filter(|_| !self.deaf.get()) else { return false };
        let encrypted = secure.borrow_mut().encrypt(bufs);
        encrypted.unwrap_or_else(|why| {
            self.deaf.set(true);
            self.end_input(End::Tls(why));
            false
        })
    }

    fn hang_up(&self, how: Shutdown) {
        // A socket that is not connected any more has hung up.
        let _ = shutdown(self.fd.as_raw_fd(), how);
    }

    // ---- the end -------------------------------------------------------------------------------

    fn ended_already(&self) -> bool {
        let ended = self.ended.take();
        let already = ended.is_none();
        self.ended.set(ended);
        already
    }

    /// Ends once all is done.
    fn finish_if_idle(&self) {
        let Some(end) = self.end.get() else { return };
        if self.receiving.get() || self.sending.get() || self.pause.has_output() {
            return;
        }
        if self.state.borrow().slots.in_use() == 0
            && let Some(ended) = self.ended.take()
        {
            self.hang_up(Shutdown::Both);
            ended(end);
        }
    }

    /// Has the answers counted that go out, or never will.
    fn publish(&self) {
        self.batch.publish(&self.service.stats, false);
    }

    /// The requests under way, for those that look for one that takes long.
    pub(super) fn in_flight(&self) -> Vec<InFlight> {
        self.state.borrow_mut().in_flight()
    }

    fn count(&self, command: &Command, reply: Reply, started_ns: u64) {
        let stats = &self.service.stats;
        let now_ns = self.event_loop.now_ns();
        let (kind, _, bytes) = counted(command);
        match reply {
            Reply::Error(_) => self.batch.failed(stats, kind, started_ns, now_ns),
            _ => self.batch.done(stats, kind, bytes, started_ns, now_ns),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.service.turns.bury(self.state.get_mut().take_memory());
    }
}

impl IoTarget for Connection {
    fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
        match token {
            RECEIVE => self.received(result, bufs),
            _ => self.sent(result, bufs),
        }
    }
}

impl RequestOwner for Connection {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        if result.is_ok() && self.state.borrow().has_costly_reply(tag) {
            let turns = &self.service.turns;
            if !turns.are_costly() {
                turns.meter.charge(self.answered(tag, Ok(()), bufs));
                return;
            }
            let mut costly = self.costly.borrow_mut();
            costly.push_back((tag, bufs));
            if costly.len() == 1 {
                turns.wait_for_budget(self.me.clone());
            }
            return;
        }
        self.answered(tag, result, bufs);
    }
}

impl Connection {
    /// Puts together one of the costly replies that wait. Returns its units of the loop's meter, and whether others wait.
    pub(super) fn answer_costly(&self) -> (u64, bool) {
        let Some((tag, bufs)) = self.costly.borrow_mut().pop_front() else { return (0, false) };
        (self.answered(tag, Ok(()), bufs), !self.costly.borrow().is_empty())
    }

    /// The node has answered. Returns units of the loop's meter.
    fn answered(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) -> u64 {
        let mut state = self.state.borrow_mut();
        if let Err(errno) = result
            && let Some(slot) = state.slots.get(tag)
        {
            let (kind, offset, _) = counted(&slot.command);
            self.service.stats.node_failed(0, kind, offset, errno);
        }
        if state.answered(tag, result, bufs) {
            drop(state);
            if let Some(me) = self.me.upgrade() {
                let me: Rc<dyn RequestOwner> = me;
                let flush = Request::new(Op::Flush, 0, 0, IoBufs::new(), &me, tag);
                self.service.channel.submit(flush);
            }
            return 0;
        }
        let answered = state.slots.get(tag).map(|slot| (slot.command, slot.reply, slot.started_ns));
        let cost = state.take_cost();
        drop(state);
        if let Some((command, reply, started_ns)) = answered {
            self.count(&command, reply, started_ns);
        }
        self.under_way.update(|count| count.saturating_sub(1));
        self.reply_later();
        cost
    }
}

impl DeferredCall for Connection {
    /// Called at the end of the section: sends all replies that are ready, and resumes requests that waited
    /// for room.
    fn run(&self) {
        if self.deaf.get() {
            self.state.borrow_mut().drop_replies();
            self.publish();
        } else if !self.sending.get() && !self.pause.has_output() {
            match &self.secure {
                None if self.state.borrow().has_replies() => {
                    let mut bufs = self.send_bufs.take();
                    self.state.borrow_mut().gather(&mut bufs);
                    self.publish();
                    self.send(bufs);
                }
                None => {}
                Some(secure) => self.send_encrypted(secure),
            }
        }
        if self.stalled.get() {
            self.take_requests();
        }
        self.finish_if_idle();
        self.tell_if_quiet();
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}
