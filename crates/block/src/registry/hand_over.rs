//! Images that another process hands over, or takes over.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

use super::NodeRegistry;
use crate::inherited::OpenImage;

impl NodeRegistry {
    /// Has the node that is opened for the image at that path use its descriptors, which another process
    /// had it open by.
    pub fn inherit_image(&mut self, image: OpenImage<OwnedFd>) {
        self.inherited.add(image);
    }

    /// The images that are open, to be handed over, and the journals of some.
    pub fn images(&self) -> impl Iterator<Item = OpenImage<Arc<OwnedFd>>> {
        self.images.all().chain(self.all().filter_map(|info| info.node.journal()))
    }

    /// From now on images that another process has handed over are this one's alone. Before, their locks are
    /// not given up, nor is anything written to them, whatever becomes of a node.
    pub fn own_images(&mut self) {
        self.inherited.own();
    }

    /// The path of an image with a flush that has failed, of which another process would know nothing.
    pub fn image_with_failed_flush(&self) -> Option<&Path> {
        self.images.with_failed_flush()
    }

    /// The images were handed over in vain: locks them again, as another process may have given the
    /// locks up.
    pub fn retake_locks(&self) {
        self.locks.values().filter_map(Weak::upgrade).for_each(|lock| lock.retake());
    }

    /// Another process is about to open the images of all nodes, which are at rest, with the descriptors that
    /// [`images`](Self::images) gives. If that comes to nothing, or nobody waits for it any more, they go on here.
    ///
    /// # Errors
    ///
    /// Those of [`BlockNode::release_for_handover`](crate::node::BlockNode::release_for_handover), with the node's name.
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
