//! The channel of one loop to a file or device.
//!
//! Nearly every request is one operation with the request's own memory. Any other request is divided
//! into the steps of [`plan`](super::plan), which [`steps`] carries out one after the other.

mod steps;

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{DeferredCall, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopFile};
use nix::errno::Errno;

use super::FileNode;
use super::bounce::Bounces;
use super::describe;
use super::merge::Run;
use super::plan::FileStep;
use super::probes;
use super::slots::{FileSlot, Slots, Stage};
use crate::drivers::detect_zeroes::detect_zeroes;
use crate::drivers::range_lock::Mailbox;
use crate::node::Channel;
use crate::options::DetectZeroes;
use crate::request::{Detached, Op, Request};
use trace::trace;

/// A channel. Its users hold it in an `Rc`.
pub(crate) struct FileChannel {
    inner: Rc<Inner>,
}

struct Inner {
    me: Weak<Inner>,
    event_loop: EventLoop,
    engine: Engine,
    file: LoopFile,
    tail_file: Option<LoopFile>,
    slots: RefCell<Slots>,
    /// Requests that become one operation. Submitted when the section ends, or when the next request
    /// does not continue them.
    run: RefCell<Option<Run>>,
    run_queued: Cell<bool>,
    bounces: RefCell<Bounces>,
    zeroes: OnceCell<IoBufs>,
    mailbox: OnceCell<Arc<Mailbox>>,
    node: Arc<FileNode>,
}

/// The next action for a request.
enum Next {
    /// An operation, on the tail's file or the main one.
    Submit { tail: bool, op: IoOp, bufs: IoBufs },
    /// Nothing: the request waits for its turn.
    Wait,
    /// Answer it.
    Done(Result<(), Errno>),
}

impl FileChannel {
    pub(crate) fn new(node: Arc<FileNode>, event_loop: &EventLoop, engine: Engine) -> Self {
        let inner = Rc::new_cyclic(|me| Inner {
            me: me.clone(),
            event_loop: event_loop.clone(),
            engine,
            file: event_loop.register_file(node.fd.clone()),
            tail_file: node.tail_fd.clone().map(|fd| event_loop.register_file(fd)),
            slots: RefCell::new(Slots::new()),
            run: RefCell::new(None),
            run_queued: Cell::new(false),
            bounces: RefCell::default(),
            zeroes: OnceCell::new(),
            mailbox: OnceCell::new(),
            node,
        });
        FileChannel { inner }
    }
}

impl Channel for FileChannel {
    #[inline]
    fn submit(&self, mut request: Request) {
        let inner = &*self.inner;
        let node = &*inner.node;
        if let Err(errno) = inner.check(&request) {
            return request.complete(Err(errno));
        }
        if node.detect_zeroes != DetectZeroes::Off {
            detect_zeroes(node.detect_zeroes, &mut request);
        }
        let op = match request.op {
            Op::Read => IoOp::Read { offset: request.offset },
            // The front end shrank the file of the guest's memory, which reads as zeroes since then. The
            // kernel would answer EFAULT if the memory had not been replaced.
            Op::Write { .. } if request.bufs.is_lost() => {
                return request.complete(Err(Errno::EFAULT));
            }
            Op::Write { fua }
                if !(node.range_lock.is_for_all() || fua && node.flushes_writes()) =>
            {
                IoOp::Write { offset: request.offset, dsync: fua && !node.no_flush }
            }
            _ => return inner.start(request),
        };
        if request.len == 0 || !node.limits.is_simple(request.offset, &request.bufs) {
            return inner.start(request);
        }
        inner.gather(op, request);
    }

    fn in_flight(&self) -> usize {
        self.inner.slots.borrow().in_use()
    }
}

impl DeferredCall for Inner {
    fn run(&self) {
        if let Some(run) = self.run.take() {
            self.submit_run(run);
        }
    }

    fn queued(&self) -> &Cell<bool> {
        &self.run_queued
    }
}

impl IoTarget for Inner {
    #[inline]
    fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
        trace!(probes::file_complete(&*self.node.trace_name, token, result));
        let mut slots = self.slots.borrow_mut();
        match slots.take_simple(token) {
            Some(request) if u64::try_from(result) == Ok(request.len()) => {
                slots.release(token);
                drop(slots);
                self.node.ended(request.op());
                request.complete(Ok(()), bufs);
            }
            simple => {
                drop(slots);
                self.complete_other(token, result, bufs, simple);
            }
        }
    }
}

impl Inner {
    fn check(&self, request: &Request) -> Result<(), Errno> {
        match request.op {
            op if op.only_reads() => {}
            _ if self.node.geometry.read_only => return Err(Errno::EROFS),
            _ => {}
        }
        let end = request.offset.checked_add(request.len);
        let fits = |&end: &u64| end <= self.node.size() || self.node.may_reach(end);
        let end = end.filter(fits).ok_or(request.op.beyond_end())?;
        if let Op::Write { .. } | Op::WriteZeroes { .. } = request.op {
            self.node.writes_to(end);
        }
        Ok(())
    }

    /// `len` is the length of a read or write in bytes.
    #[inline]
    fn trace_submit(&self, token: u32, op: IoOp, len: u64) {
        let range = || describe::range(op, len);
        trace!(probes::file_submit(
            &*self.node.trace_name,
            token,
            describe::name(op),
            range().0,
            range().1,
        ));
    }

    // ---- simple requests -----------------------------------------------------------------------

    /// Takes a request that is one operation or a part of one.
    #[inline]
    fn gather(&self, op: IoOp, request: Request) {
        let mut run = self.run.borrow_mut();
        if let Some(run) = &mut *run
            && run.is_continued_by(op, &request.bufs)
        {
            return self.slots.borrow_mut().add_to(run, request);
        }
        let (request, bufs) = request.detach();
        let token = self.slots.borrow_mut().insert_simple(request);
        let before = run.replace(Run::new(op, token, bufs));
        drop(run);
        match before {
            Some(before) => self.submit_run(before),
            None => {
                let Some(me) = self.me.upgrade() else { return };
                self.event_loop.defer(&(me as Rc<dyn DeferredCall>));
            }
        }
    }

    #[inline]
    fn submit_run(&self, run: Run) {
        let Some(me) = self.me.upgrade() else { return };
        let Run { op, first, bufs, .. } = run;
        self.trace_submit(first, op, bufs.len() as u64);
        let target = me as Rc<dyn IoTarget>;
        self.event_loop.submit(&self.file, op, self.engine, bufs, &target, first);
    }

    /// Answers the requests of one operation. If the operation was short (`whole` is unset), each
    /// request continues on its own.
    fn complete_run(&self, first: u32, whole: bool) {
        let mut next = Some(first);
        while let Some(token) = next {
            let mut slots = self.slots.borrow_mut();
            if whole {
                let Some(slot) = slots.remove(token) else { return };
                next = slot.merged_with;
                drop(slots);
                self.node.ended(slot.request.op);
                slot.request.complete(Ok(()));
            } else {
                let Some((slot, _)) = slots.get(token) else { return };
                next = slot.merged_with.take();
                slot.stage = Stage::Turn;
                drop(slots);
                self.go_on(token);
            }
        }
    }

    // ---- all others ----------------------------------------------------------------------------

    /// Continues after an operation that is not all of one request: a merged operation, a step, or a
    /// short operation of a simple request.
    #[cold]
    fn complete_other(&self, token: u32, result: i32, bufs: IoBufs, simple: Option<Detached>) {
        let whole = usize::try_from(result) == Ok(bufs.len());
        let mut slots = self.slots.borrow_mut();
        if let Some(request) = simple {
            let stage = Stage::FileStep(FileStep::InPlace { len: bufs.len() });
            let request = request.attach(bufs);
            slots.put(token, FileSlot { claimed: true, ..FileSlot::new(request, stage) });
        } else if let Some((slot, part)) = slots.get(token) {
            if matches!(slot.stage, Stage::Status(_)) {
                slot.request.bufs = bufs;
            } else {
                *part = bufs;
                part.clear();
            }
            if slot.stage == Stage::Merged {
                drop(slots);
                return self.complete_run(token, whole);
            }
        }
        let Some((slot, part)) = slots.get(token) else { return };
        let next = self.took_step(slot, part, token, result);
        drop(slots);
        self.act(token, next);
    }

    /// Starts a request that is not simple.
    fn start(&self, request: Request) {
        let token = self.slots.borrow_mut().insert(FileSlot::new(request, Stage::Turn));
        self.go_on(token);
    }

    fn go_on(&self, token: u32) {
        let mut slots = self.slots.borrow_mut();
        let Some((slot, part)) = slots.get(token) else { return };
        let next = self.next(slot, part, token);
        drop(slots);
        self.act(token, next);
    }

    fn act(&self, token: u32, next: Next) {
        match next {
            Next::Submit { tail, op, bufs } => {
                let Some(me) = self.me.upgrade() else { return };
                let file = self.tail_file.as_ref().filter(|_| tail).unwrap_or(&self.file);
                let target = me as Rc<dyn IoTarget>;
                // Without O_DIRECT, Linux AIO would wait for the disk here.
                let buffered = tail && self.engine == Engine::Native;
                let engine = if buffered { Engine::Threads } else { self.engine };
                self.trace_submit(token, op, bufs.len() as u64);
                self.event_loop.submit(file, op, engine, bufs, &target, token);
            }
            Next::Wait => {}
            Next::Done(result) => {
                let Some(slot) = self.slots.borrow_mut().remove(token) else { return };
                if let Some(ticket) = slot.ticket {
                    self.node.range_lock.release(ticket);
                }
                if let Some(bounce) = slot.bounce {
                    let waiting = self.bounces.borrow_mut().give(bounce);
                    if let Some(token) = waiting {
                        self.go_on(token);
                    }
                }
                self.node.ended(slot.request.op);
                slot.request.complete(result);
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.get() {
            self.event_loop.delete_bottom_half(mailbox.bottom_half());
        }
    }
}
