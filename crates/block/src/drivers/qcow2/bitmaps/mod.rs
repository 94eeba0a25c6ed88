//! Persistent dirty bitmaps of an image.
//!
//! An image that is opened for writing marks its bitmaps as in use, on stable storage before anything else
//! changes. A kill leaves them so: after the next open they are inconsistent, unless their bits are [kept]. Closing the
//! image stores them. The new bitmaps lie in clusters that nothing refers to, until one sector of the header leads to the
//! new directory.

mod directory;
mod kept;
mod load;
mod store;

use std::any::Any;
use std::collections::HashSet;
use std::future::ready;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::EventLoop;
use event_loop::sync::lock;
use nix::errno::Errno;

use self::directory::Entry;
pub(super) use self::directory::Extension;
pub(super) use self::kept::KeptBitmaps;
pub(super) use self::load::{Loaded, describe, list, load};
use super::context::Channels;
use super::image::{Image, errno_of};
use super::open::Below;
use super::steps::{ENTRY, read};
use crate::node::listed;
use crate::track::{
    BitmapStore, Checked, Described, DirtyBitmap, Forgotten, Storage, Tracking, without,
};

/// Why bitmaps of an image on a block device or a server are not kept.
pub(super) const NOT_IN_A_FILE: &str = "its image is not in a regular file";

/// What the file has.
#[derive(Debug, Default, Clone)]
pub(super) struct Directory {
    entries: Vec<Entry>,
    /// First byte and length. Without entries: `(0, 0)`.
    at: (u64, u64),
}

/// The bitmaps of an image.
pub(super) struct ImageBitmaps {
    node_name: String,
    below: Below,
    image: Arc<Image>,
    directory: Mutex<Directory>,
    /// Held by what changes the directory.
    changing: tokio::sync::Mutex<()>,
    /// Those of the image as it was opened, until others take their place.
    loaded: Mutex<Vec<Arc<DirtyBitmap>>>,
    /// Of an image that another process hands over: whether it is this process' alone. Before, nothing is written.
    owned: Option<Arc<AtomicBool>>,
    /// Has the bitmaps that are to be stored, instead of those above.
    tracking: Mutex<Option<Arc<Tracking>>>,
}

/// The names of bitmaps that stay in the file as they are.
fn inconsistent(bitmaps: &[Arc<DirtyBitmap>]) -> HashSet<&str> {
    let kept = bitmaps.iter().filter(|bitmap| bitmap.storage() == Storage::Inconsistent);
    kept.map(|bitmap| bitmap.name()).collect()
}

/// A bitmap in the file, as QMP tells of it.
pub(super) struct Told {
    pub(super) name: String,
    pub(super) granularity: u64,
    pub(super) flags: Vec<&'static str>,
}

/// The bitmaps of a directory, as far as descriptions list them, and the number of the others.
fn tell(entries: &[Entry]) -> (Vec<Told>, usize) {
    let listed = listed(entries.iter().map(|entry| &*entry.name));
    let tell = |entry: &Entry| {
        let flags = [(entry.in_use, "in-use"), (entry.auto, "auto")];
        let flags = flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| *flag);
        let (name, granularity) = (entry.name.clone(), entry.granularity());
        Told { name, granularity, flags: flags.collect() }
    };
    (entries.iter().take(listed).map(tell).collect(), entries.len() - listed)
}

impl ImageBitmaps {
    pub(super) fn new(
        node_name: String,
        below: Below,
        image: Arc<Image>,
        loaded: Loaded,
        owned: Option<Arc<AtomicBool>>,
    ) -> ImageBitmaps {
        ImageBitmaps {
            node_name,
            below,
            image,
            directory: Mutex::new(loaded.directory),
            changing: tokio::sync::Mutex::default(),
            loaded: Mutex::new(loaded.bitmaps),
            owned,
            tracking: Mutex::default(),
        }
    }

    /// What the file has, as far as descriptions list it, and the number of the others.
    pub(super) fn tell(&self) -> (Vec<Told>, usize) {
        tell(&lock(&self.directory).entries)
    }

    /// The bitmaps that are to be in the image, the oldest first.
    fn stored(&self) -> Vec<Arc<DirtyBitmap>> {
        match &*lock(&self.tracking) {
            Some(tracking) => tracking.stored(),
            None => lock(&self.loaded).clone(),
        }
    }

    /// Whether closing the image stores bitmaps.
    pub(super) fn has_new(&self) -> bool {
        self.stored().iter().any(|bitmap| bitmap.storage() == Storage::Image)
    }

    /// Notes that a range of the disk is about to be cut off: a part of it may be gone if that fails.
    pub(super) fn note_cut(&self, range: Range<u64>) {
        if let Some(tracking) = &*lock(&self.tracking) {
            tracking.note(range.start, range.end.saturating_sub(range.start));
        }
    }

    /// Logs the bitmaps that an image that is only read cannot store.
    pub(super) fn tell_lost(&self) {
        let stored = self.stored();
        let lost = stored.iter().filter(|bitmap| bitmap.storage() == Storage::Image);
        for bitmap in lost {
            let (bitmap, node) = (bitmap.name(), &self.node_name);
            log::warn!(
                "bitmap '{bitmap}' of node '{node}' is lost: its image is open for reading only"
            );
        }
    }

    /// Whether the file has what it is to have once it is closed.
    pub(super) fn are_whole(&self) -> bool {
        let stored = self.stored();
        let kept = inconsistent(&stored);
        let is_ours = self.owned.as_ref().is_none_or(|owned| owned.load(Ordering::Relaxed));
        self.image.read_only
            || !is_ours
            || stored.iter().all(|bitmap| bitmap.storage() != Storage::Image)
                && lock(&self.directory).entries.iter().all(|entry| kept.contains(&*entry.name))
    }
}

impl BitmapStore for ImageBitmaps {
    fn bitmaps(&self) -> Vec<Arc<DirtyBitmap>> {
        lock(&self.loaded).clone()
    }

    fn keep(&self, tracking: Arc<Tracking>) {
        let now = tracking.stored();
        *lock(&self.tracking) = Some(tracking);
        let loaded = std::mem::take(&mut *lock(&self.loaded));
        for bitmap in without(&loaded, &now) {
            // Writes do not set its bits.
            bitmap.give_up_keeping();
        }
        self.image.kept.remove_given_up();
    }

    fn take_kept(&self, before: &dyn BitmapStore) {
        let before: &dyn Any = before;
        if let Some(before) = before.downcast_ref::<ImageBitmaps>() {
            self.image.kept.take_from(&before.image.kept);
        }
    }

    fn new_bitmap(&self, name: &str, size: u64, granularity: u64, recording: bool) -> DirtyBitmap {
        let of = Described { name: name.to_owned(), size, granularity, recording };
        let why_not = match &self.image.kept {
            _ if !self.image.has_journal() => Some("its image has no journal"),
            kept => (!kept.has_place()).then_some(NOT_IN_A_FILE),
        };
        let node = &self.node_name;
        let kept = match why_not {
            None => self.image.kept.create(node, &of),
            Some(why) => {
                log::warn!("bitmap '{name}' of node '{node}' does not survive a kill: {why}");
                None
            }
        };
        match kept {
            Some(bits) => DirtyBitmap::of_kept(of, bits),
            None => DirtyBitmap::new(of.name, size, granularity, recording, Storage::Image),
        }
    }

    fn secure(self: Arc<Self>, event_loop: &EventLoop) -> Forgotten {
        let event_loop = event_loop.clone();
        Box::pin(async move {
            if !self.image.kept.any() {
                return Ok(());
            }
            let channels = self.below.open_channels(&event_loop).map_err(errno_of)?;
            self.image.mark_now(&channels).await;
            // Discards from before, which a kill would undo.
            self.image.commit(&channels).await
        })
    }

    fn check_new(self: Arc<Self>, name: &str, granularity: u64, event_loop: &EventLoop) -> Checked {
        let prefix = format!("Can't make bitmap '{name}' persistent in '{}': ", self.node_name);
        if self.image.version < 3 {
            let why = "Cannot store dirty bitmaps in qcow2 v2 files";
            return Box::pin(ready(Err(prefix + why)));
        }
        let names: Vec<_> = self.stored().iter().map(|bitmap| bitmap.name().to_owned()).collect();
        if let Err(why) = directory::check_new(name, granularity, self.image.size(), &names) {
            return Box::pin(ready(Err(prefix + &why)));
        }
        let event_loop = event_loop.clone();
        Box::pin(async move {
            let checked = match self.below.open_channels(&event_loop).map_err(errno_of) {
                Ok(channels) => self.image.check_room_for_bitmaps(&channels).await,
                Err(errno) => Err(errno),
            };
            checked.map_err(|errno| match errno {
                Errno::EFBIG => {
                    prefix
                        + "the image's header has no room for it; a shorter name of the backing file or larger \
                           clusters leave room"
                }
                errno => format!("{prefix}reading the image's header failed: {}", errno.desc()),
            })
        })
    }

    fn forget(self: Arc<Self>, name: &str, event_loop: &EventLoop) -> Forgotten {
        let (name, event_loop) = (name.to_owned(), event_loop.clone());
        Box::pin(async move {
            if lock(&self.directory).entries.iter().all(|entry| entry.name != name) {
                return Ok(());
            }
            let channels = self.below.open_channels(&event_loop).map_err(errno_of)?;
            self.remove(&channels, &name).await?;
            self.image.flush(&channels).await
        })
    }
}

/// Whether an entry of a bitmap's table leads to a cluster of the file, which ends at `end`.
fn is_data(entry: u64, cluster: u64, end: u64) -> bool {
    entry > 1 && entry.is_multiple_of(cluster) && entry < end
}

/// The entries of a bitmap's table: places of clusters in the file; 0 for zeroes and 1 for ones. `end`: that of the
/// file. `None`: the table is not in the file.
async fn data_clusters(
    channels: &Channels,
    entry: &Entry,
    end: u64,
) -> Result<Option<Vec<u64>>, Errno> {
    let (offset, entries) = entry.table;
    let len = u64::from(entries) * ENTRY as u64;
    if offset + len > end {
        return Ok(None);
    }
    let table = read(channels, offset, len as usize).await?;
    let (table, _) = table.as_chunks::<ENTRY>();
    Ok(Some(table.iter().map(|entry| u64::from_be_bytes(*entry)).collect()))
}
