//! `raw`: a part of, or all of, another node, seen as a disk.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;
use nix::errno::Errno;

use super::detect_zeroes::detect_zeroes;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry};
use crate::options::{BlockdevOptions, DetectZeroes, Discard, RawOptions};
use crate::request::{Op, Request};

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

/// A range of another node.
pub(crate) struct RawNode {
    name: String,
    child: Arc<dyn BlockNode>,
    offset: u64,
    geometry: Geometry,
    discard: Discard,
    detect_zeroes: DetectZeroes,
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
        let size = match size {
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
            Some(size) => size,
            None => room - room % SECTOR,
        };
        if below.read_only && !common.read_only && !common.auto_read_only {
            return Err(OpenError::new(format!("Block node '{}' is read-only", child.name()))
                .with_hint("read-only=on opens the node on top of it"));
        }
        let read_only = below.read_only || common.read_only;
        let geometry = Geometry {
            size,
            read_only,
            discard: below.discard && common.discard == Discard::Unmap && !read_only,
            write_zeroes: below.write_zeroes && !read_only,
            write_cache: below.write_cache && !read_only,
            ..below
        };
        Ok(RawNode {
            name,
            child,
            offset,
            geometry,
            discard: common.discard,
            detect_zeroes: common.detect_zeroes,
        })
    }
}

impl BlockNode for RawNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn let_grow(&self) {
        // A part of the node below stays the part that it is.
        if self.offset == 0 && self.geometry.size == self.child.geometry().size {
            self.child.let_grow();
        }
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.child.geometry();
        let child = self.child.clone().open_channel(event_loop)?;
        // Where this node changes nothing it does not exist for the data plane. The channel keeps
        // the child; whoever uses the channel keeps this node.
        if self.offset == 0 && self.geometry == below && self.detect_zeroes == DetectZeroes::Off {
            return Ok(child);
        }
        Ok(Rc::new(RawChannel { node: self, child }))
    }
}

struct RawChannel {
    node: Arc<RawNode>,
    child: Rc<dyn Channel>,
}

impl RawChannel {
    fn check(&self, request: &Request) -> Result<(), Errno> {
        let Geometry { size, read_only, .. } = self.node.geometry;
        if read_only && !request.op.only_reads() {
            return Err(Errno::EROFS);
        }
        match request.offset.checked_add(request.len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Errno::EIO),
        }
    }
}

impl Channel for RawChannel {
    fn submit(&self, mut request: Request) {
        let node = &*self.node;
        if let Err(errno) = self.check(&request) {
            return request.complete(Err(errno));
        }
        if node.detect_zeroes != DetectZeroes::Off {
            detect_zeroes(node.detect_zeroes, &mut request);
        }
        match &mut request.op {
            Op::Discard if node.discard == Discard::Ignore => return request.complete(Ok(())),
            Op::WriteZeroes { may_unmap, .. } if node.discard == Discard::Ignore => {
                *may_unmap = false;
            }
            _ => {}
        }
        if request.op != Op::Flush {
            // In range, so the sum is at most the child's size.
            request.offset += node.offset;
        }
        self.child.submit(request);
    }

    fn in_flight(&self) -> usize {
        self.child.in_flight()
    }
}
