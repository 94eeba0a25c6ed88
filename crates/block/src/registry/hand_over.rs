//! Images that another process hands over, or takes over.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

use super::NodeRegistry;
use crate::inherited::OpenImage;

impl NodeRegistry {
    /// Makes the node of the image's path use these descriptors, once it is opened.
    ///
    /// Another process had the image open by them.
    pub fn inherit_image(&mut self, image: OpenImage<OwnedFd>) {
        self.inherited.add(image);
    }

    /// Returns the open images, and the journals of some, for a hand-over.
    pub fn images(&self) -> impl Iterator<Item = OpenImage<Arc<OwnedFd>>> {
        self.images.all().chain(self.all().filter_map(|info| info.node.journal()))
    }

    /// Takes ownership of images that another process has handed over.
    ///
    /// Before this call nothing is written to them or unlocked.
    pub fn own_images(&mut self) {
        self.inherited.own();
        self.begin_keeping();
    }

    /// The next process has the bits of bitmaps after a kill. Nothing was written since they were handed over.
    fn begin_keeping(&self) {
        let all = self.nodes.values().filter_map(|entry| entry.tracking.as_ref());
        all.for_each(|tracking| tracking.begin_keeping());
    }

    /// Returns the path of an image with a failed flush.
    ///
    /// The kernel would not report the failure to another process.
    pub fn image_with_failed_flush(&self) -> Option<&Path> {
        self.images.with_failed_flush()
    }

    /// Goes on with the images after a failed hand-over. The other process has ended.
    ///
    /// It may have unlocked the images.
    pub fn retake_images(&self) {
        self.locks.values().filter_map(Weak::upgrade).for_each(|lock| lock.retake());
        self.begin_keeping();
    }

    /// Prepares a hand-over of the images of all nodes to another process.
    ///
    /// The nodes must be quiesced.
    ///
    /// The other process opens the images with the descriptors that [`images`](Self::images) returns. If the
    /// hand-over fails, or the future is dropped, the nodes remain usable here.
    ///
    /// # Errors
    ///
    /// Those of [`BlockNode::release_for_handover`](crate::node::BlockNode::release_for_handover), with the
    /// node's name.
    pub fn release_for_handover(
        &self,
    ) -> impl Future<Output = Result<(), (String, io::Error)>> + use<> {
        // All at once: each may have to wait for its disk.
        let begun: Vec<_> = self
            .all()
            .map(|info| (info.name.to_owned(), info.node.release_for_handover()))
            .collect();
        async move {
            for (name, released) in begun {
                released.await.map_err(|error| (name, error))?;
            }
            Ok(())
        }
    }
}
