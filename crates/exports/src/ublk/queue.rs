//! A queue of a device on its I/O thread.
//!
//! A tag is a request of the kernel, and has its memory. A command waits for each tag's request; when it completes,
//! the request goes down the node's channel. The next command of the tag takes the answer, and waits for the next request.
//! So a request needs no system call beside the loop's own. The driver copies data between the request's pages and the
//! tag's memory. Nothing is allocated per request.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::flush::flush;
use block::node::{BlockNode, Channel};
use block::request::{Request, RequestOwner};
use event_loop::{
    AlignedBuf, DeferredCall, DeviceCommand, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopFile,
    oneshot,
};
use guest_memory::ReadOnly;
use nix::errno::Errno;
use nix::libc;
use stats::{Batch, InFlight, QueueStats};

use super::commands::{ANSWER_AND_FETCH, FETCH_FIRST};
use super::wire::{DESCRIPTOR, Described, MAX_IO, descriptors, io_command};

/// What a queue serves.
pub(super) struct Service {
    /// The device's file.
    pub(super) file: Arc<OwnedFd>,
    pub(super) number: u16,
    pub(super) depth: u16,
    pub(super) node: Arc<dyn BlockNode>,
    pub(super) writable: bool,
    pub(super) writethrough: bool,
    pub(super) stats: Arc<QueueStats>,
}

pub(super) struct Queue {
    me: Weak<Queue>,
    event_loop: EventLoop,
    service: Service,
    file: LoopFile,
    descriptors: ReadOnly,
    channel: Rc<dyn Channel>,
    tags: RefCell<Vec<Tag>>,
    /// Commands in flight.
    waiting: Cell<u32>,
    /// Requests that the node has.
    at_node: Cell<u32>,
    /// The kernel has ended a command: it sends no more requests, and takes no more answers.
    ended: Cell<bool>,
    /// Why a command failed, if it was not the device's end.
    failed: Cell<Option<Errno>>,
    quiet: RefCell<Vec<oneshot::Sender<()>>>,
    queued: Cell<bool>,
    /// Answers that are not counted yet.
    batch: Batch,
}

struct Tag {
    /// The request that the node has.
    request: Option<Described>,
    /// Loop time at which it was taken, nanoseconds.
    started_ns: u64,
    /// The tag's memory, MAX_IO bytes. With the loop while a command is in flight.
    memory: IoBufs,
    /// The list that goes down; kept for its capacity.
    bufs: IoBufs,
}

impl Tag {
    fn new() -> Option<Self> {
        let memory = AlignedBuf::io_bufs(MAX_IO, 4096)?;
        Some(Tag { request: None, started_ns: 0, memory, bufs: IoBufs::with_capacity(1) })
    }
}

impl Queue {
    /// A queue that waits for no request yet.
    ///
    /// # Errors
    ///
    /// The loop has no io_uring, lacks what the node needs, or there is no memory.
    pub(super) fn new(event_loop: &EventLoop, service: Service) -> io::Result<Rc<Self>> {
        if !event_loop.has_io_uring() {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let channel = service.node.clone().open_channel(event_loop)?;
        let (offset, len) = descriptors(service.number, service.depth);
        let descriptors = ReadOnly::map(&service.file, offset, len)?;
        let tags = std::iter::repeat_with(Tag::new).take(service.depth.into());
        let tags = tags.collect::<Option<Vec<_>>>();
        let tags = tags.ok_or_else(|| io::Error::from(Errno::ENOMEM))?;
        Ok(Rc::new_cyclic(|me| Queue {
            me: me.clone(),
            event_loop: event_loop.clone(),
            file: event_loop.register_file(service.file.clone()),
            service,
            descriptors,
            channel,
            tags: RefCell::new(tags),
            waiting: Cell::new(0),
            at_node: Cell::new(0),
            ended: Cell::new(false),
            failed: Cell::new(None),
            quiet: RefCell::default(),
            queued: Cell::new(false),
            batch: Batch::default(),
        }))
    }

    /// Waits for the first request of each tag.
    pub(super) fn fetch(&self) {
        for tag in 0..self.service.depth {
            self.command(FETCH_FIRST, tag.into(), 0);
        }
    }

    /// Sends a tag's next command.
    fn command(&self, command: DeviceCommand, tag: u32, result: i32) {
        let Some(me) = self.me.upgrade() else { return };
        let mut tags = self.tags.borrow_mut();
        let Some(slot) = tags.get_mut(tag as usize) else { return };
        let memory = std::mem::take(&mut slot.memory);
        drop(tags);
        let head = io_command(self.service.number, tag as u16, result);
        self.waiting.update(|count| count + 1);
        let target: Rc<dyn IoTarget> = me;
        let op = IoOp::Command { command, head };
        self.event_loop.submit(&self.file, op, Engine::Uring, memory, &target, tag);
    }

    /// A request of the kernel.
    fn received(&self, tag: u32) {
        let at = tag as usize * DESCRIPTOR;
        let words = (self.descriptors.word(at), self.descriptors.word(at + 8));
        let (Some(first), Some(second)) = words else { return };
        let Service { node, writable, writethrough, stats, .. } = &self.service;
        let size = node.geometry().size;
        stats.taken.add(1);
        let request = match Described::parse([first, second], size, *writable, *writethrough) {
            Ok(request) => request,
            Err(errno) => {
                self.batch.invalid(stats, stats::Kind::Other);
                return self.answer(tag, -(errno as i32));
            }
        };
        let mut tags = self.tags.borrow_mut();
        let Some(slot) = tags.get_mut(tag as usize) else { return };
        slot.request = Some(request);
        slot.started_ns = self.event_loop.now_ns();
        let mut bufs = std::mem::take(&mut slot.bufs);
        bufs.clear();
        // Fits: at most MAX_IO.
        bufs.append_part(&slot.memory, 0, request.data() as usize);
        drop(tags);
        let Some(me) = self.me.upgrade() else { return };
        self.at_node.update(|count| count + 1);
        let me: Rc<dyn RequestOwner> = me;
        let Described { op, offset, len } = request;
        self.channel.submit(Request::new(op, offset, len, bufs, &me, tag));
    }

    fn answer(&self, tag: u32, result: i32) {
        // The kernel sends the request again, to the next server.
        if !self.ended.get() {
            self.command(ANSWER_AND_FETCH, tag, result);
        }
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

    /// Why a command failed, if one has.
    pub(super) fn failure(&self) -> Option<Errno> {
        self.failed.get()
    }

    /// Completes when the kernel has ended all commands, and the node has no request.
    pub(super) fn ended(&self) -> oneshot::Receiver<()> {
        let (quiet, is_quiet) = oneshot::channel();
        self.quiet.borrow_mut().push(quiet);
        self.event_loop.section(|| self.later());
        is_quiet
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

    /// The requests under way.
    pub(super) fn in_flight(&self) -> Vec<InFlight> {
        let tags = self.tags.borrow();
        let of = |(id, tag): (u64, &Tag)| {
            let request = tag.request?;
            let (kind, offset, len) = (request.kind(), request.offset, request.len);
            Some(InFlight { id, kind, lun: None, offset, len, started_ns: tag.started_ns })
        };
        (0..).zip(tags.iter()).filter_map(of).collect()
    }
}

impl IoTarget for Queue {
    /// A command has completed: there is a request, or the device ends.
    fn complete(&self, tag: u32, result: i32, memory: IoBufs) {
        self.waiting.update(|count| count - 1);
        if let Some(slot) = self.tags.borrow_mut().get_mut(tag as usize) {
            slot.memory = memory;
        }
        match result {
            0 if !self.ended.get() => self.received(tag),
            // Not answered: the kernel sends it again.
            0 => {}
            errno => {
                self.ended.set(true);
                if errno != -libc::ENODEV {
                    self.failed.set(Some(Errno::from_raw(errno.wrapping_neg())));
                }
            }
        }
        self.later();
    }
}

impl RequestOwner for Queue {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let mut tags = self.tags.borrow_mut();
        let Some(slot) = tags.get_mut(tag as usize) else { return };
        slot.bufs = bufs;
        let Some(request) = slot.request.take() else { return };
        let started_ns = slot.started_ns;
        drop(tags);
        self.at_node.update(|count| count - 1);
        let (stats, kind, now_ns) = (&self.service.stats, request.kind(), self.event_loop.now_ns());
        let answer = match result {
            Ok(()) => {
                self.batch.done(stats, kind, request.data(), started_ns, now_ns);
                // Fits: at most MAX_IO.
                request.data() as i32
            }
            Err(errno) => {
                stats.node_failed(0, kind, request.offset, errno);
                self.batch.failed(stats, kind, started_ns, now_ns);
                -(errno as i32)
            }
        };
        self.answer(tag, answer);
    }
}

impl DeferredCall for Queue {
    /// The end of the section: counts what was answered.
    fn run(&self) {
        self.batch.publish(&self.service.stats, false);
        if self.waiting.get() == 0 && self.at_node.get() == 0 {
            self.quiet.take().into_iter().for_each(|quiet| quiet.send(()));
        }
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}
