//! A `/dev/fuse` descriptor on its I/O thread: requests from the kernel down the node's channel, answers back.
//!
//! The loop watches the descriptor. Requests are read, and answers written, by system calls of their own, not by the
//! ring: neither waits on a non-blocking descriptor, and the ring would poll the descriptor for each. A slot's memory
//! holds a request and its answer, header and data adjacent, so each is one segment. Nothing is allocated per request.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::flush::flush;
use block::node::{BlockNode, Channel};
use block::request::{Op, Request as NodeRequest, RequestOwner};
use block::status::{self, ExtentState};
use event_loop::{
    DeferredCall, EventLoop, Handler, HandlerId, IoBufs, Progress, Trigger, mailbox, oneshot,
    read_now, write_now,
};
use nix::errno::Errno;
use nix::libc;
use stats::InFlight;
use stats::{Batch, QueueStats};

use super::attributes::FileAttributes;
use super::session::{Todo, counted, judge};
use super::slots::{At, Slots};
use super::wire::{Answer, Invalid, MAX_REQUEST, Message, Request, SetAttributes};

/// The most requests that a turn takes.
const TURN: u32 = 32;

/// Most bytes that the requests of a turn copy, without the last request: copying delays all
/// other work of the thread.
const SHARE: u32 = 512 << 10;

/// A request of an I/O thread to the control plane.
pub(super) enum Event {
    /// Give the node another size.
    Resize(Size, oneshot::Sender<Result<(), Errno>>),
    /// The last open file was closed.
    Closed,
    /// The kernel sends no more requests.
    Gone(Option<Errno>),
}

/// A node's size, bytes.
pub(super) enum Size {
    /// It is not to become smaller.
    AtLeast(u64),
    Exactly(u64),
}

/// What a connection serves.
pub(super) struct Service {
    pub(super) device: Arc<OwnedFd>,
    pub(super) node: Arc<dyn BlockNode>,
    pub(super) file: Arc<FileAttributes>,
    pub(super) writethrough: bool,
    pub(super) stats: Arc<QueueStats>,
    pub(super) events: Arc<mailbox::Sender<Event>>,
}

pub(super) struct Connection {
    me: Weak<Connection>,
    event_loop: EventLoop,
    service: Service,
    channel: Rc<dyn Channel>,
    slots: RefCell<Slots>,
    /// Slots with a request.
    busy: Cell<u32>,
    /// The descriptor is watched.
    watched: Cell<Option<HandlerId>>,
    /// The descriptor was watched before the pause.
    unwatched: Cell<Option<HandlerId>>,
    /// Requests may be waiting in the kernel, and all slots were taken.
    starved: Cell<bool>,
    /// No requests are taken.
    paused: Cell<bool>,
    drained: Cell<bool>,
    /// The file system is gone.
    gone: Cell<bool>,
    quiet: Cell<Option<oneshot::Sender<()>>>,
    queued: Cell<bool>,
    /// Answers that are not counted yet.
    batch: Batch,
}

impl Connection {
    /// A connection that takes no request until it is to [resume](Self::resume).
    ///
    /// # Errors
    ///
    /// The loop lacks what the node needs, or there is no memory.
    pub(super) fn new(event_loop: &EventLoop, service: Service) -> io::Result<Rc<Self>> {
        let channel = service.node.clone().open_channel(event_loop)?;
        let slots = Slots::new().ok_or_else(|| io::Error::from(Errno::ENOMEM))?;
        Ok(Rc::new_cyclic(|me| Connection {
            me: me.clone(),
            event_loop: event_loop.clone(),
            service,
            channel,
            slots: RefCell::new(slots),
            busy: Cell::new(0),
            watched: Cell::new(None),
            unwatched: Cell::new(None),
            starved: Cell::new(false),
            paused: Cell::new(true),
            drained: Cell::new(false),
            gone: Cell::new(false),
            quiet: Cell::new(None),
            queued: Cell::new(false),
            batch: Batch::default(),
        }))
    }

    // ---- requests in ---------------------------------------------------------------------------

    /// Takes requests until the kernel has none, or for a turn.
    fn receive(&self) -> Progress {
        let mut bytes = 0;
        for _ in 0..TURN {
            if self.paused.get() || self.gone.get() {
                return Progress::Done;
            }
            let mut slots = self.slots.borrow_mut();
            let Some(tag) = slots.take() else {
                self.starved.set(true);
                return Progress::Done;
            };
            let Some(slot) = slots.get(tag) else { return Progress::Done };
            slot.at = At::Receiving;
            let bufs = slot.request_memory();
            let result = read_now(self.service.device.as_fd(), &bufs);
            slot.give_back(bufs);
            match result {
                Ok(len) => {
                    drop(slots);
                    bytes += self.received(tag, len);
                }
                Err(error) => {
                    slots.free(tag);
                    drop(slots);
                    match Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)) {
                        Errno::EAGAIN => return Progress::Done,
                        // A request that was taken back while it was read.
                        Errno::EINTR | Errno::ENOENT => {}
                        errno => {
                            self.lost(errno);
                            return Progress::Done;
                        }
                    }
                }
            }
            if bytes > u64::from(SHARE) {
                break;
            }
        }
        Progress::More
    }

    /// Handles a message of `len` bytes in a slot. Returns how many bytes its data has.
    fn received(&self, tag: u32, len: usize) -> u64 {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get(tag) else { return 0 };
        let first = slot.received();
        let parsed = Message::parse(first.get(..len.min(MAX_REQUEST)).unwrap_or_default(), len);
        let message = match parsed {
            Ok(message) => message,
            Err(Invalid::Header) => {
                slots.free(tag);
                return 0;
            }
            Err(Invalid::Arguments { unique } | Invalid::Inode { unique }) => {
                Message { unique, request: Request::Unknown(0) }
            }
        };
        slot.begin(message, self.event_loop.now_ns());
        drop(slots);
        self.service.stats.taken.add(1);
        self.busy.update(|count| count + 1);
        match parsed {
            Ok(_) => self.carry_out(tag),
            Err(Invalid::Inode { .. }) => self.answer(tag, Answer::Error(Errno::ENOENT)),
            Err(_) => self.answer(tag, Answer::Error(Errno::EINVAL)),
        }
        let (_, _, bytes) = counted(&message.request);
        bytes
    }

    /// The kernel has no more requests: the daemon or another process has unmounted the file, or reading failed.
    fn lost(&self, errno: Errno) {
        if !self.gone.replace(true) {
            let why = (errno != Errno::ENODEV).then_some(errno);
            let _ = self.service.events.send(Event::Gone(why));
        }
    }

    /// Watches the descriptor.
    fn watch(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let events = libc::POLLIN as u32;
        let device = self.service.device.clone();
        let id = self.event_loop.add_handler(device, events, Trigger::Edge, me);
        self.watched.set(Some(id));
    }

    // ---- what they ask for ---------------------------------------------------------------------

    fn carry_out(&self, tag: u32) {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get(tag) else { return };
        let (request, grown) = (slot.request, slot.grown);
        if request == Request::Release && self.service.file.released() {
            let _ = self.service.events.send(Event::Closed);
        }
        match judge(request, &self.service.file, self.service.writethrough, grown) {
            Todo::Answer(answer) => {
                drop(slots);
                self.answer(tag, answer);
            }
            Todo::Nothing => {
                drop(slots);
                self.ended(tag);
            }
            Todo::Node { op, offset, len, then } => {
                slot.at = At::Node(then);
                let bufs = match op {
                    Op::Read | Op::Write { .. } => slot.data(len),
                    // The slot's own list, which comes back.
                    Op::Flush | Op::Discard | Op::WriteZeroes { .. } | Op::BlockStatus => {
                        slot.data(0)
                    }
                };
                drop(slots);
                self.submit(tag, op, offset, len, bufs);
            }
            Todo::Seek { hole, offset, end } => {
                slot.at = At::Seeking { hole, offset, end };
                let bufs = slot.extents();
                drop(slots);
                self.submit(tag, Op::BlockStatus, offset, end - offset, bufs);
            }
            Todo::Describe => {
                drop(slots);
                self.describe(tag);
            }
            Todo::Grow(size) => {
                slot.at = At::Resizing;
                slot.grown = true;
                drop(slots);
                self.resize(tag, Size::AtLeast(size), None);
            }
            Todo::Truncate(size, change) => {
                slot.at = At::Resizing;
                drop(slots);
                self.resize(tag, Size::Exactly(size), Some(change));
            }
        }
    }

    fn submit(&self, tag: u32, op: Op, offset: u64, len: u64, bufs: IoBufs) {
        let Some(me) = self.me.upgrade() else { return };
        let me: Rc<dyn RequestOwner> = me;
        self.channel.submit(NodeRequest::new(op, offset, len, bufs, &me, tag));
    }

    /// Asks the control plane to resize the node, then continues the request.
    fn resize(&self, tag: u32, size: Size, change: Option<SetAttributes>) {
        let (answer, resized) = oneshot::channel();
        // One that cannot be sent is dropped, which the receiver sees.
        let _ = self.service.events.send(Event::Resize(size, answer));
        let me = self.me.clone();
        self.event_loop.spawn(async move {
            let resized = resized.await.unwrap_or(Err(Errno::EIO));
            let Some(me) = me.upgrade() else { return };
            match (resized, change) {
                (Err(errno), _) => me.answer(tag, Answer::Error(errno)),
                (Ok(()), None) => me.carry_out(tag),
                (Ok(()), Some(change)) => {
                    me.service.file.change(&change);
                    me.describe(tag);
                }
            }
        });
    }

    /// Answers with the file's attributes. A pool thread asks the node how much is allocated: fstat(2) blocks on some
    /// file systems.
    fn describe(&self, tag: u32) {
        if let Some(slot) = self.slots.borrow_mut().get(tag) {
            slot.at = At::Describing;
        }
        let (node, me) = (self.service.node.clone(), self.me.clone());
        let allocated = self.event_loop.offload(move || node.allocated());
        self.event_loop.spawn(async move {
            let allocated = allocated.await.ok().flatten();
            if let Some(me) = me.upgrade() {
                me.answer(tag, Answer::Attributes(me.service.file.get(allocated)));
            }
        });
    }

    /// What a search has found.
    fn sought(&self, tag: u32, (hole, from, end): (bool, u64, u64), bufs: IoBufs) {
        let mut at = from;
        let mut found = None;
        let mut index = 0;
        while let Some(extent) = status::extent(&bufs, index).filter(|_| at < end) {
            if (extent.state != ExtentState::Data) == hole {
                found = Some(at);
                break;
            }
            at = at.saturating_add(extent.len);
            index += 1;
        }
        let answer = match found {
            Some(at) => Answer::Position(at),
            None if at < end && at > from => {
                let mut slots = self.slots.borrow_mut();
                let Some(slot) = slots.get(tag) else { return };
                slot.at = At::Seeking { hole, offset: at, end };
                slot.give_back(bufs);
                let bufs = slot.extents();
                drop(slots);
                return self.submit(tag, Op::BlockStatus, at, end - at, bufs);
            }
            None if hole => Answer::Position(end),
            None => Answer::Error(Errno::ENXIO),
        };
        if let Some(slot) = self.slots.borrow_mut().get(tag) {
            slot.give_back(bufs);
        }
        self.answer(tag, answer);
    }

    // ---- answers out ---------------------------------------------------------------------------

    fn answer(&self, tag: u32, answer: Answer) {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get(tag) else { return };
        let (kind, _, bytes) = counted(&slot.request);
        let now_ns = self.event_loop.now_ns();
        match answer {
            Answer::Error(_) => {
                self.batch.failed(&self.service.stats, kind, slot.started_ns, now_ns);
            }
            Answer::Done
            | Answer::Init { .. }
            | Answer::Attributes(_)
            | Answer::Opened
            | Answer::Written(_)
            | Answer::Position(_)
            | Answer::FileSystem
            | Answer::Data(_) => {
                self.batch.done(&self.service.stats, kind, bytes, slot.started_ns, now_ns);
            }
        }
        let data = match answer {
            Answer::Data(len) => len,
            _ => 0,
        };
        let bufs = slot.answer(&answer.encode(slot.unique), data);
        // An answer that the kernel does not want any more is no error: the request was aborted.
        let _ = write_now(self.service.device.as_fd(), &bufs);
        slot.give_back(bufs);
        drop(slots);
        self.ended(tag);
    }

    /// A request has ended, and its slot is free.
    fn ended(&self, tag: u32) {
        self.slots.borrow_mut().free(tag);
        self.busy.update(|count| count - 1);
        self.later();
    }

    /// Has [`run`](DeferredCall::run) called at the end of the section.
    fn later(&self) {
        if let Some(me) = self.me.upgrade() {
            let me: Rc<dyn DeferredCall> = me;
            self.event_loop.defer(&me);
        }
    }

    // ---- control -------------------------------------------------------------------------------

    /// Takes no more requests. The answer comes when none is under way any more.
    pub(super) fn pause(&self) -> oneshot::Receiver<()> {
        let (quiet, is_quiet) = oneshot::channel();
        self.quiet.set(Some(quiet));
        self.paused.set(true);
        if let Some(handler) = self.watched.take() {
            self.event_loop.remove_handler(handler);
            self.unwatched.set(Some(handler));
        }
        if !self.drained.replace(true) {
            self.event_loop.section(|| self.channel.drain_begin());
        }
        self.event_loop.section(|| self.later());
        is_quiet
    }

    /// Takes requests.
    pub(super) fn resume(&self) {
        if self.paused.replace(false) {
            drop(self.quiet.take());
            if self.drained.take() {
                self.channel.drain_end();
            }
            self.watch();
        }
    }

    /// Completes when the loop has released the descriptor, after a pause.
    pub(super) async fn released(&self) {
        if let Some(handler) = self.unwatched.take() {
            self.event_loop.released(handler).await;
        }
    }

    /// Runs a task on this thread.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.event_loop.spawn(task);
    }

    /// Makes durable what was written.
    pub(super) fn flush(&self, answer: oneshot::Sender<Result<(), Errno>>) {
        let writable = (!self.service.node.geometry().read_only).then_some(&self.channel);
        flush(writable.into_iter(), Box::new(move |result| answer.send(result)));
    }

    /// The requests under way, for those that look for one that takes long.
    pub(super) fn in_flight(&self) -> Vec<InFlight> {
        self.slots.borrow().in_flight()
    }
}

impl RequestOwner for Connection {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get(tag) else { return };
        if let Err(errno) = result {
            let (kind, offset, _) = counted(&slot.request);
            self.service.stats.node_failed(0, kind, offset, errno);
        }
        let at = slot.at;
        match (result, at) {
            (Ok(()), At::Seeking { hole, offset, end }) => {
                drop(slots);
                return self.sought(tag, (hole, offset, end), bufs);
            }
            (Ok(()), At::Node(_)) | (Err(_), _) => slot.give_back(bufs),
            (Ok(()), At::Free | At::Receiving | At::Resizing | At::Describing) => return,
        }
        drop(slots);
        let answer = match (result, at) {
            (Ok(()), At::Node(answer)) => answer,
            (Ok(()), _) => Answer::Done,
            (Err(errno), _) => Answer::Error(errno),
        };
        self.answer(tag, answer);
    }
}

impl Handler for Connection {
    fn ready(&self, _events: u32) -> Progress {
        self.receive()
    }
}

impl DeferredCall for Connection {
    /// The end of the section: counts what was answered, takes requests that found no slot.
    fn run(&self) {
        self.batch.publish(&self.service.stats, false);
        if let Some(handler) = self.watched.get()
            && self.starved.replace(false)
        {
            self.event_loop.call_again(handler);
        }
        if self.paused.get()
            && self.busy.get() == 0
            && let Some(quiet) = self.quiet.take()
        {
            quiet.send(());
        }
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}
