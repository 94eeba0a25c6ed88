//! Answers of nodes with and without a capability.

use std::future::ready;
use std::sync::Arc;

use event_loop::EventLoop;
use nix::errno::Errno;

use super::{
    BackingName, BlockNode, ChangingSnapshots, ImageDetails, InternalSnapshot, Renaming,
    SnapshotChange,
};
use crate::error::OpenError;
use crate::track::BitmapStore;

impl dyn BlockNode {
    /// Returns the present size of the node's file or device, in bytes; that of the geometry if the node knows no other.
    ///
    /// May block.
    pub fn length(self: &Arc<Self>) -> u64 {
        match self.clone().growing_file() {
            Some(file) => file.length(),
            None => self.geometry().size,
        }
    }

    /// Returns the largest end of a write since opening, in bytes; 0 if the node does not know.
    pub fn highest_write(self: &Arc<Self>) -> u64 {
        self.clone().growing_file().map_or(0, |file| file.highest_write())
    }

    /// Returns the bytes that the image takes up in its file system; `None` if unknown. May block.
    pub fn allocated(self: &Arc<Self>) -> Option<u64> {
        self.clone().host_storage()?.allocated()
    }

    /// Returns the alignment, in bytes, that saves copies of requests' memory; 512 if no storage has another.
    pub fn memory_alignment(self: &Arc<Self>) -> u32 {
        self.clone().host_storage().map_or(512, |storage| storage.memory_alignment())
    }

    /// Returns why a node that fell back to reading cannot be written.
    pub fn why_read_only(self: &Arc<Self>) -> Option<OpenError> {
        self.clone().host_storage()?.why_read_only()
    }

    /// Returns what tells the content from others that its server may have under the same name.
    pub fn content(self: &Arc<Self>) -> Option<String> {
        self.clone().remote_image()?.content()
    }

    /// Returns whether a format on top opens the files of this host that its header names: no, if a server may have chosen
    /// them.
    pub fn may_name_files(self: &Arc<Self>) -> bool {
        self.clone().remote_image().is_none_or(|image| image.may_name_files())
    }

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
