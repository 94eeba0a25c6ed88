//! `copy-before-write`: the filter above a backup's source. What is about to be overwritten is copied
//! first, so that the target gets the disk as it was when the filter was put in. A stream has the same filter, with the
//! image as its own target.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use event_loop::{EventLoop, sync::lock};

use super::backup::OnCbwError;
use super::bitmap::Bitmap;
use super::copy::{Buffer, Failure, copy, copy_above, populate};
use super::keep_size;
use super::worker::CHUNK;
use crate::graph::Edge;
use crate::node::{BlockNode, Channel, Geometry, Resized};
use crate::request::Request;

/// What is copied of a part.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    /// All.
    All,
    /// What comes from images behind the node's own, before the one of that depth. It goes to the node itself.
    Behind(u32),
    /// What comes from images before the one of that depth.
    Above(u32),
}

impl What {
    pub(super) async fn copy(
        self,
        source: &Rc<dyn Channel>,
        target: &Rc<dyn Channel>,
        range: Range<u64>,
        buffer: &mut Buffer,
    ) -> Result<(), Failure> {
        match self {
            What::All => copy(source, target, range, buffer).await,
            What::Behind(depth) => populate(target, range, depth, buffer).await,
            What::Above(depth) => copy_above(source, target, range, depth, buffer).await,
        }
    }
}

/// What is still to be copied, and what is being copied, by whichever thread.
pub(super) struct Snapshot {
    /// Parts that are in the target are cleared, and only then.
    pub(super) left: Bitmap,
    claims: Mutex<Claims>,
    on_error: OnCbwError,
    pub(super) what: What,
    /// A write went through to what had not been copied.
    broken: AtomicBool,
}

#[derive(Default)]
struct Claims {
    ranges: Vec<Range<u64>>,
    waiting: Vec<Waker>,
}

/// Some parts that nobody else copies meanwhile.
pub(super) struct Claim<'a> {
    snapshot: &'a Snapshot,
    pub(super) parts: Range<u64>,
}

impl Claim<'_> {
    /// They are in the target.
    pub(super) fn done(self) {
        self.snapshot.left.clear(self.parts.clone());
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut claims = lock(&self.snapshot.claims);
        claims.ranges.retain(|range| *range != self.parts);
        let waiting = std::mem::take(&mut claims.waiting);
        drop(claims);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Snapshot {
    pub(super) fn new(left: Bitmap, on_error: OnCbwError, what: What) -> Snapshot {
        Snapshot { left, claims: Mutex::default(), on_error, what, broken: AtomicBool::new(false) }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Claims the first parts of `parts` that are left and that nobody copies, `most` of them.
    /// `Ok(None)`: none is left. `Err`: what is left is being copied.
    pub(super) fn claim(&self, parts: Range<u64>, most: u64) -> Result<Option<Claim<'_>>, ()> {
        let mut claims = lock(&self.claims);
        let is_claimed = |part: &u64| claims.ranges.iter().any(|range| range.contains(part));
        let mut busy = false;
        let mut from = parts.start;
        let start = loop {
            match self.left.first_set(from).filter(|&part| part < parts.end) {
                None if busy => return Err(()),
                None => return Ok(None),
                Some(part) if is_claimed(&part) => (busy, from) = (true, part + 1),
                Some(part) => break part,
            }
        };
        let is_free = |part: &u64| self.left.is_set(*part) && !is_claimed(part);
        let count = (start..parts.end.min(start + most)).take_while(is_free).count() as u64;
        let parts = start..start + count;
        claims.ranges.push(parts.clone());
        drop(claims);
        Ok(Some(Claim { snapshot: self, parts }))
    }

    /// Claims the next of `parts`, and waits while others copy all that is left of them.
    async fn next_claim(&self, parts: &Range<u64>, most: u64) -> Option<Claim<'_>> {
        poll_fn(|cx| match self.claim(parts.clone(), most) {
            Ok(claim) => Poll::Ready(claim),
            Err(()) => {
                lock(&self.claims).waiting.push(cx.waker().clone());
                // One may have been given back in between.
                match self.claim(parts.clone(), most) {
                    Ok(claim) => Poll::Ready(claim),
                    Err(()) => Poll::Pending,
                }
            }
        })
        .await
    }

    /// Copies what is left of some parts.
    async fn copy(
        &self,
        parts: Range<u64>,
        source: &Rc<dyn Channel>,
        target: &Rc<dyn Channel>,
        buffer: &mut Buffer,
    ) -> Result<(), Failure> {
        let most = (CHUNK / self.left.granularity()).max(1);
        while let Some(claim) = self.next_claim(&parts, most).await {
            let range = self.left.bytes_of(&claim.parts);
            self.what.copy(source, target, range, buffer).await?;
            claim.done();
        }
        Ok(())
    }
}

/// The source of a backup, as its users see it.
pub struct CopyBeforeWrite {
    name: String,
    source: Arc<Edge>,
    target: Arc<Edge>,
    snapshot: Arc<Snapshot>,
}

impl CopyBeforeWrite {
    pub(super) fn over(
        name: String,
        source: Arc<Edge>,
        target: Arc<Edge>,
        snapshot: Arc<Snapshot>,
    ) -> CopyBeforeWrite {
        CopyBeforeWrite { name, source, target, snapshot }
    }
}

impl BlockNode for CopyBeforeWrite {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.source.geometry()
    }

    fn below(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.source.clone())
    }

    fn resize(self: Arc<Self>, size: u64, _event_loop: &EventLoop) -> Resized {
        keep_size(self.geometry(), size)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let source = self.source.clone().open_channel(event_loop)?;
        let target = self.target.clone().open_channel(event_loop)?;
        Ok(Rc::new_cyclic(|me| CbwChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            source,
            target,
            snapshot: self.snapshot.clone(),
            waiting: Cell::new(0),
            buffers: RefCell::default(),
        }))
    }
}

struct CbwChannel {
    me: Weak<CbwChannel>,
    event_loop: EventLoop,
    source: Rc<dyn Channel>,
    target: Rc<dyn Channel>,
    snapshot: Arc<Snapshot>,
    /// Writes for which something is copied first.
    waiting: Cell<usize>,
    buffers: RefCell<Vec<Buffer>>,
}

impl CbwChannel {
    async fn copy_before(self: Rc<Self>, request: Request) {
        let parts = self.snapshot.left.parts(request.offset, request.len);
        let result = match self.take_buffer() {
            Some(mut buffer) => {
                let copying = self.snapshot.copy(parts, &self.source, &self.target, &mut buffer);
                let result = copying.await.map_err(|failure| failure.errno);
                self.buffers.borrow_mut().push(buffer);
                result
            }
            None => Err(nix::errno::Errno::ENOMEM),
        };
        match (result, self.snapshot.on_error) {
            (Ok(()), _) => self.source.submit(request),
            (Err(errno), OnCbwError::BreakGuestWrite) => request.complete(Err(errno)),
            (Err(_), OnCbwError::BreakSnapshot) => {
                self.snapshot.broken.store(true, Ordering::Relaxed);
                self.source.submit(request);
            }
        }
        self.waiting.set(self.waiting.get() - 1);
    }

    fn take_buffer(&self) -> Option<Buffer> {
        let kept = self.buffers.borrow_mut().pop();
        kept.or_else(|| Buffer::new(self.snapshot.left.granularity().min(CHUNK)))
    }
}

impl Channel for CbwChannel {
    fn submit(&self, request: Request) {
        let snapshot = &*self.snapshot;
        let mut parts = snapshot.left.parts(request.offset, request.len);
        if request.op.only_reads()
            || !parts.any(|part| snapshot.left.is_set(part))
            || snapshot.is_broken()
        {
            return self.source.submit(request);
        }
        let Some(me) = self.me.upgrade() else { return };
        self.waiting.set(self.waiting.get() + 1);
        self.event_loop.spawn(me.copy_before(request));
    }

    fn in_flight(&self) -> usize {
        self.waiting.get() + self.source.in_flight()
    }

    fn drain_begin(&self) {
        self.source.drain_begin();
        self.target.drain_begin();
    }

    fn drain_end(&self) {
        self.source.drain_end();
        self.target.drain_end();
    }
}
