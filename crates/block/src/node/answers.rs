//! Answers of nodes with and without a capability.

use std::future::ready;
use std::sync::Arc;

use event_loop::EventLoop;
use nix::errno::Errno;

use super::{
    BackingName, BlockNode, ChangingSnapshots, ImageDetails, InternalSnapshot, Renaming,
    SnapshotChange,
};
use crate::track::BitmapStore;

impl dyn BlockNode {
    /// Returns what the format of the node's image knows of it; `None` without an image.
    pub fn details(self: &Arc<Self>) -> Option<ImageDetails> {
        Some(self.clone().image()?.details())
    }

    /// Returns the dirty bitmaps in the node's image, if its format has room for bitmaps.
    pub fn bitmap_store(self: &Arc<Self>) -> Option<Arc<dyn BitmapStore>> {
        self.clone().image()?.bitmap_store()
    }

    /// Changes the name of the backing file in the node's image: `ENOTSUP` without an image.
    pub fn set_backing_name(
        self: &Arc<Self>,
        name: Option<BackingName>,
        event_loop: &EventLoop,
    ) -> Renaming {
        match self.clone().image() {
            Some(image) => image.set_backing_name(name, event_loop),
            None => Box::pin(ready(Err(Errno::ENOTSUP))),
        }
    }

    /// Returns the internal snapshots of the node's image; `None` if there is no room for any.
    pub fn snapshots(self: &Arc<Self>) -> Option<Vec<InternalSnapshot>> {
        self.clone().internal_snapshots()?.list()
    }

    /// Makes or deletes an internal snapshot: `ENOTSUP` if there is no room for any.
    pub fn change_snapshots(
        self: &Arc<Self>,
        change: SnapshotChange,
        event_loop: &EventLoop,
    ) -> ChangingSnapshots {
        match self.clone().internal_snapshots() {
            Some(snapshots) => snapshots.change(change, event_loop),
            None => Box::pin(ready(Err(Errno::ENOTSUP.into()))),
        }
    }
}
