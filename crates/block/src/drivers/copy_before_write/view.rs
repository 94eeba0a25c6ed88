//! The disk as it was when a copy-before-write node was opened.
//!
//! After a discard, a part is not kept any more: it cannot be read, and is not copied before it is overwritten.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{EventLoop, IoBufs};
use nix::errno::Errno;

use crate::job::{Bitmap, Place, Snapshot, keep_size};
use crate::node::{BlockNode, Channel, Geometry, HostStorage, Resized};
use crate::request::{Op, Request};
use crate::submit::submit;

/// Segments of memory read at once.
const SEGMENTS: usize = 64;

/// A node that is read only, but for discards.
pub(super) struct View {
    pub(super) name: String,
    pub(super) source: Arc<dyn BlockNode>,
    pub(super) target: Arc<dyn BlockNode>,
    pub(super) snapshot: Arc<Snapshot>,
    /// The parts that can be read.
    pub(super) kept: Arc<Bitmap>,
}

impl BlockNode for View {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let below = self.source.geometry();
        Geometry {
            size: self.kept.size(),
            read_only: true,
            discard: false,
            write_zeroes: false,
            write_cache: false,
            ..below
        }
    }

    fn resize(self: Arc<Self>, size: u64, _event_loop: &EventLoop) -> Resized {
        keep_size(self.geometry(), size)
    }

    fn host_storage(self: Arc<Self>) -> Option<Arc<dyn HostStorage>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let source = self.source.clone().open_channel(event_loop)?;
        let target = self.target.clone().open_channel(event_loop)?;
        Ok(Rc::new_cyclic(|me| ViewChannel {
            me: me.clone(),
            view: self,
            event_loop: event_loop.clone(),
            source,
            target,
            reading: Cell::new(0),
        }))
    }
}

impl HostStorage for View {
    fn memory_alignment(&self) -> u32 {
        self.source.memory_alignment().max(self.target.memory_alignment())
    }
}

struct ViewChannel {
    me: Weak<ViewChannel>,
    view: Arc<View>,
    event_loop: EventLoop,
    source: Rc<dyn Channel>,
    target: Rc<dyn Channel>,
    /// Requests that tasks work on.
    reading: Cell<usize>,
}

impl ViewChannel {
    async fn carry_out(self: Rc<Self>, mut request: Request) {
        let result = match request.op {
            Op::Read => self.read(&request).await,
            Op::Discard => self.discard(&request).await,
            _ => self.block_status(&mut request).await,
        };
        self.reading.set(self.reading.get() - 1);
        request.complete(result);
    }

    /// Finds the place of the first bytes of a range. Returns it with its channel and how many bytes there are.
    async fn place(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<(Place<'_>, &Rc<dyn Channel>, u64), Errno> {
        let View { snapshot, kept, .. } = &*self.view;
        let mut parts = snapshot.left.parts(offset, len);
        if snapshot.is_broken() || !parts.clone().all(|part| kept.is_set(part)) {
            return Err(Errno::EACCES);
        }
        let place = snapshot.next_place(&parts).await;
        let channel = match &place {
            Place::Target(found) => {
                parts = found.clone();
                &self.target
            }
            Place::Source(claim) => {
                parts = claim.parts.clone();
                &self.source
            }
        };
        let end = snapshot.left.bytes_of(&parts).end;
        Ok((place, channel, (end - offset).min(len)))
    }

    async fn read(&self, request: &Request) -> Result<(), Errno> {
        let mut done = 0;
        while done < request.len {
            let (offset, left) = (request.offset + done, request.len - done);
            let (place, channel, len) = self.place(offset, left).await?;
            let mut part = IoBufs::new();
            let bytes = part.set_part(&request.bufs, done as usize, len as usize, SEGMENTS);
            if bytes == 0 {
                return Err(Errno::EIO);
            }
            submit(channel, Op::Read, offset, bytes as u64, part).await.0?;
            drop(place);
            done += bytes as u64;
        }
        // A write that was not copied for, or a discard, may have come before a read.
        match self.is_kept(request) {
            true => Ok(()),
            false => Err(Errno::EACCES),
        }
    }

    fn is_kept(&self, request: &Request) -> bool {
        let View { snapshot, kept, .. } = &*self.view;
        let mut parts = snapshot.left.parts(request.offset, request.len);
        !snapshot.is_broken() && parts.all(|part| kept.is_set(part))
    }

    /// Forgets the parts that lie within a range.
    async fn discard(&self, request: &Request) -> Result<(), Errno> {
        let View { snapshot, kept, .. } = &*self.view;
        let parts = snapshot.left.parts_within(request.offset, request.len);
        if parts.is_empty() {
            return Ok(());
        }
        kept.clear(parts.clone());
        snapshot.forget(parts.clone()).await;
        let Range { start, end } = snapshot.left.bytes_of(&parts);
        submit(&self.target, Op::Discard, start, end - start, IoBufs::new()).await.0
    }

    /// Tells of the first bytes of the range, which is an answer.
    async fn block_status(&self, request: &mut Request) -> Result<(), Errno> {
        let (place, channel, len) = self.place(request.offset, request.len).await?;
        let bufs = std::mem::take(&mut request.bufs);
        let (result, bufs) = submit(channel, Op::BlockStatus, request.offset, len, bufs).await;
        request.bufs = bufs;
        drop(place);
        result
    }
}

impl Channel for ViewChannel {
    fn submit(&self, request: Request) {
        match request.op {
            Op::Flush => return request.complete(Ok(())),
            Op::Write { .. } | Op::WriteZeroes { .. } => {
                return request.complete(Err(Errno::EROFS));
            }
            Op::Read | Op::BlockStatus | Op::Discard => {}
        }
        let end = request.offset.checked_add(request.len);
        if end.is_none_or(|end| end > self.view.kept.size()) {
            return request.complete(Err(Errno::EIO));
        }
        let Some(me) = self.me.upgrade() else { return };
        self.reading.set(self.reading.get() + 1);
        self.event_loop.spawn(me.carry_out(request));
    }

    fn in_flight(&self) -> usize {
        self.reading.get() + self.source.in_flight() + self.target.in_flight()
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
