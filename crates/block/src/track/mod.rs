//! A node whose writes are watched: by a write threshold, by dirty bitmaps.
//!
//! A node that nothing watches has no `Tracked` above it, and costs nothing.

mod bitmap;
mod channel;
mod kept;
mod store;
mod threshold;

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use event_loop::EventLoop;
use event_loop::sync::lock;

use self::bitmap::Bitmaps;
pub(crate) use self::bitmap::without;
pub use self::bitmap::{DirtyBitmap, Storage};
use self::channel::TrackedChannel;
pub(crate) use self::kept::{Described, KeptBits, Owner};
pub use self::store::{BitmapStore, Checked, Forgotten};
pub(crate) use self::threshold::ThresholdSender;
pub use self::threshold::{Exceeded, Threshold};
use crate::node::{BlockNode, Channel, FormattedImage, Geometry, GrowingFile, HeldState};

/// Trackers of a node's writes, for all threads.
pub struct Tracking {
    /// The write threshold.
    pub threshold: Threshold,
    /// All bitmaps, also those that do not record.
    bitmaps: Mutex<Vec<Arc<DirtyBitmap>>>,
    /// Changes with each change of the list, which a channel then reads anew.
    generation: AtomicU64,
    /// The image that stores bitmaps.
    store: Mutex<Option<Weak<dyn BitmapStore>>>,
}

impl Tracking {
    /// Of the node of that name. Exceeded thresholds are reported to `reports`.
    pub(crate) fn new(name: &str, reports: Option<ThresholdSender>) -> Tracking {
        Tracking {
            threshold: Threshold::new(name, reports),
            bitmaps: Mutex::default(),
            generation: AtomicU64::new(0),
            store: Mutex::default(),
        }
    }

    /// Has an image store the bitmaps, and keep them for the case of a kill. `before`: an image that did so until now.
    pub(crate) fn keep_in(
        self: &Arc<Self>,
        store: &Arc<dyn BitmapStore>,
        before: Option<&dyn BitmapStore>,
    ) {
        *lock(&self.store) = Some(Arc::downgrade(store));
        store.keep(self.clone());
        before.into_iter().for_each(|before| store.take_kept(before));
        self.begin_keeping();
    }

    fn store(&self) -> Option<Arc<dyn BitmapStore>> {
        lock(&self.store).as_ref()?.upgrade()
    }

    /// Has the persistent bitmaps of a node survive a kill from now on, if they can. A failure is logged.
    pub fn secure(&self, node: &str, event_loop: &EventLoop) -> impl Future<Output = ()> + use<> {
        let secured = self.store().map(|store| store.secure(event_loop));
        let node = node.to_owned();
        async move {
            if let Some(secured) = secured
                && let Err(errno) = secured.await
            {
                let why = errno.desc();
                log::warn!("node '{node}': a kill may leave its dirty bitmaps inconsistent: {why}");
            }
        }
    }

    /// The next process has the bits of all bitmaps after a kill, if they can survive one. No write is under way.
    pub(crate) fn begin_keeping(&self) {
        lock(&self.bitmaps).iter().for_each(|bitmap| bitmap.begin_keeping());
    }

    /// Notes a change of the disk that no request makes.
    pub(crate) fn note(&self, offset: u64, len: u64) {
        bitmap::note(&self.list(), offset, len);
    }

    /// Returns the bitmap of that name.
    pub fn bitmap(&self, name: &str) -> Option<Arc<DirtyBitmap>> {
        lock(&self.bitmaps).iter().find(|bitmap| bitmap.name() == name).cloned()
    }

    /// Returns all bitmaps, the newest first.
    pub fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>> {
        lock(&self.bitmaps).iter().rev().cloned().collect()
    }

    /// Adds a bitmap. Writes that begin from now on set its bits.
    pub fn add_bitmap(&self, bitmap: Arc<DirtyBitmap>) {
        lock(&self.bitmaps).push(bitmap.clone());
        self.generation.fetch_add(1, Ordering::Release);
        bitmap.begin_keeping();
    }

    /// Replaces all bitmaps.
    pub fn set_bitmaps(&self, bitmaps: Vec<Arc<DirtyBitmap>>) {
        let mut own = lock(&self.bitmaps);
        own.iter().for_each(|bitmap| bitmap.give_up_keeping());
        *own = bitmaps;
        drop(own);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Resizes all bitmaps to a node of `size` bytes. No write is under way.
    pub fn resize_bitmaps(&self, size: u64) {
        let store = self.store();
        let mut bitmaps = lock(&self.bitmaps);
        for bitmap in bitmaps.iter_mut().filter(|bitmap| bitmap.bits().size() != size) {
            *bitmap = Arc::new(bitmap.resized(size, store.as_deref()));
        }
        drop(bitmaps);
        self.generation.fetch_add(1, Ordering::Release);
        self.begin_keeping();
    }

    /// The bitmaps that are in the image, or are to be, the oldest first.
    pub(crate) fn stored(&self) -> Vec<Arc<DirtyBitmap>> {
        let bitmaps = lock(&self.bitmaps);
        bitmaps.iter().filter(|bitmap| bitmap.storage() != Storage::Memory).cloned().collect()
    }

    /// The bitmaps that are in no image, the oldest first.
    pub(crate) fn in_memory(&self) -> Vec<Arc<DirtyBitmap>> {
        let bitmaps = lock(&self.bitmaps);
        bitmaps.iter().filter(|bitmap| bitmap.storage() == Storage::Memory).cloned().collect()
    }

    /// Forgets the bitmaps that are in the image, which is closed, and has those of the image that took its place.
    pub(crate) fn set_stored(&self, stored: Vec<Arc<DirtyBitmap>>) {
        {
            let mut bitmaps = lock(&self.bitmaps);
            bitmap::without(&bitmaps, &stored).for_each(|gone| gone.give_up_keeping());
            bitmaps.retain(|bitmap| bitmap.storage() == Storage::Memory);
            bitmaps.extend(stored.iter().cloned());
        }
        self.generation.fetch_add(1, Ordering::Release);
        stored.iter().for_each(|bitmap| bitmap.begin_keeping());
    }

    /// [Settles](DirtyBitmap::settle) all bitmaps.
    pub fn settle_bitmaps(&self) {
        lock(&self.bitmaps).iter().for_each(|bitmap| bitmap.settle());
    }

    /// Forgets a bitmap. Returns its place in the list, from 0.
    pub fn remove_bitmap(&self, name: &str) -> usize {
        let mut bitmaps = lock(&self.bitmaps);
        let place = bitmaps.iter().position(|bitmap| bitmap.name() == name);
        let place = place.inspect(|place| bitmaps.remove(*place).lend_keeping());
        let place = place.unwrap_or(bitmaps.len());
        drop(bitmaps);
        self.generation.fetch_add(1, Ordering::Release);
        place
    }

    /// Puts a bitmap back at the place that it had. Nothing was written meanwhile.
    pub fn restore_bitmap(&self, place: usize, bitmap: Arc<DirtyBitmap>) {
        let mut bitmaps = lock(&self.bitmaps);
        let place = place.min(bitmaps.len());
        bitmaps.insert(place, bitmap.clone());
        drop(bitmaps);
        self.generation.fetch_add(1, Ordering::Release);
        bitmap.begin_keeping();
    }

    fn list(&self) -> Bitmaps {
        lock(&self.bitmaps).iter().cloned().collect()
    }
}

/// A node, with what watches its writes.
pub(crate) struct Tracked {
    node: Arc<dyn BlockNode>,
    tracking: Arc<Tracking>,
}

impl Tracked {
    pub(crate) fn new(node: Arc<dyn BlockNode>, tracking: Arc<Tracking>) -> Tracked {
        Tracked { node, tracking }
    }
}

impl BlockNode for Tracked {
    fn name(&self) -> &str {
        self.node.name()
    }

    fn geometry(&self) -> Geometry {
        self.node.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.node.clone())
    }

    fn growing_file(self: Arc<Self>) -> Option<Arc<dyn GrowingFile>> {
        self.node.clone().growing_file()
    }

    fn image(self: Arc<Self>) -> Option<Arc<dyn FormattedImage>> {
        self.node.clone().image()
    }

    fn held_state(self: Arc<Self>) -> Option<Arc<dyn HeldState>> {
        self.node.clone().held_state()
    }

    fn compresses(&self) -> bool {
        self.node.compresses()
    }

    fn snapshot(&self) -> Option<Arc<dyn BlockNode>> {
        self.node.snapshot()
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let node = self.node.clone().open_channel(event_loop)?;
        let discards = self.node.geometry().discard;
        Ok(Rc::new(TrackedChannel::new(node, self.tracking.clone(), discards)))
    }
}
