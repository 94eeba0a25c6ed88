//! Block nodes: an opened image, seen by the control plane, and its channel, seen by one loop.

mod answers;
mod held;
mod image;
mod remote;
mod snapshots;
mod storage;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use event_loop::{EventLoop, mailbox};

pub use self::held::{HeldState, Released};
pub use self::image::{
    BackingName, FormattedImage, ImageDetails, ImageHeader, Placing, Renaming, StoredAt,
    cluster_size, listed,
};
pub use self::remote::{NoWaiting, RemoteImage};
pub use self::snapshots::{
    ChangingSnapshots, InternalSnapshot, InternalSnapshots, SnapshotChange, SnapshotError,
};
pub(crate) use self::storage::OtherBytes;
pub use self::storage::{GrowingFile, HostStorage};
pub use crate::resize::ResizeError;

use crate::request::Request;

/// An opened image, shared by all threads.
///
/// The data plane bypasses the node: each loop opens its own [`Channel`] once, and requests use
/// channels without locks.
pub trait BlockNode: Send + Sync {
    /// Returns the node's `node-name`.
    fn name(&self) -> &str;

    /// Returns the name of the node that users know here: below edges, and below filters of jobs.
    fn known_name(&self) -> String {
        self.name().to_owned()
    }

    /// Returns the current size and limits of the node.
    ///
    /// For changes see [`watch`](Self::watch).
    fn geometry(&self) -> Geometry;

    /// Returns the node below that carries out what this node does not implement.
    ///
    /// The default methods of this trait use it.
    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        None
    }

    /// Returns the current length of the file, in bytes; `None` if unknown.
    ///
    /// The length may differ from that at opening. Beyond it nothing was ever written, so it reads as zeroes.
    fn end(&self) -> Option<u64> {
        self.child()?.end()
    }

    /// Permits requests beyond the end.
    ///
    /// Writes there make the image longer, reads return zeroes. A format on top of the node calls this to allocate
    /// clusters. Call it before channels are opened. A node that cannot grow continues to answer such requests with
    /// [an error](crate::request::Op::beyond_end).
    fn enable_growth(&self) {
        if let Some(below) = self.child() {
            below.enable_growth();
        }
    }

    /// Registers a watcher for changes of the geometry.
    ///
    /// A node with a constant geometry need not do anything.
    fn watch(&self, watcher: Watcher) {
        if let Some(below) = self.child() {
            below.watch(watcher);
        }
    }

    /// Resizes the image to `size` bytes for `block_resize`, and notifies the watchers.
    ///
    /// The control plane drains the node before it shrinks: a write in flight beyond the new end would extend
    /// the image again. The work runs on `event_loop`, which also awaits the future.
    ///
    /// # Errors
    ///
    /// In QEMU's words where QEMU has the error. The image is unchanged then.
    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        match (ResizeError::check(size, self.geometry().read_only), self.child()) {
            (Ok(()), Some(below)) => below.resize(size, event_loop),
            (checked, _) => Box::pin(async move { checked.and(Err(ResizeError::NotSupported)) }),
        }
    }

    /// Returns the file or device below, as long as it is at present, if this node knows.
    fn growing_file(self: Arc<Self>) -> Option<Arc<dyn GrowingFile>> {
        None
    }

    /// Returns the storage of this host that has the node's bytes, if there is one.
    fn host_storage(self: Arc<Self>) -> Option<Arc<dyn HostStorage>> {
        self.child()?.host_storage()
    }

    /// Returns the image on a server that has the node's bytes, if there is one.
    fn remote_image(self: Arc<Self>) -> Option<Arc<dyn RemoteImage>> {
        self.child()?.remote_image()
    }

    /// Returns the image of the node's format, if the node opens one.
    ///
    /// A filter has none.
    fn image(self: Arc<Self>) -> Option<Arc<dyn FormattedImage>> {
        None
    }

    /// Returns the internal snapshots of the node's image, if its format has such.
    ///
    /// A node without an image has those of the node below.
    fn internal_snapshots(self: Arc<Self>) -> Option<Arc<dyn InternalSnapshots>> {
        self.child()?.internal_snapshots()
    }

    /// Returns what this node itself keeps in memory of its image, and has to hand over.
    fn held_state(self: Arc<Self>) -> Option<Arc<dyn HeldState>> {
        None
    }

    /// Returns whether the node stores writes compressed, if they are to be.
    fn compresses(&self) -> bool {
        false
    }

    /// Returns the node's disk as it was at one moment, if this node keeps that.
    fn snapshot(&self) -> Option<Arc<dyn BlockNode>> {
        None
    }

    /// Returns whether discards pass to what the node keeps, although the node is for reading.
    fn can_forget(&self) -> bool {
        false
    }

    /// Opens this loop's way to the image.
    ///
    /// # Errors
    ///
    /// The loop lacks what the node needs, such as io_uring for `aio=io_uring`.
    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>>;
}

/// Completes with the result of [`resize`](BlockNode::resize).
pub type Resized = Pin<Box<dyn Future<Output = Result<(), ResizeError>>>>;

/// One loop's way to an image.
pub trait Channel {
    /// Takes the request.
    ///
    /// It is answered exactly once, on this loop, maybe before this returns.
    ///
    /// The caller has checked range and direction against [`Geometry`]; what lies beyond the end
    /// is answered with [an error](crate::request::Op::beyond_end) all the same.
    fn submit(&self, request: Request);

    /// Returns the channel for a queue of an export. `None`: this one.
    fn for_queue(&self) -> Option<Rc<dyn Channel>> {
        None
    }

    /// Returns the number of unanswered requests of this channel.
    ///
    /// At 0, no earlier request touches the image any more. Called only while the graph changes, so a node
    /// needs no extra counter for it.
    fn in_flight(&self) -> usize;

    /// Begins a drain: requests that a limit delays are submitted at once.
    ///
    /// No request is delayed until [`drain_end`](Self::drain_end). Calls nest.
    fn drain_begin(&self) {}

    /// Ends one drain that [`drain_begin`](Self::drain_begin) began.
    fn drain_end(&self) {}

    /// Ends abandoned requests of this channel soon, whatever their result.
    ///
    /// A request with an `is_abandoned` tag that waits for an operator is
    /// [given up](crate::request::RequestOwner::given_up). One in flight is not held if it fails. All other requests are
    /// left as they are. For the channel [of a queue](Self::for_queue).
    fn abandon(&self, _is_abandoned: &dyn Fn(u32) -> bool) {}
}

/// Sends a notification when a node's geometry has changed.
///
/// The node drops it once the receiver is gone.
#[derive(Clone)]
pub struct Watcher(Arc<mailbox::Sender<()>>);

/// Receives the changes of the geometry of one or more nodes.
pub struct Changes(mailbox::Receiver<()>);

impl Watcher {
    /// Returns a watcher and the receiver of its notifications.
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

/// The watchers of a node.
#[derive(Default)]
pub struct Watchers(Mutex<Vec<Watcher>>);

impl Watchers {
    /// Adds a watcher, unless it is registered already.
    pub fn add(&self, watcher: Watcher) {
        let mut watchers = lock(&self.0);
        if !watchers.iter().any(|other| Arc::ptr_eq(&other.0, &watcher.0)) {
            watchers.push(watcher);
        }
    }

    /// Returns all watchers.
    pub(crate) fn all(&self) -> Vec<Watcher> {
        lock(&self.0).clone()
    }

    /// Notifies all watchers, and removes those whose receiver is gone.
    pub fn tell(&self) {
        lock(&self.0).retain(|watcher| watcher.0.send(()).is_ok());
    }
}

/// Size and limits of a node. All numbers in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the disk in bytes: a multiple of 512 (an image's tail is rounded up and reads as zeroes).
    pub size: u64,
    /// No write, discard or write-zeroes passes.
    pub read_only: bool,
    /// Requests are fastest in multiples of this, in bytes: the physical block.
    pub physical_block_size: u32,
    /// Offsets and lengths should be multiples of this, in bytes. Otherwise the node reads, modifies and writes.
    pub request_alignment: u32,
    /// Whether discards give space back.
    pub discard: bool,
    /// Discards have an effect in multiples of this, in bytes.
    pub discard_granularity: u32,
    /// Whether write-zeroes does better than writing zeroes.
    pub write_zeroes: bool,
    /// Whether a flush is needed before written data is on stable storage.
    pub write_cache: bool,
}
