//! Block nodes: an opened image, seen by the control plane, and its channel, seen by one loop.

use std::future::{Future, ready};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use ::options::Object;
use event_loop::sync::lock;
use event_loop::{EventLoop, mailbox};
use nix::errno::Errno;

pub use crate::resize::ResizeError;

use crate::error::OpenError;
use crate::format::Format;
use crate::inherited::OpenImage;
use crate::request::Request;
use crate::track::BitmapStore;

/// An opened image, shared by all threads.
///
/// The data plane does not go through it: each loop opens a [`Channel`] of its own once, and
/// requests go down channels without locks.
pub trait BlockNode: Send + Sync {
    /// `node-name`.
    fn name(&self) -> &str;

    /// What users of the node have to know, now: it may change; see [`watch`](Self::watch).
    fn geometry(&self) -> Geometry;

    /// The node that this one is on top of, if it has that one answer what it does not answer itself:
    /// what follows here.
    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        None
    }

    /// Bytes of the file now, however long it was when it was opened: from there on nothing was ever written, and it
    /// reads as zeroes. `None`: nobody knows.
    fn end(&self) -> Option<u64> {
        self.child()?.end()
    }

    /// From here on, requests may lie past the end: writes there make the image longer, reads give
    /// zeroes. For a format on top of the node, which finds room in it as it needs. A node that cannot
    /// become longer goes on answering with `EIO`. Channels are opened afterwards.
    fn enable_growth(&self) {
        if let Some(below) = self.child() {
            below.enable_growth();
        }
    }

    /// The journal of what this node has answered and not written, if it has one: who goes on with the image has to
    /// have its descriptor.
    fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        None
    }

    /// Another process is about to open what this node has open, which is at rest, with its [`journal`](Self::journal):
    /// from now on, all that it has to find is where it finds it. That begins with the call. If it comes to nothing, the
    /// node goes on; so it does when nobody waits any more for a disk that does not answer, however late it does.
    ///
    /// # Errors
    ///
    /// Those of a write to the image; or it is being let go since an earlier call.
    fn release_for_handover(self: Arc<Self>) -> Released {
        Box::pin(ready(Ok(())))
    }

    /// Of a regular file: its inode, which tells it from a copy.
    fn inode(&self) -> Option<u64> {
        self.child().and_then(|below| below.inode())
    }

    /// Returns the format whose signature the node's file or block device has.
    ///
    /// Only if this node passes the bytes on unchanged. Reads from the disk.
    fn foreign_format(&self) -> Option<Format> {
        self.child().and_then(|below| below.foreign_format())
    }

    /// Returns why a node that fell back to reading (`auto-read-only`) cannot be written.
    fn why_read_only(&self) -> Option<OpenError> {
        self.child().and_then(|below| below.why_read_only())
    }

    /// To what the memory of requests is best aligned, bytes: less costs a copy.
    fn memory_alignment(&self) -> u32 {
        self.child().map_or(512, |below| below.memory_alignment())
    }

    /// Has somebody told from now on whenever the geometry has changed. For nodes that may change.
    fn watch(&self, watcher: Watcher) {
        if let Some(below) = self.child() {
            below.watch(watcher);
        }
    }

    /// Makes the image `size` bytes long, as `block_resize` asks for it, and tells those who watch.
    /// For the control plane, which has drained the node if it is to become shorter: a write under way
    /// beyond the new end would make it longer again. What there is to be done goes on on the loop
    /// that awaits it, which is given.
    ///
    /// # Errors
    ///
    /// In QEMU's words where QEMU has the error; the image is as it was.
    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        match (ResizeError::check(size, self.geometry().read_only), self.child()) {
            (Ok(()), Some(below)) => below.resize(size, event_loop),
            (checked, _) => Box::pin(async move { checked.and(Err(ResizeError::NotSupported)) }),
        }
    }

    /// Returns what an image format knows of its image.
    fn details(&self) -> Option<ImageDetails> {
        None
    }

    /// Returns the dirty bitmaps in the image, if its format has room for bitmaps.
    fn bitmap_store(&self) -> Option<Arc<dyn BitmapStore>> {
        None
    }

    /// Has the image name another backing file, or none. The node goes on reading where it has read. On stable storage
    /// when the future completes; a kill leaves the one name or the other.
    ///
    /// # Errors
    ///
    /// `ENOTSUP`: the node has no such name. `EROFS`: the node was opened for reading. `EFBIG`: the name is too long.
    fn set_backing_name(
        self: Arc<Self>,
        _name: Option<BackingName>,
        _event_loop: &EventLoop,
    ) -> Renaming {
        Box::pin(ready(Err(Errno::ENOTSUP)))
    }

    /// Returns what the node's disk was at one moment, as a node, if this node keeps that.
    fn snapshot(&self) -> Option<Arc<dyn BlockNode>> {
        None
    }

    /// Opens this loop's way to the image. Fails when the loop lacks what the node needs, such as
    /// `aio=io_uring` on a loop without io_uring.
    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>>;
}

/// What comes of a [`resize`](BlockNode::resize).
pub type Resized = Pin<Box<dyn Future<Output = Result<(), ResizeError>>>>;

/// What an image format knows of its image.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageDetails {
    /// Bytes of a cluster, if the format has clusters.
    pub cluster_size: Option<u64>,
    /// Whether the image is encrypted.
    pub encrypted: bool,
    /// The backing file that the image names.
    pub backing: Option<BackingName>,
    /// `format-specific` of QMP's `ImageInfo`.
    pub specific: Object,
}

/// A backing file as an image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingName {
    /// Its path, as a rule relative to the image's.
    pub filename: String,
    /// Its format, if it is told.
    pub format: Option<String>,
}

/// What comes of [`set_backing_name`](BlockNode::set_backing_name).
pub type Renaming = Pin<Box<dyn Future<Output = Result<(), Errno>>>>;

/// What comes of a [`release_for_handover`](BlockNode::release_for_handover).
pub type Released = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// One loop's way to an image.
pub trait Channel {
    /// Takes the request. It is answered exactly once, on this loop, maybe before this returns.
    ///
    /// The caller has checked range and direction against [`Geometry`]; what lies beyond the end
    /// is answered with `EIO` all the same.
    fn submit(&self, request: Request);

    /// The channel for a queue of an export that opened this one. `None`: this one.
    fn for_queue(&self) -> Option<Rc<dyn Channel>> {
        None
    }

    /// How many requests of this channel are not answered yet, wherever they are: 0 says that nothing
    /// that came before touches the image any more. Asked only while the graph changes, so a node
    /// keeps no count for it that it does not have anyway.
    fn in_flight(&self) -> usize;

    /// Somebody waits for all requests to end: those that are held back for the sake of a limit go on
    /// at once, and none is from now on, until as many calls of [`drain_end`](Self::drain_end).
    fn drain_begin(&self) {}

    /// See [`drain_begin`](Self::drain_begin).
    fn drain_end(&self) {}

    /// Of the requests submitted here, those under tags that `is_abandoned` only have to end. What is
    /// held until an operator lets it go on is answered with [`GIVEN_UP`](crate::policy::GIVEN_UP), and
    /// what is under way is not held any more if it fails. All others are left as they are. For the
    /// channel [of a queue](Self::for_queue).
    fn abandon(&self, _is_abandoned: &dyn Fn(u32) -> bool) {}
}

/// Who is told when a node's geometry has changed. Dropped by the node once the other end is gone.
#[derive(Clone)]
pub struct Watcher(Arc<mailbox::Sender<()>>);

/// Where changes of the geometry of one or more nodes are told.
pub struct Changes(mailbox::Receiver<()>);

impl Watcher {
    /// A watcher, and where it tells of changes.
    pub fn new() -> (Watcher, Changes) {
        let (sender, receiver) = mailbox::channel();
        (Watcher(Arc::new(sender)), Changes(receiver))
    }
}

impl Changes {
    /// Waits for the next change; `None`: all nodes are gone.
    pub async fn next(&mut self) -> Option<()> {
        self.0.receive().await
    }
}

/// Those who watch a node.
#[derive(Default)]
pub struct Watchers(Mutex<Vec<Watcher>>);

impl Watchers {
    /// One more.
    pub fn add(&self, watcher: Watcher) {
        let mut watchers = lock(&self.0);
        if !watchers.iter().any(|other| Arc::ptr_eq(&other.0, &watcher.0)) {
            watchers.push(watcher);
        }
    }

    /// All there are.
    pub(crate) fn all(&self) -> Vec<Watcher> {
        lock(&self.0).clone()
    }

    /// Tells all.
    pub fn tell(&self) {
        lock(&self.0).retain(|watcher| watcher.0.send(()).is_ok());
    }
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
