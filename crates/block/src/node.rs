//! Block nodes: an opened image, seen by the control plane, and its channel, seen by one loop.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

use crate::request::Request;

/// An opened image, shared by all threads.
///
/// The data plane does not go through it: each loop opens a [`Channel`] of its own once, and
/// requests go down channels without locks.
pub trait BlockNode: Send + Sync {
    /// `node-name`.
    fn name(&self) -> &str;

    /// What users of the node have to know.
    fn geometry(&self) -> Geometry;

    /// From here on, requests may lie past the end: writes there make the image longer, reads give
    /// zeroes. For a format on top of the node, which finds room in it as it needs. A node that cannot
    /// become longer goes on answering with `EIO`. Channels are opened afterwards.
    fn let_grow(&self) {}

    /// Opens this loop's way to the image. Fails when the loop lacks what the node needs, such as
    /// `aio=io_uring` on a loop without io_uring.
    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>>;
}

/// One loop's way to an image.
pub trait Channel {
    /// Takes the request. It is answered exactly once, on this loop, maybe before this returns.
    ///
    /// The caller has checked range and direction against [`Geometry`]; what lies beyond the end
    /// is answered with `EIO` all the same.
    fn submit(&self, request: Request);

    /// How many requests of this channel are not answered yet, wherever they are: 0 says that nothing
    /// that came before touches the image any more. Asked only while the graph changes, so a node
    /// keeps no count for it that it does not have anyway.
    fn in_flight(&self) -> usize;
}

/// Size and limits of a node. All numbers in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the disk: a multiple of 512 (an image's tail is rounded up and reads as zeroes).
    pub size: u64,
    /// No write, discard or write-zeroes passes.
    pub read_only: bool,
    /// Requests are fastest in multiples of this: the physical block.
    pub physical_block_size: u32,
    /// Offsets and lengths must be multiples of this, else the node reads, modifies and writes.
    pub request_alignment: u32,
    /// Whether discards give space back.
    pub discard: bool,
    /// Discards are useful in multiples of this.
    pub discard_granularity: u32,
    /// Whether write-zeroes does better than writing zeroes.
    pub write_zeroes: bool,
    /// Whether a flush is needed before written data is on stable storage.
    pub write_cache: bool,
}
