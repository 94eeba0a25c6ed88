//! One loop's requests to an image.
//!
//! The library answers on its own threads. Answers come back by the lane's list, and the first of a batch wakes the
//! loop. Nothing is allocated per request here; the library does.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{BottomHalf, EventLoop, IoBufs, Slab};
use nix::errno::Errno;
use rbd::{Done, Image, Lane, LaneOp};

use super::extents::extents;
use super::node::Shared;
use crate::node::Channel;
use crate::request::{Detached, Op, Request};
use crate::status;

/// Requests under way that a channel has room for from the start.
const FIRST: usize = 128;

/// One loop's way to an image.
pub(super) struct RbdChannel {
    me: Weak<RbdChannel>,
    event_loop: EventLoop,
    image: Arc<Image>,
    lane: Lane,
    answered: BottomHalf,
    /// Requests under way, by their numbers in the lane.
    requests: RefCell<Slab<Pending>>,
    /// Requests that wait until the image has grown.
    growing: Cell<usize>,
    /// Dropped last: a thread that may block then closes the image.
    shared: Arc<Shared>,
}

struct Pending {
    request: Detached,
    is_read: bool,
    /// The image is flushed after the step that is under way: a write is to be on stable storage.
    flushes: bool,
    /// The request's memory, where the image's end has cut a part of it off.
    whole: Option<IoBufs>,
}

impl RbdChannel {
    pub(super) fn new(event_loop: &EventLoop, shared: Arc<Shared>, image: Arc<Image>) -> Rc<Self> {
        Rc::new_cyclic(|me: &Weak<RbdChannel>| {
            let on_loop = me.clone();
            let answered = event_loop.bottom_half(move || {
                if let Some(me) = on_loop.upgrade() {
                    me.lane.take(|done| me.done(done));
                }
            });
            RbdChannel {
                me: me.clone(),
                event_loop: event_loop.clone(),
                shared,
                lane: Lane::new(image.clone(), answered.clone()),
                image,
                answered,
                requests: RefCell::new(Slab::with_capacity(FIRST)),
                growing: Cell::new(0),
            }
        })
    }

    /// Applies the node's options to a request. `Some`: that is its answer.
    fn prepare(&self, request: &mut Request) -> Option<Result<(), Errno>> {
        let geometry = self.shared.geometry();
        if geometry.read_only && !request.op.only_reads() {
            return Some(Err(Errno::EROFS));
        }
        match request.offset.checked_add(request.len) {
            Some(end) if end <= geometry.size || self.shared.may_reach(end) => {}
            _ => return Some(Err(request.op.beyond_end())),
        }
        self.shared.options.get().apply(request)
    }

    /// Has the image grow for a request that writes past its end, then carries the request out.
    #[cold]
    fn grow(&self, request: Request) {
        let Some(me) = self.me.upgrade() else { return };
        let grown = self.shared.disk.grow(request.offset + request.len);
        self.growing.update(|count| count + 1);
        self.event_loop.spawn(async move {
            let grown = grown.await.unwrap_or(Err(Errno::ECANCELED));
            me.growing.update(|count| count - 1);
            match grown {
                Ok(()) => me.carry_out(request),
                Err(errno) => request.complete(Err(errno)),
            }
        });
    }

    /// Cuts off what lies past the image's end: a node's size is rounded up to sectors, and may be about to grow.
    fn cut(&self, request: &mut Request) -> Option<IoBufs> {
        let (end, size) = (request.offset + request.len, self.shared.disk.size());
        if end <= size {
            return None;
        }
        let len = size.saturating_sub(request.offset);
        if request.op == Op::Read {
            request.bufs.zero(len as usize, (request.len - len) as usize);
        }
        let mut part = IoBufs::new();
        part.set_part(&request.bufs, 0, len as usize, usize::MAX);
        Some(std::mem::replace(&mut request.bufs, part))
    }

    fn done(&self, done: Done) {
        let Done { tag, result, mut bufs } = done;
        let mut requests = self.requests.borrow_mut();
        let Some(pending) = requests.get_mut(tag) else { return };
        if std::mem::take(&mut pending.flushes) && result.is_ok() {
            drop(requests);
            return self.start(tag, LaneOp::Flush, bufs);
        }
        if let Ok(bytes) = result
            && pending.is_read
        {
            // The image has become shorter meanwhile.
            bufs.zero(bytes, bufs.len().saturating_sub(bytes));
        }
        drop(requests);
        self.answer(tag, result.map(drop), bufs);
    }

    /// Starts a step of a request.
    fn start(&self, tag: u32, op: LaneOp, bufs: IoBufs) {
        if let Err((errno, bufs)) = self.lane.submit(tag, op, bufs) {
            self.answer(tag, Err(errno), bufs);
        }
    }

    /// Answers a request, with its own memory.
    fn answer(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let pending = self.requests.borrow_mut().remove(tag);
        if let Some(Pending { request, whole, .. }) = pending {
            request.complete(result, whole.unwrap_or(bufs));
        }
    }

    /// Sends a request to the image. Bytes past the image's end read as zeroes.
    fn carry_out(&self, mut request: Request) {
        let Request { offset, len, .. } = request;
        let within = len.min(self.shared.disk.size().saturating_sub(offset));
        if within == 0 && len > 0 {
            let result = match request.op {
                Op::BlockStatus => return self.block_status(request),
                Op::Read => {
                    request.bufs.zero(0, request.bufs.len());
                    Ok(())
                }
                Op::Flush | Op::Discard => Ok(()),
                // The image has become shorter meanwhile.
                Op::Write { .. } | Op::WriteZeroes { .. } => Err(request.op.beyond_end()),
            };
            return request.complete(result);
        }
        let whole = match request.op {
            Op::BlockStatus => return self.block_status(request),
            Op::Read | Op::Write { .. } => self.cut(&mut request),
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => None,
        };
        let (op, flushes) = match request.op {
            Op::Read | Op::BlockStatus => (LaneOp::Read { offset }, false),
            Op::Write { fua } => (LaneOp::Write { offset }, fua),
            Op::Flush => (LaneOp::Flush, false),
            Op::Discard => (LaneOp::Discard { offset, len: within }, false),
            Op::WriteZeroes { may_unmap, no_fallback: _, fua } => {
                (LaneOp::WriteZeroes { offset, len: within, keeps_space: !may_unmap }, fua)
            }
        };
        let is_read = request.op == Op::Read;
        let (request, bufs) = request.detach();
        let pending = Pending { request, is_read, flushes, whole };
        let tag = self.requests.borrow_mut().insert(pending);
        self.start(tag, op, bufs);
    }

    /// Answers where data is. Asking for it blocks.
    fn block_status(&self, request: Request) {
        let Some(me) = self.me.upgrade() else { return };
        let (image, offset, len) = (self.image.clone(), request.offset, request.len);
        let room = request.bufs.len() / status::EXTENT_LEN;
        let size = self.shared.disk.size();
        let found = self.shared.disk.jobs().run(move || extents(&image, offset, len, size, room));
        let (request, mut bufs) = request.detach();
        let pending = Pending { request, is_read: false, flushes: false, whole: None };
        let tag = self.requests.borrow_mut().insert(pending);
        self.event_loop.spawn(async move {
            let found = found.await.unwrap_or(Err(Errno::EIO));
            let result = found.map(|extents| {
                let count = extents.len();
                for (index, extent) in extents.into_iter().enumerate() {
                    status::put(&mut bufs, index, extent);
                }
                status::end_after(&mut bufs, count * status::EXTENT_LEN);
            });
            me.answer(tag, result, bufs);
        });
    }
}

impl Channel for RbdChannel {
    fn submit(&self, mut request: Request) {
        if let Some(result) = self.prepare(&mut request) {
            return request.complete(result);
        }
        let end = request.offset + request.len;
        if end > self.shared.geometry().size {
            match request.op {
                Op::Write { .. } | Op::WriteZeroes { .. } => return self.grow(request),
                Op::Read | Op::Flush | Op::Discard | Op::BlockStatus => {}
            }
        }
        self.carry_out(request);
    }

    fn in_flight(&self) -> usize {
        self.requests.borrow().len() + self.growing.get()
    }
}

impl Drop for RbdChannel {
    fn drop(&mut self) {
        self.event_loop.delete_bottom_half(&self.answered);
    }
}
