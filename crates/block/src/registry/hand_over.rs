//! Images that another process hands over, or takes over.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

use super::{NodeInfo, NodeRegistry};
use crate::inherited::OpenImage;
use crate::options::BlockdevOptions;
use crate::track::{DirtyBitmap, Storage};

impl NodeRegistry {
    /// Makes the node of the image's path use these descriptors, once it is opened.
    ///
    /// Another process had the image open by them.
    pub fn inherit_image(&mut self, image: OpenImage<OwnedFd>) {
        self.inherited.add(image);
    }

    /// Returns the open images, and the journals of some, for a hand-over.
    pub fn images(&self) -> impl Iterator<Item = OpenImage<Arc<OwnedFd>>> {
        self.images.all().chain(self.all().filter_map(|info| info.node.held_state()?.journal()))
    }

    /// Returns the names of nodes behind overlays whose images stay open for writing, and store bitmaps when closed.
    pub fn storing(&self) -> impl Iterator<Item = &str> {
        let stores = |info: &NodeInfo<'_>| {
            let is_stored = |bitmap: &Arc<DirtyBitmap>| bitmap.storage() == Storage::Image;
            info.options.read_only
                && !info.node.geometry().read_only
                && self.tracking(info.name).is_some_and(|all| all.stored().iter().any(is_stored))
        };
        self.all().filter(stores).map(|info| info.name)
    }

    /// Opens nodes of these names for writing, although their options say read-only: another process
    /// [had](Self::storing) them so.
    pub fn set_storing(&mut self, names: BTreeSet<String>) {
        self.storing = names;
    }

    /// The options to open a node with.
    pub(super) fn for_storing<'a>(
        &mut self,
        name: &str,
        options: &'a BlockdevOptions,
    ) -> Cow<'a, BlockdevOptions> {
        match self.storing.remove(name) {
            true => Cow::Owned(BlockdevOptions { read_only: false, ..options.clone() }),
            false => Cow::Borrowed(options),
        }
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
    /// Those of [`HeldState::release_for_handover`](crate::node::HeldState::release_for_handover), with the
    /// node's name.
    pub fn release_for_handover(
        &self,
    ) -> impl Future<Output = Result<(), (String, io::Error)>> + use<> {
        // All at once: each may have to wait for its disk.
        let begun: Vec<_> = self
            .all()
            .filter_map(|info| {
                Some((info.name.to_owned(), info.node.held_state()?.release_for_handover()))
            })
            .collect();
        async move {
            for (name, released) in begun {
                released.await.map_err(|error| (name, error))?;
            }
            Ok(())
        }
    }
}
