//! What a node keeps in memory of its image.

use std::future::{Future, ready};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use crate::inherited::OpenImage;

/// State of an image in the memory of the node, which another node or process cannot see.
pub trait HeldState: Send + Sync {
    /// Returns the journal of answered changes that the image lacks, if there is one.
    ///
    /// A process that takes the image over needs its descriptor.
    fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        None
    }

    /// Prepares a hand-over of the image to another process. The node must be quiesced.
    ///
    /// After completion, everything the other process needs is in the image or in the
    /// [`journal`](Self::journal). The work starts with the call, even if the future is not polled. If the
    /// hand-over fails, or the caller stops waiting for a slow disk, the node remains usable.
    ///
    /// # Errors
    ///
    /// Errors of a write to the image; `ResourceBusy` if the work of an earlier call has not finished.
    fn release_for_handover(self: Arc<Self>) -> Released;

    /// Closes the node's image, whose state is in this node's memory, so that another node can open the image. No
    /// request follows before [`resume_image`](Self::resume_image). After that, dropping this node leaves the image alone.
    ///
    /// # Errors
    ///
    /// Errors of a write to the image. The node remains usable.
    fn suspend_image(self: Arc<Self>) -> Released {
        Box::pin(ready(Ok(())))
    }

    /// Has the node go on with the image, which was not changed since [`suspend_image`](Self::suspend_image).
    ///
    /// # Errors
    ///
    /// Errors of a write to the image. The node goes on all the same.
    fn resume_image(self: Arc<Self>) -> Released {
        Box::pin(ready(Ok(())))
    }
}

/// Completes with the result of [`HeldState::release_for_handover`].
pub type Released = Pin<Box<dyn Future<Output = io::Result<()>>>>;
