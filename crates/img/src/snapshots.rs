//! Internal snapshots.

use block::node::{InternalSnapshot, SnapshotChange, SnapshotError};
use nix::errno::Errno;

use crate::error::Error;
use crate::images::{Image, Images};

impl Images {
    /// Makes an internal snapshot of an image.
    ///
    /// # Errors
    ///
    /// The format has no snapshots, or there is no space.
    pub fn make_snapshot(&mut self, image: &Image, name: &str) -> Result<(), Error> {
        self.change(image, SnapshotChange::Make(name.to_owned()))
            .map_err(|error| error.of(format!("Could not create snapshot '{name}'")))
    }

    /// Deletes an internal snapshot of an image.
    ///
    /// # Errors
    ///
    /// There is no snapshot of that name, or it is damaged.
    pub fn delete_snapshot(&mut self, image: &Image, name: &str) -> Result<(), Error> {
        let failed = |error: Error| error.of(format!("Could not delete snapshot '{name}'"));
        let all = self.snapshots(image);
        let found = all.iter().find(|snapshot| snapshot.name == name);
        let found = found.ok_or_else(|| failed(Error::new("snapshot not found")))?;
        self.change(image, SnapshotChange::Delete(found.id.clone())).map_err(failed)
    }

    /// Returns the internal snapshots of an open image.
    pub fn snapshots(&self, image: &Image) -> Vec<InternalSnapshot> {
        image.node.snapshots().unwrap_or_default()
    }

    fn change(&mut self, image: &Image, change: SnapshotChange) -> Result<(), Error> {
        let node = self.nodes.node(&image.node_name)?;
        let changed = self.block_on(node.change_snapshots(change, &self.event_loop))?;
        changed.map_err(|error| match error {
            SnapshotError::Os(Errno::ENOTSUP) => Error::new("Operation not supported"),
            error => Error::new(error),
        })
    }
}
