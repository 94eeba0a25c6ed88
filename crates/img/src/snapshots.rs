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

    /// Lets an image become what it was at an internal snapshot: an id or else a name.
    ///
    /// # Errors
    ///
    /// There is no such snapshot, or it is damaged; there is no space. The image is unchanged. It has dirty bitmaps, which would
    /// not tell of the change.
    pub fn apply_snapshot(&mut self, image: &Image, wanted: &str) -> Result<(), Error> {
        let failed = |error: Error| error.of(format!("Could not apply snapshot '{wanted}'"));
        let tracking = self.nodes.tracking(&image.node_name);
        if tracking.is_some_and(|tracking| !tracking.bitmaps().is_empty()) {
            return Err(failed(Error::new("Device has active dirty bitmaps"))
                .with_hint("'img bitmap --remove' removes them"));
        }
        let Some(all) = image.node.snapshots() else {
            return Err(failed(Error::new("Block driver does not support snapshots")));
        };
        let by_id = all.iter().find(|snapshot| snapshot.id == wanted);
        let found = by_id.or_else(|| all.iter().find(|snapshot| snapshot.name == wanted));
        let missing = "Failed to load snapshot: No such file or directory";
        let found = found.ok_or_else(|| failed(Error::new(missing)))?;
        self.change(image, SnapshotChange::Apply(found.id.clone())).map_err(failed)
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
