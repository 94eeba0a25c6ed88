//! The image of a node with a format.

use std::future::{Future, ready};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use ::options::Object;
use event_loop::EventLoop;
use nix::errno::Errno;

use super::{BlockNode, InternalSnapshot};
use crate::drivers::KeySlots;
use crate::track::BitmapStore;

/// An image in a format, of a node that opens it.
pub trait FormattedImage: Send + Sync {
    /// Returns what the format knows of the image.
    fn details(&self) -> ImageDetails;

    /// Returns the dirty bitmaps in the image; `None`: the format has no room for bitmaps.
    fn bitmap_store(&self) -> Option<Arc<dyn BitmapStore>> {
        None
    }

    /// Returns the key slots of an encrypted image, if it has a LUKS header.
    fn key_slots(&self) -> Option<Arc<KeySlots>> {
        None
    }

    /// Tells where the image stores a range of its disk. `None`: the format has no tables for it.
    ///
    /// The range is not empty and within the disk. The answer begins with the range, and may end before it. The work runs on
    /// `event_loop`, which also awaits the future.
    fn places(self: Arc<Self>, _range: Range<u64>, _event_loop: &EventLoop) -> Option<Placing> {
        None
    }

    /// Changes the name of the backing file in the image, or removes it.
    ///
    /// The open node keeps reading from its current backing node. When the future completes, the name is on
    /// stable storage. A kill leaves either the old name or the new one.
    ///
    /// # Errors
    ///
    /// `ENOTSUP`: the format has no such name. `EROFS`: the node was opened for reading. `EFBIG`: the name is
    /// too long.
    fn set_backing_name(
        self: Arc<Self>,
        _name: Option<BackingName>,
        _event_loop: &EventLoop,
    ) -> Renaming {
        Box::pin(ready(Err(Errno::ENOTSUP)))
    }
}

/// Returns the bytes of a cluster of the first image at or below a node.
///
/// `None`: there is none, or it has no clusters.
pub fn cluster_size(node: &Arc<dyn BlockNode>) -> Option<u64> {
    match node.details() {
        Some(details) => details.cluster_size,
        None => cluster_size(&node.child()?),
    }
}

/// Properties of an image that its format stores.
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

/// What the header of an image tells, and the lists that it leads to.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageHeader {
    /// Bytes of the disk.
    pub size: u64,
    /// Whether the image was not closed.
    pub is_dirty: bool,
    /// The same as of an open image.
    pub details: ImageDetails,
    /// Internal snapshots, as far as descriptions list them.
    pub snapshots: Vec<InternalSnapshot>,
}

/// Most items of a list in an image's description, and most bytes of their names: an image from a stranger may have 65,535
/// bitmaps and snapshots.
const MOST_ITEMS: usize = 1024;
const MOST_NAMES: usize = 128 << 10;

/// Returns how many of the items with these names, in order, a description lists.
pub fn listed<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    let mut left = MOST_NAMES;
    let fits = names.take(MOST_ITEMS).take_while(|name| match left.checked_sub(name.len()) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    });
    fits.count()
}

/// Where an image stores a part of its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredAt {
    /// In the node of its data, from this byte on. `None`: encrypted.
    Data(Option<u64>),
    /// Compressed.
    Compressed,
    /// Nowhere: it reads as zeroes.
    Zeroes,
    /// In the image behind, if there is one.
    Behind,
}

/// Completes with the result of [`FormattedImage::places`]: the lengths of parts in bytes, and where they are.
pub type Placing = Pin<Box<dyn Future<Output = Result<Vec<(u64, StoredAt)>, Errno>>>>;

/// A backing file as an image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingName {
    /// Its path, usually relative to the image's. If the name is not UTF-8, invalid bytes are replaced by U+FFFD, as in
    /// QEMU's answers.
    pub filename: String,
    /// Its format, if the image names it.
    pub format: Option<String>,
}

/// Completes with the result of [`FormattedImage::set_backing_name`].
pub type Renaming = Pin<Box<dyn Future<Output = Result<(), Errno>>>>;
