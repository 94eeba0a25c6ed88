//! Where a node's bytes are on this host.

use std::sync::Arc;

use crate::error::OpenError;
use crate::format::Format;
use crate::image_place::ImagePlace;

/// A file or device that may change its size without a change of the node's geometry.
pub trait GrowingFile: Send + Sync {
    /// Returns the present size of the node's file or device, in bytes.
    ///
    /// A format on top extends a file, and an administrator a device, without a change of the geometry: for a node that
    /// only a format uses, [`geometry`](super::BlockNode::geometry) has the size at opening or at the last resize. May block.
    fn length(&self) -> u64;

    /// Returns the largest end of a write since opening, in bytes; 0 if there was none, or if the node does not know.
    ///
    /// For `wr_highest_offset`, by which a management program grows the device below a format.
    fn highest_write(&self) -> u64;
}

/// What the storage of this host tells about a node that keeps its bytes there.
pub trait HostStorage: Send + Sync {
    /// Returns what tells the node's file or block device from others of this host.
    fn place(&self) -> Option<ImagePlace> {
        None
    }

    /// Returns the bytes that the image takes up in its file system; `None` if unknown. May block.
    fn allocated(&self) -> Option<u64> {
        None
    }

    /// Returns the alignment, in bytes, that saves copies of requests' memory.
    fn memory_alignment(&self) -> u32 {
        512
    }

    /// Returns the format by the signature in the node's file or block device.
    ///
    /// Only if this node passes the bytes on unchanged. Reads from the disk.
    fn foreign_format(&self) -> Option<Format> {
        None
    }

    /// Returns why a node that fell back to reading cannot be written.
    ///
    /// For `auto-read-only`.
    fn why_read_only(&self) -> Option<OpenError> {
        None
    }
}

/// The storage of a node whose bytes are not those of the node above: their signature says nothing about it.
pub(crate) struct OtherBytes(pub(crate) Arc<dyn HostStorage>);

impl HostStorage for OtherBytes {
    fn place(&self) -> Option<ImagePlace> {
        self.0.place()
    }

    fn allocated(&self) -> Option<u64> {
        self.0.allocated()
    }

    fn memory_alignment(&self) -> u32 {
        self.0.memory_alignment()
    }

    fn why_read_only(&self) -> Option<OpenError> {
        self.0.why_read_only()
    }
}
