//! A preallocate node.

use std::cell::Cell;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use event_loop::{EventLoop, IoBufs, LoopConfig};

use super::options::Ahead;
use crate::drivers::common::Common;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry, HeldState, Released, ResizeError, Resized};
use crate::options::BlockdevOptions;
use crate::request::{Op, Request};
use crate::submit::submit;

/// A filter that makes the file below longer, so that writes past its end find room there.
pub(super) struct PreallocateNode {
    name: String,
    common: Common,
    room: Arc<Room>,
}

/// The file below: how much of it is in use, and how long it is. A node that is opened anew takes this value over.
/// Dropping it cuts the unused end off.
pub(super) struct Room {
    name: String,
    child: Arc<dyn BlockNode>,
    ahead: Mutex<Ahead>,
    /// A format above writes past the end.
    grows: AtomicBool,
    /// The end of what was written, or was there from the start.
    data_end: AtomicU64,
    /// The end of the file.
    file_end: AtomicU64,
    /// Held while the file is made longer.
    extending: tokio::sync::Mutex<()>,
    /// Another process continues with the file, unless this one writes after this was set.
    handed_over: AtomicBool,
}

impl Room {
    pub(super) fn new(name: String, child: Arc<dyn BlockNode>, ahead: Ahead) -> Room {
        // A block device has no end that writes could pass.
        let end = child.end().unwrap_or(u64::MAX);
        Room {
            name,
            child,
            ahead: Mutex::new(ahead),
            grows: AtomicBool::new(false),
            data_end: AtomicU64::new(end),
            file_end: AtomicU64::new(end),
            extending: tokio::sync::Mutex::default(),
            handed_over: AtomicBool::new(false),
        }
    }

    /// Replaces the options. Returns those before.
    pub(super) fn set(&self, ahead: Ahead) -> Ahead {
        std::mem::replace(&mut lock(&self.ahead), ahead)
    }

    /// Returns where the file is to end if a write ends at `end`. `None`: no file may be that long.
    fn wanted(&self, end: u64) -> Option<u64> {
        let Ahead { align, size } = *lock(&self.ahead);
        let wanted = end.checked_add(size)?.checked_next_multiple_of(align.max(1))?;
        i64::try_from(wanted).ok().map(i64::unsigned_abs)
    }

    /// Makes the file longer for a write that ends there.
    async fn extend(&self, channel: &Rc<dyn Channel>, end: u64) {
        let _turn = self.extending.lock().await;
        let before = self.file_end.load(Ordering::Acquire);
        if end <= before {
            return;
        }
        let after = self.wanted(end).unwrap_or(end);
        let op = Op::WriteZeroes { may_unmap: false, no_fallback: true, fua: false };
        let (made, _) = submit(channel, op, before, after - before, IoBufs::new()).await;
        // Where that fails, the write itself makes the file longer.
        self.file_end.store(if made.is_ok() { after } else { end }, Ordering::Release);
    }

    /// The size is another one.
    fn resized(&self) {
        if let Some(end) = self.child.end() {
            self.data_end.store(end, Ordering::Release);
            self.file_end.store(end, Ordering::Release);
        }
    }
}

impl Drop for Room {
    /// Cuts off what is not in use.
    fn drop(&mut self) {
        let (data_end, file_end) = (*self.data_end.get_mut(), *self.file_end.get_mut());
        if file_end <= data_end || *self.handed_over.get_mut() {
            return;
        }
        let child = &self.child;
        // The caller may be a task on a loop, which must not run another one.
        let resized = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("preallocate".into());
            let thread = thread.spawn_scoped(scope, || {
                let event_loop =
                    EventLoop::new(LoopConfig::default()).map_err(|error| error.error)?;
                let resized = child.clone().resize(data_end, &event_loop);
                let resized = event_loop.block_on(resized)?.map_err(io::Error::other);
                event_loop.shut_down()?;
                resized
            });
            thread?.join().map_err(|_| io::Error::other("the thread panicked"))?
        });
        if let Err(error) = resized {
            log::warn!(
                "could not cut off what was preallocated: node '{}': {error}; the file stays longer than its data",
                self.name
            );
        }
    }
}

impl PreallocateNode {
    pub(super) fn new(
        name: String,
        options: &BlockdevOptions,
        room: Arc<Room>,
    ) -> Result<Self, OpenError> {
        let common = Common::new(options, &*room.child);
        Ok(PreallocateNode { name, common, room })
    }
}

impl BlockNode for PreallocateNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.common.geometry(self.room.child.geometry())
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.room.child.clone())
    }

    /// The format above knows nothing of what is preallocated.
    fn end(&self) -> Option<u64> {
        match self.room.data_end.load(Ordering::Acquire) {
            u64::MAX => self.room.child.end(),
            end => Some(end),
        }
    }

    fn enable_growth(&self) {
        self.room.grows.store(true, Ordering::Release);
        self.room.child.enable_growth();
    }

    fn held_state(self: Arc<Self>) -> Option<Arc<dyn HeldState>> {
        Some(self)
    }

    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        let event_loop = event_loop.clone();
        Box::pin(async move {
            ResizeError::check(size, self.geometry().read_only)?;
            let _turn = self.room.extending.lock().await;
            self.room.child.clone().resize(size, &event_loop).await?;
            self.room.resized();
            Ok(())
        })
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.room.child.clone().open_channel(event_loop)?;
        let channel = Rc::new_cyclic(|me| PreallocateChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            room: self.room.clone(),
            child,
            waiting: Cell::new(0),
        });
        Ok(self.common.channel(self.room.child.geometry(), channel))
    }
}

impl HeldState for PreallocateNode {
    fn release_for_handover(self: Arc<Self>) -> Released {
        self.room.handed_over.store(true, Ordering::Release);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct PreallocateChannel {
    me: Weak<PreallocateChannel>,
    event_loop: EventLoop,
    room: Arc<Room>,
    child: Rc<dyn Channel>,
    /// Requests that wait for a longer file.
    waiting: Cell<usize>,
}

impl Channel for PreallocateChannel {
    fn submit(&self, request: Request) {
        let room = &*self.room;
        let end = request.offset.saturating_add(request.len);
        let writes = matches!(request.op, Op::Write { .. } | Op::WriteZeroes { .. });
        let is_inside = end <= room.data_end.load(Ordering::Acquire);
        if !writes || is_inside || !room.grows.load(Ordering::Acquire) {
            return self.child.submit(request);
        }
        room.data_end.fetch_max(end, Ordering::AcqRel);
        room.handed_over.store(false, Ordering::Release);
        if end <= room.file_end.load(Ordering::Acquire) {
            return self.child.submit(request);
        }
        let Some(me) = self.me.upgrade() else { return self.child.submit(request) };
        self.waiting.set(self.waiting.get() + 1);
        self.event_loop.spawn(async move {
            me.room.extend(&me.child, end).await;
            me.child.submit(request);
            me.waiting.set(me.waiting.get() - 1);
        });
    }

    fn in_flight(&self) -> usize {
        self.waiting.get() + self.child.in_flight()
    }

    fn drain_begin(&self) {
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.child.drain_end();
    }
}
