//! `mirror_top`: the filter above a mirror's source, which records writes.

use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{EventLoop, IoBufs};
use nix::errno::Errno;

use super::bitmap::Bitmap;
use super::keep_size;
use crate::graph::Edge;
use crate::node::{BlockNode, Channel, Geometry, Resized};
use crate::request::{Request, RequestOwner};
use crate::watched::WatchedWrites;

/// The filter on a mirror's source. The source's users go through it.
pub struct MirrorTop {
    name: String,
    source: Arc<Edge>,
    dirty: Arc<Bitmap>,
}

impl MirrorTop {
    /// Creates a filter above `source`. A write is marked in `dirty` before it is answered.
    pub fn new(name: String, source: Arc<Edge>, dirty: Arc<Bitmap>) -> MirrorTop {
        MirrorTop { name, source, dirty }
    }
}

impl BlockNode for MirrorTop {
    fn name(&self) -> &str {
        &self.name
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
        Ok(Rc::new_cyclic(|me| MirrorTopChannel {
            me: me.clone(),
            source,
            dirty: self.dirty.clone(),
            writes: WatchedWrites::default(),
        }))
    }
}

struct MirrorTopChannel {
    me: Weak<MirrorTopChannel>,
    source: Rc<dyn Channel>,
    dirty: Arc<Bitmap>,
    writes: WatchedWrites,
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
        self.source.in_flight()
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
        // Also after a failure, since a part may have been written. Not before the write: a copy between
        // mark and write would contain the old data.
        self.dirty.set(write.offset, write.len);
        write.owed.send(result, bufs);
    }
}
