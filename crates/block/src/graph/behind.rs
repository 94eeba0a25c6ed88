//! The contents behind an image, for an image that was opened with another backing image.
//!
//! An image learns the size of its backing image when a loop opens the channel. A replacement has to keep
//! that size: [`Behind`] shows a shorter image, or none, followed by zeroes.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, IoBufs};
use nix::errno::Errno;

use crate::node::{BlockNode, Channel, Geometry};
use crate::request::{Op, Request};
use crate::status::{self, Extent, ExtentState};
use crate::submit::submit;

/// The contents of a shorter node, if any, followed by zeroes.
pub struct Behind {
    name: String,
    node: Option<Arc<dyn BlockNode>>,
    size: u64,
}

impl Behind {
    /// Creates a node of `size` bytes with the contents and the name of `node`.
    ///
    /// Without a node, all bytes are zeroes.
    pub fn new(node: Option<Arc<dyn BlockNode>>, size: u64) -> Behind {
        let name = node.as_ref().map(|node| node.name().to_owned()).unwrap_or_default();
        Behind { name, node, size }
    }
}

impl BlockNode for Behind {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let geometry = self.node.as_ref().map_or(NOTHING, |node| node.geometry());
        Geometry { size: self.size, read_only: true, ..geometry }
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        self.node.clone()
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let inner = match &self.node {
            Some(node) => {
                Some((node.clone().open_channel(event_loop)?, node.geometry().size.min(self.size)))
            }
            None => None,
        };
        Ok(Rc::new(BehindChannel {
            depth: if inner.is_some() { 1 } else { 0 },
            inner,
            size: self.size,
            event_loop: event_loop.clone(),
            splitting: Rc::default(),
        }))
    }
}

/// The geometry without an image.
const NOTHING: Geometry = Geometry {
    size: 0,
    read_only: true,
    physical_block_size: 512,
    request_alignment: 1,
    discard: false,
    discard_granularity: 0,
    write_zeroes: false,
    write_cache: false,
};

/// Segments of memory read at once.
const SEGMENTS: usize = 64;

struct BehindChannel {
    /// The channel of the image, and the image's size.
    inner: Option<(Rc<dyn Channel>, u64)>,
    size: u64,
    /// Depth of the zeroes.
    depth: u32,
    event_loop: EventLoop,
    /// Reads in flight that cross the end of the image.
    splitting: Rc<Cell<usize>>,
}

impl BehindChannel {
    fn zeroes(&self, mut request: Request) {
        match request.op {
            Op::Read => request.bufs.zero(0, request.bufs.len()),
            Op::BlockStatus => {
                let extent =
                    Extent { len: request.len, state: ExtentState::Hole, depth: self.depth };
                status::write_one(&mut request.bufs, extent);
            }
            Op::Flush | Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } => {}
        }
        request.complete(Ok(()));
    }
}

/// Reads the first `len` bytes of a request's range, and fills the rest with zeroes.
async fn read_start(
    inner: &Rc<dyn Channel>,
    request: &mut Request,
    len: usize,
) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let mut part = IoBufs::new();
        let bytes = part.set_part(&request.bufs, done, len - done, SEGMENTS);
        if bytes == 0 {
            return Err(Errno::EIO);
        }
        let offset = request.offset + done as u64;
        submit(inner, Op::Read, offset, bytes as u64, part).await.0?;
        done += bytes;
    }
    let rest = request.bufs.len() - len;
    request.bufs.zero(len, rest);
    Ok(())
}

impl Channel for BehindChannel {
    fn submit(&self, mut request: Request) {
        let end = request.offset.checked_add(request.len);
        if !request.op.only_reads() {
            return request.complete(Err(Errno::EROFS));
        }
        let Some(end) = end.filter(|end| *end <= self.size) else {
            return request.complete(Err(Errno::EIO));
        };
        match &self.inner {
            Some((inner, size)) if end <= *size || request.op == Op::Flush => inner.submit(request),
            Some((inner, size)) if request.offset < *size => match request.op {
                Op::Read => {
                    let (inner, len) = (inner.clone(), *size - request.offset);
                    let splitting = self.splitting.clone();
                    splitting.set(splitting.get() + 1);
                    self.event_loop.spawn(async move {
                        let read = read_start(&inner, &mut request, len as usize).await;
                        request.complete(read);
                        splitting.set(splitting.get() - 1);
                    });
                }
                // The answer may concern a part of the range.
                _ => {
                    request.len = *size - request.offset;
                    inner.submit(request);
                }
            },
            Some(_) | None => self.zeroes(request),
        }
    }

    fn in_flight(&self) -> usize {
        self.splitting.get() + self.inner.as_ref().map_or(0, |(inner, _)| inner.in_flight())
    }

    fn drain_begin(&self) {
        self.inner.iter().for_each(|(inner, _)| inner.drain_begin());
    }

    fn drain_end(&self) {
        self.inner.iter().for_each(|(inner, _)| inner.drain_end());
    }
}
