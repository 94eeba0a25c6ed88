//! `raw`: a part of, or all of, another node, seen as a disk.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;
use nix::errno::Errno;

use super::common::Common;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry, ResizeError, Resized};
use crate::options::{BlockdevOptions, RawOptions};
use crate::request::{Op, Request};

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

/// A range of another node.
pub(crate) struct RawNode {
    name: String,
    child: Arc<dyn BlockNode>,
    offset: u64,
    /// `None`: up to the end of the child, wherever that is.
    size: Option<u64>,
    common: Common,
}

impl RawNode {
    /// Puts a node on top of `child`. The messages are QEMU's.
    pub(crate) fn new(
        name: String,
        common: &BlockdevOptions,
        options: &RawOptions,
        child: Arc<dyn BlockNode>,
    ) -> Result<RawNode, OpenError> {
        let below = child.geometry();
        let RawOptions { offset, size, .. } = *options;
        let Some(room) = below.size.checked_sub(offset) else {
            return Err(OpenError::new(format!(
                "Offset ({offset}) cannot be greater than size of the containing file ({})",
                below.size
            )));
        };
        match size {
            Some(size) if size % SECTOR != 0 => {
                return Err(OpenError::new(format!(
                    "Specified size is not multiple of {SECTOR}: {size}"
                )));
            }
            Some(size) if size > room => {
                return Err(OpenError::new(format!(
                    "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to \
                     the actual size of the containing file ({})",
                    below.size
                )));
            }
            _ => {}
        }
        let common = Common::new(common, &*child)?;
        Ok(RawNode { name, child, offset, size, common })
    }
}

impl BlockNode for RawNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let below = self.child.geometry();
        let size = self.size.unwrap_or_else(|| {
            let room = below.size.saturating_sub(self.offset);
            room - room % SECTOR
        });
        Geometry { size, ..self.common.geometry(below) }
    }

    fn below(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        let event_loop = event_loop.clone();
        Box::pin(async move {
            ResizeError::check(size, self.geometry().read_only)?;
            match size.checked_add(self.offset).filter(|&end| i64::try_from(end).is_ok()) {
                _ if self.size.is_some() => Err(ResizeError::FixedSize),
                Some(end) => self.child.clone().resize(end, &event_loop).await,
                None => Err(ResizeError::Offset),
            }
        })
    }

    fn let_grow(&self) {
        // A part of the node below stays the part that it is.
        if self.offset == 0 && self.size.is_none() {
            self.child.let_grow();
        }
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.child.geometry();
        let child = self.child.clone().open_channel(event_loop)?;
        // Where this node changes nothing it does not exist for the data plane. The channel keeps
        // the child; whoever uses the channel keeps this node.
        if self.offset == 0 && self.size.is_none() && self.common.changes_nothing(below) {
            return Ok(child);
        }
        Ok(Rc::new(RawChannel { node: self, child }))
    }
}

struct RawChannel {
    node: Arc<RawNode>,
    child: Rc<dyn Channel>,
}

impl Channel for RawChannel {
    fn submit(&self, request: Request) {
        let node = &*self.node;
        // Without a size of its own the node ends where the child does, which is the child's to check.
        let size = node.size.unwrap_or(u64::MAX - node.offset);
        match request.offset.checked_add(request.len) {
            Some(end) if end <= size => {}
            _ => return request.complete(Err(Errno::EIO)),
        }
        let Some(mut request) = node.common.admit(request) else { return };
        if request.op != Op::Flush {
            request.offset += node.offset;
        }
        self.child.submit(request);
    }

    fn in_flight(&self) -> usize {
        self.child.in_flight()
    }

    fn drain_begin(&self) {
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.child.drain_end();
    }
}
