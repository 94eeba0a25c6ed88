//! `raw`: a part of, or all of, another node, seen as a disk.

mod driver;
pub(crate) mod options;

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_loop::{AlignedBuf, EventLoop, IoBufs};
use nix::errno::Errno;

use crate::drivers::common::Common;
use crate::error::OpenError;
use crate::format::{Format, LOOKED_AT};
use crate::node::{
    BlockNode, Channel, Geometry, GrowingFile, HostStorage, OtherBytes, ResizeError, Resized,
};
use crate::options::{BlockdevOptions, RawOptions};
use crate::request::{Op, Request};

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

/// Bytes of a qcow2 signature: magic and version.
const SIGNATURE: u64 = 8;
/// Bytes that are copied for the check. A whole block of any disk, which leaves the rest aligned as
/// before.
const COPIED: usize = 4096;
const _: () = assert!(COPIED >= LOOKED_AT);

/// A range of another node.
pub(crate) struct RawNode {
    name: String,
    child: Arc<dyn BlockNode>,
    offset: u64,
    /// `None`: up to the end of the child, wherever that is.
    size: Option<u64>,
    /// See [`RawOptions::keep_raw`].
    keep_raw: bool,
    /// A refused write was logged.
    told: AtomicBool,
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
        let RawOptions { offset, size, keep_raw, .. } = *options;
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
        let common = Common::new(common, &*child);
        let told = AtomicBool::new(false);
        Ok(RawNode { name, child, offset, size, keep_raw, told, common })
    }
}

impl RawNode {
    /// The format by the signature at the beginning of the disk. Reads from the disk.
    fn foreign_format(&self) -> Option<Format> {
        let storage = self.child.clone().host_storage().filter(|_| self.offset == 0);
        storage?.foreign_format()
    }

    /// Logs the first refused write only: the guest decides how many follow.
    #[cold]
    fn tell_refused(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            log::warn!(
                "node '{}': a write to the first sector was refused: it would make a qcow2 image of a raw disk \
                 (Operation not permitted); with --format raw such writes are allowed",
                self.name
            );
        }
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

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn end(&self) -> Option<u64> {
        self.child.end().map(|end| end.saturating_sub(self.offset))
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

    fn enable_growth(&self) {
        // A part of the node below stays the part that it is.
        if self.offset == 0 && self.size.is_none() {
            self.child.enable_growth();
        }
    }

    fn growing_file(self: Arc<Self>) -> Option<Arc<dyn GrowingFile>> {
        Some(self)
    }

    fn host_storage(self: Arc<Self>) -> Option<Arc<dyn HostStorage>> {
        let storage = self.child.clone().host_storage()?;
        Some(match self.offset {
            0 => storage,
            _ => Arc::new(OtherBytes(storage)),
        })
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.child.geometry();
        let child = self.child.clone().open_channel(event_loop)?;
        // Where this node changes nothing it does not exist for the data plane. The channel keeps
        // the child; a channel's user keeps this node.
        let is_whole = self.offset == 0 && self.size.is_none();
        if is_whole && !self.keep_raw && self.common.changes_nothing(below) {
            return Ok(child);
        }
        Ok(Rc::new(RawChannel { node: self, child }))
    }
}

impl GrowingFile for RawNode {
    fn length(&self) -> u64 {
        let size = self.size.unwrap_or_else(|| self.child.length().saturating_sub(self.offset));
        size - size % SECTOR
    }

    fn highest_write(&self) -> u64 {
        self.child.highest_write().saturating_sub(self.offset)
    }
}

struct RawChannel {
    node: Arc<RawNode>,
    child: Rc<dyn Channel>,
}

impl Channel for RawChannel {
    fn submit(&self, request: Request) {
        let node = &*self.node;
        // Without the option `size` the node ends where the child ends, and the child checks the range.
        let size = node.size.unwrap_or(u64::MAX - node.offset);
        match request.offset.checked_add(request.len) {
            Some(end) if end <= size => {}
            _ => {
                let errno = request.op.beyond_end();
                return request.complete(Err(errno));
            }
        }
        let Some(mut request) = node.common.admit(request) else { return };
        if node.keep_raw && request.offset < SIGNATURE {
            match keep_raw(request) {
                Ok(kept) => request = kept,
                Err((refused, errno)) => {
                    node.tell_refused();
                    return refused.complete(Err(errno));
                }
            }
        }
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

/// Returns the request, unless the request writes a qcow2 signature. Copies the first block before the check,
/// since guests may change their memory between check and write.
#[cold]
fn keep_raw(mut request: Request) -> Result<Request, (Request, Errno)> {
    let Op::Write { .. } = request.op else { return Ok(request) };
    if request.offset > 0 || request.len < SIGNATURE {
        // The write covers a part of the signature only. Guests write whole sectors.
        return Err((request, Errno::EPERM));
    }
    let mut start = [0; COPIED];
    let start_len = request.bufs.copy_out(0, &mut start);
    let start = &start[..start_len];
    if Format::probe(start, &[]) == Some(Format::Qcow2) {
        return Err((request, Errno::EPERM));
    }
    let Some(mut bufs) = AlignedBuf::io_bufs(start.len(), COPIED) else {
        return Err((request, Errno::ENOMEM));
    };
    bufs.copy_in(0, start);
    let mut rest = IoBufs::new();
    rest.set_part(&request.bufs, start.len(), usize::MAX, usize::MAX);
    bufs.append(&rest);
    request.bufs = bufs;
    Ok(request)
}
