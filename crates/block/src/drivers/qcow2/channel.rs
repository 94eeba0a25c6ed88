//! One loop's way to an image. A request to one place below goes there at once; any other is a task.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_loop::sync::lock;
use event_loop::{EventLoop, IoBufs};
use nix::errno::Errno;

use super::Qcow2Node;
use super::context::Channels;
use super::direct::{Begun, Direct};
use crate::drivers::detect_zeroes::detect_zeroes;
use crate::node::{BlockNode, Channel};
use crate::options::{DetectZeroes, Discard};
use crate::request::{Op, Request, RequestOwner};

/// Requests that are carried out at once; those that come meanwhile wait.
const IN_FLIGHT: usize = 256;

/// When tables that are not used leave the memory.
pub(super) struct Clean {
    /// Nanoseconds; 0: never.
    interval: u64,
    /// When they last did, loop time.
    last: AtomicU64,
}

impl Clean {
    pub(super) fn every(seconds: u64) -> Clean {
        Clean { interval: seconds.saturating_mul(1_000_000_000), last: AtomicU64::new(0) }
    }

    /// Whether it is time. Each loop has a timer; one of them is enough.
    fn is_due(&self, now: u64) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        let is_due = now.saturating_sub(last) > self.interval / 2;
        is_due
            && self.last.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// Has tables leave the memory, until the channel is dropped or the loop ends.
async fn clean(event_loop: EventLoop, channel: Weak<Inner>, interval: u64) {
    loop {
        let deadline = event_loop.now_ns().saturating_add(interval);
        event_loop.sleep_until(deadline).await;
        let now = event_loop.now_ns();
        let Some(channel) = channel.upgrade().filter(|_| now >= deadline) else { return };
        let node = &channel.node;
        if node.clean.is_due(now) {
            lock(&node.image.core).engine.forget_unused();
        }
    }
}

/// The channel as its users hold it.
pub(super) struct Qcow2Channel(Rc<Inner>);

struct Inner {
    me: Weak<Inner>,
    event_loop: EventLoop,
    node: Arc<Qcow2Node>,
    channels: Rc<Channels>,
    direct: Direct,
    in_flight: Cell<usize>,
    waiting: RefCell<VecDeque<Request>>,
}

impl Qcow2Channel {
    pub(super) fn new(node: Arc<Qcow2Node>, event_loop: &EventLoop, channels: Channels) -> Self {
        let interval = node.clean.interval;
        let inner = Rc::new_cyclic(|me| Inner {
            me: me.clone(),
            event_loop: event_loop.clone(),
            node,
            channels: Rc::new(channels),
            direct: Direct::default(),
            in_flight: Cell::new(0),
            waiting: RefCell::default(),
        });
        if interval > 0 {
            event_loop.spawn(clean(event_loop.clone(), Rc::downgrade(&inner), interval));
        }
        Qcow2Channel(inner)
    }
}

impl Channel for Qcow2Channel {
    fn submit(&self, mut request: Request) {
        let inner = &*self.0;
        if let Err(errno) = inner.node.check(&request) {
            return request.complete(Err(errno));
        }
        if inner.node.detect_zeroes != DetectZeroes::Off {
            detect_zeroes(inner.node.detect_zeroes, &mut request);
        }
        request.compress &= inner.node.compresses();
        match &mut request.op {
            Op::Discard if inner.node.discard == Discard::Ignore => {
                return request.complete(Ok(()));
            }
            Op::WriteZeroes { may_unmap, .. } if inner.node.discard == Discard::Ignore => {
                *may_unmap = false;
            }
            _ => {}
        }
        if inner.in_flight.get() < IN_FLIGHT {
            inner.start(request);
        } else {
            inner.waiting.borrow_mut().push_back(request);
        }
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight.get() + self.0.waiting.borrow().len()
    }

    fn drain_begin(&self) {
        self.0.channels.all().for_each(|channel| channel.drain_begin());
    }

    fn drain_end(&self) {
        self.0.channels.all().for_each(|channel| channel.drain_end());
    }
}

impl Inner {
    fn start(&self, request: Request) {
        let Some(me) = self.me.upgrade() else { return request.complete(Err(Errno::ECANCELED)) };
        // The next one begins when this one is answered, if it is so before this returns, too.
        self.in_flight.set(self.in_flight.get() + 1);
        let answers = me.clone() as Rc<dyn RequestOwner>;
        match self.direct.begin(&self.node.image, &self.channels, request, &answers) {
            Begun::Sent => {}
            Begun::Answered => self.ended(),
            Begun::Not(request) => self.spawn(me, request),
        }
    }

    fn spawn(&self, me: Rc<Inner>, request: Request) {
        let mut owed = Owed { request: Some(request), inner: me };
        self.event_loop.spawn(async move {
            let result = owed.carry_out().await;
            let result = owed.survives(result).await;
            if result.is_err() {
                owed.tell_damage().await;
            }
            owed.answer(result);
        });
    }

    /// A request was answered: one that waits may begin.
    fn ended(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
        while self.in_flight.get() < IN_FLIGHT {
            let Some(next) = self.waiting.borrow_mut().pop_front() else { break };
            self.start(next);
        }
    }
}

impl RequestOwner for Inner {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        self.direct.end(&self.node.image, tag, result, bufs);
        self.ended();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for request in self.waiting.take() {
            request.complete(Err(Errno::ECANCELED));
        }
    }
}

/// A request that a task is at work on. A task that is dropped, as the loop ends, answers it too.
struct Owed {
    request: Option<Request>,
    inner: Rc<Inner>,
}

impl Owed {
    async fn carry_out(&mut self) -> Result<(), Errno> {
        let Some(request) = &mut self.request else { return Ok(()) };
        let Inner { node, channels, .. } = &*self.inner;
        let image = &*node.image;
        let Request { op, offset, len, .. } = *request;
        let range = offset..offset + len;
        match op {
            Op::Read => {
                let _mapping = image.claim(range, false).await;
                image.read(channels, offset, &mut request.bufs).await
            }
            Op::Write { fua } if request.compress => {
                let event_loop = &self.inner.event_loop;
                image.write_compressed(event_loop, channels, offset, &request.bufs, fua).await
            }
            Op::Write { fua } => image.write(channels, offset, &mut request.bufs, fua).await,
            Op::Flush => node.flush(channels).await,
            Op::Discard => image.discard(channels, range, node.discarding()).await,
            Op::WriteZeroes { may_unmap, no_fallback, fua } => {
                let discarding = may_unmap.then(|| node.discarding());
                image.write_zeroes(channels, range, discarding, no_fallback).await?;
                if fua {
                    node.flush(channels).await?;
                }
                image.commit(channels).await
            }
            Op::BlockStatus => {
                let _mapping = image.claim(range.clone(), false).await;
                image.status(channels, range, &mut request.bufs).await
            }
        }
    }

    /// Has changes without data, and those of a request that has failed, survive a kill, if bitmaps do: their bits may be
    /// taken.
    async fn survives(&self, result: Result<(), Errno>) -> Result<(), Errno> {
        let Inner { node, channels, .. } = &*self.inner;
        let op = self.request.as_ref().map(|request| request.op);
        let changes = op.filter(|op| !op.only_reads());
        match changes {
            Some(op) if node.image.kept.any() && (op == Op::Discard || result.is_err()) => {
                result.and(node.image.commit(channels).await)
            }
            Some(_) | None => result,
        }
    }

    /// Reports damage, if the request failed because of damage.
    async fn tell_damage(&self) {
        let Inner { node, channels, .. } = &*self.inner;
        let at = Some(self.request.as_ref().map_or(0, |request| request.offset));
        node.image.tell_damage(channels, &node.name, at, node.damages.as_ref()).await;
    }

    fn answer(mut self, result: Result<(), Errno>) {
        if let Some(request) = self.request.take() {
            request.complete(result);
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some(mut request) = self.request.take() {
            if !request.op.only_reads() {
                // A kill may undo a part that it has done.
                self.inner.node.image.kept.give_up();
            }
            // Parts of the memory may be with the nodes below still, which keep it.
            request.bufs = IoBufs::new();
            request.complete(Err(Errno::ECANCELED));
        }
        self.inner.ended();
    }
}
