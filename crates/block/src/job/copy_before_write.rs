//! `copy-before-write`: the filter above a backup's source.
//!
//! It copies data before a write replaces the data, so the target gets the disk as it was when the filter was
//! inserted. A stream has the same filter, with the image as its own target.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{EventLoop, until};
use nix::errno::Errno;

use super::backup::OnCbwError;
use super::copy::{Buffer, Failure, Side, at_target};
use super::giving_up::PendingCopies;
use super::keep_size;
use super::snapshot::Snapshot;
use super::worker::CHUNK;
use crate::drivers::compress::Compressing;
use crate::graph::Edge;
use crate::node::{BlockNode, Channel, Geometry, Resized};
use crate::request::{Op, Request};

/// The source of a backup, as its users see it.
pub struct CopyBeforeWrite {
    name: String,
    source: Arc<Edge>,
    target: Arc<Edge>,
    snapshot: Arc<Snapshot>,
    /// The target stores the data compressed.
    compress: bool,
}

impl CopyBeforeWrite {
    pub(super) fn over(
        name: String,
        source: Arc<Edge>,
        target: Arc<Edge>,
        snapshot: Arc<Snapshot>,
        compress: bool,
    ) -> CopyBeforeWrite {
        CopyBeforeWrite { name, source, target, snapshot, compress }
    }
}

impl BlockNode for CopyBeforeWrite {
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
        let target = self.target.clone().open_channel(event_loop)?;
        let target = Compressing::if_asked(self.compress, target);
        let snapshot = self.snapshot.clone();
        Ok(CbwChannel::new(event_loop, source, target, snapshot, Before::Changes))
    }
}

/// Before which requests their parts are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Before {
    /// Before those that change the disk.
    Changes,
    /// Before reads too.
    All,
}

/// A channel that copies parts before the first request to them.
pub(crate) struct CbwChannel {
    me: Weak<CbwChannel>,
    event_loop: EventLoop,
    source: Rc<dyn Channel>,
    target: Rc<dyn Channel>,
    snapshot: Arc<Snapshot>,
    before: Before,
    /// Number of requests for which something is copied first.
    requests: Cell<usize>,
    /// Their copies.
    pending: Rc<PendingCopies>,
    buffers: RefCell<Vec<Buffer>>,
}

impl CbwChannel {
    pub(crate) fn new(
        event_loop: &EventLoop,
        source: Rc<dyn Channel>,
        target: Rc<dyn Channel>,
        snapshot: Arc<Snapshot>,
        before: Before,
    ) -> Rc<CbwChannel> {
        let pending = PendingCopies::new(event_loop, &snapshot.giving_up);
        Rc::new_cyclic(|me| CbwChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            source,
            target,
            snapshot,
            before,
            requests: Cell::new(0),
            pending,
            buffers: RefCell::default(),
        })
    }

    async fn copy_before(self: Rc<Self>, request: Request) {
        let snapshot = &*self.snapshot;
        let copied = match snapshot.is_over() {
            true => Err(at_target(Errno::ECANCELED)),
            false => self.copy(&request).await,
        };
        match (copied, snapshot.on_error) {
            (Ok(()), _) => self.source.submit(request),
            (Err(failure), OnCbwError::BreakGuestWrite) if !snapshot.is_over() => {
                request.complete(Err(failure.errno));
            }
            // Another attempt would wait for the server again. The cache itself is in order.
            (Err(Failure { side: Side::Source, errno }), _) if snapshot.cache.is_some() => {
                request.complete(Err(errno));
            }
            (Err(failure), _) => {
                if snapshot.cache.is_some() {
                    snapshot.stop_storing(failure.errno.desc());
                } else if !snapshot.is_over() {
                    snapshot.set_broken();
                }
                snapshot.until_kept(&snapshot.left.parts(request.offset, request.len)).await;
                self.source.submit(request);
            }
        }
        self.requests.set(self.requests.get() - 1);
    }

    async fn copy(&self, request: &Request) -> Result<(), Failure> {
        let parts = self.snapshot.left.parts(request.offset, request.len);
        let mut buffer = self.take_buffer().ok_or(at_target(Errno::ENOMEM))?;
        let snapshot = &*self.snapshot;
        let copying = snapshot.copy(parts, &self.source, &self.target, &mut buffer);
        let copying = async {
            let Some(limit) = snapshot.timeout_ns else { return Ok(copying.await) };
            let limit = self.event_loop.now_ns().saturating_add(limit);
            let copied = until(copying, self.event_loop.sleep_until(limit)).await;
            copied.map_err(|()| at_target(Errno::ETIMEDOUT))
        };
        let copied = self.pending.wait_for(&snapshot.giving_up, copying).await;
        // If this fails, a request may still use the buffer: it is not used again.
        let copied = copied.ok_or(at_target(Errno::ECANCELED))??;
        self.buffers.borrow_mut().push(buffer);
        copied
    }

    fn take_buffer(&self) -> Option<Buffer> {
        let kept = self.buffers.borrow_mut().pop();
        let new = || Buffer::new(self.snapshot.left.granularity().min(CHUNK));
        let mut buffer = kept.or_else(new)?;
        // Zeroes take no room in a cache.
        buffer.counts_zeroes = self.snapshot.cache.is_none();
        Some(buffer)
    }
}

impl Channel for CbwChannel {
    fn submit(&self, request: Request) {
        let snapshot = &*self.snapshot;
        let parts = snapshot.left.parts(request.offset, request.len);
        let passes = match request.op {
            Op::Read => self.before == Before::Changes,
            Op::Flush | Op::BlockStatus => true,
            Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } => false,
        };
        let is_left = || parts.clone().any(|part| snapshot.left.is_set(part));
        if passes || !is_left() || snapshot.is_over() && !snapshot.is_discarding(&parts) {
            return self.source.submit(request);
        }
        let Some(me) = self.me.upgrade() else { return };
        self.requests.set(self.requests.get() + 1);
        self.event_loop.spawn(me.copy_before(request));
    }

    fn in_flight(&self) -> usize {
        let target = self.pending.in_flight(&self.snapshot.giving_up, &self.target);
        self.requests.get() + self.source.in_flight() + target
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
