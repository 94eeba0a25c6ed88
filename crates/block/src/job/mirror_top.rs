//! `mirror_top`: the filter above a mirror's source, which records writes. With `copy-mode=write-blocking` it copies them to
//! the target before they are answered.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{EventLoop, IoBufs};
use nix::errno::Errno;

use super::bitmap::Bitmap;
use super::copy::{Buffer, copy};
use super::giving_up::PendingCopies;
use super::keep_size;
use super::turns::Turns;
use crate::graph::Edge;
use crate::node::{BlockNode, Channel, Geometry, Resized};
use crate::request::{Request, RequestOwner};
use crate::watched::{WatchedWrite, WatchedWrites};

/// The filter on a mirror's source. The source's users go through it.
pub struct MirrorTop {
    name: String,
    source: Arc<Edge>,
    dirty: Arc<Bitmap>,
    copies: Option<CopiesTo>,
}

/// Where and how a filter copies writes.
pub struct CopiesTo {
    /// The mirror's target.
    pub target: Arc<Edge>,
    /// The turns of copies.
    pub turns: Arc<Turns>,
    /// A write copies the whole parts that it touches: the target may not have the rest of a cluster.
    pub whole: bool,
    /// Parts of the target that read as zeroes. `None`: unknown.
    pub zero: Option<Arc<Bitmap>>,
}

impl MirrorTop {
    /// Returns a filter that records writes.
    pub fn new(name: String, source: Arc<Edge>, dirty: Arc<Bitmap>) -> MirrorTop {
        MirrorTop { name, source, dirty, copies: None }
    }

    /// Copies writes to the target before they are answered, if `turns` says so.
    #[must_use]
    pub fn copying_to(self, to: CopiesTo) -> MirrorTop {
        MirrorTop { copies: Some(to), ..self }
    }
}

impl BlockNode for MirrorTop {
    fn name(&self) -> &str {
        &self.name
    }

    fn known_name(&self) -> String {
        self.source.known_name()
    }

    fn geometry(&self) -> Geometry {
        self.source.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.source.clone())
    }

    fn resize(self: Arc<Self>, size: u64, _event_loop: &EventLoop) -> Resized {
        keep_size(self.geometry(), size)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let source = self.source.clone().open_channel(event_loop)?;
        let copies = match &self.copies {
            Some(to) => Some(Copies {
                event_loop: event_loop.clone(),
                target: to.target.clone().open_channel(event_loop)?,
                pending: PendingCopies::new(event_loop, &to.turns.giving_up),
                turns: to.turns.clone(),
                whole: to.whole,
                zero: to.zero.clone(),
                buffers: RefCell::default(),
            }),
            None => None,
        };
        Ok(Rc::new_cyclic(|me| MirrorTopChannel {
            me: me.clone(),
            source,
            dirty: self.dirty.clone(),
            writes: WatchedWrites::default(),
            copies,
            copying: Cell::new(0),
        }))
    }
}

struct MirrorTopChannel {
    me: Weak<MirrorTopChannel>,
    source: Rc<dyn Channel>,
    dirty: Arc<Bitmap>,
    writes: WatchedWrites,
    copies: Option<Copies>,
    /// Writes that are in the source, and on their way to the target.
    copying: Cell<usize>,
}

/// What it takes to copy writes.
struct Copies {
    event_loop: EventLoop,
    target: Rc<dyn Channel>,
    turns: Arc<Turns>,
    /// Copies that writes wait for.
    pending: Rc<PendingCopies>,
    whole: bool,
    zero: Option<Arc<Bitmap>>,
    buffers: RefCell<Vec<Buffer>>,
}

/// Bytes of memory per write that is copied, and buffers that are kept.
const AT_ONCE: u64 = 64 << 10;
const KEPT: usize = 64;

impl MirrorTopChannel {
    /// Copies what a write has changed, and answers the write. If that fails, the worker copies it.
    async fn copy_and_answer(
        self: Rc<Self>,
        mut write: WatchedWrite,
        result: Result<(), Errno>,
        bufs: IoBufs,
    ) {
        if let Some(copies) = &self.copies {
            let copying = self.copy(copies, &write);
            let copied = copies.pending.wait_for(&copies.turns.giving_up, copying).await;
            if copied.is_none() {
                self.dirty.set(write.offset, write.len);
            }
        }
        write.owed.send(result, bufs);
        self.copying.set(self.copying.get() - 1);
    }

    async fn copy(&self, copies: &Copies, write: &WatchedWrite) {
        let parts = self.dirty.parts(write.offset, write.len);
        let turn = copies.turns.claim(&parts).await;
        // Of parts that differ as a whole, the worker has not read yet what others have written to them.
        let whole = copies.whole || parts.clone().any(|part| self.dirty.is_set(part));
        let range = match whole {
            true => self.dirty.bytes_of(&parts),
            false => write.offset..write.offset + write.len,
        };
        self.dirty.clear(parts);
        let buffer = copies.buffers.borrow_mut().pop().or_else(|| Buffer::new(AT_ONCE));
        let copied = match buffer {
            Some(mut buffer) => {
                let (target, zero) = (&copies.target, copies.zero.as_deref());
                let copied = copy(&self.source, target, range.clone(), &mut buffer, 1, zero).await;
                if copies.buffers.borrow().len() < KEPT {
                    copies.buffers.borrow_mut().push(buffer);
                }
                copied.is_ok()
            }
            None => false,
        };
        if !copied {
            self.dirty.set(range.start, range.end - range.start);
        }
        drop(turn);
    }
}

impl Channel for MirrorTopChannel {
    fn submit(&self, mut request: Request) {
        if !request.op.only_reads()
            && let Some(me) = self.me.upgrade()
        {
            self.writes.begin(&mut request, me);
        }
        self.source.submit(request);
    }

    fn in_flight(&self) -> usize {
        let target = self
            .copies
            .as_ref()
            .map(|copies| copies.pending.in_flight(&copies.turns.giving_up, &copies.target));
        self.source.in_flight() + self.copying.get() + target.unwrap_or_default()
    }

    fn drain_begin(&self) {
        self.source.drain_begin();
    }

    fn drain_end(&self) {
        self.source.drain_end();
    }
}

impl RequestOwner for MirrorTopChannel {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let Some(mut write) = self.writes.end(tag) else { return };
        // Nothing of an empty range is to be copied.
        if let Some(copies) = self.copies.as_ref().filter(|copies| copies.turns.is_blocking())
            && let Some(me) = self.me.upgrade()
            && result.is_ok()
            && write.len > 0
        {
            self.copying.set(self.copying.get() + 1);
            copies.event_loop.spawn(me.copy_and_answer(write, result, bufs));
            return;
        }
        // Also after a failure, since a part may have been written. Not before the write: a copy between
        // mark and write would contain the old data.
        self.dirty.set(write.offset, write.len);
        write.owed.send(result, bufs);
    }
}
