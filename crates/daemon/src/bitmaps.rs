//! Dirty bitmaps of nodes, as commands change them.

use std::ops::RangeInclusive;
use std::sync::Arc;

use block::NodeRegistry;
use block::job::Bitmap;
use block::track::DirtyBitmap;
use control::qmp::QmpError;
use serde_json::{Value as Json, json};

use super::{Daemon, DaemonError};

/// Longest name, bytes.
const MAX_NAME: usize = 1023;
/// Bytes of a part when none are given: the cluster size of an image within these limits, as in QEMU.
const GRANULARITY: RangeInclusive<u64> = 4096..=65536;
/// Most parts of a disk, a bit each: 256 MiB of memory.
const MAX_PARTS: u64 = 1 << 31;

/// A bitmap, as commands name it.
#[derive(Debug, Clone, Default)]
pub(super) struct BitmapName {
    pub(super) node: String,
    pub(super) name: String,
}

/// A bitmap to be added.
#[derive(Debug, Clone, Default)]
pub(super) struct NewBitmap {
    pub(super) bitmap: BitmapName,
    pub(super) granularity: Option<u64>,
    pub(super) persistent: bool,
    pub(super) disabled: bool,
}

/// Bitmaps to be merged: each by its node's name, or one of the target's node.
#[derive(Debug, Clone, Default)]
pub(super) struct Merge {
    pub(super) node: String,
    pub(super) target: String,
    pub(super) bitmaps: Vec<(Option<String>, String)>,
}

fn refused(desc: impl Into<String>) -> QmpError {
    QmpError::generic(desc)
}

/// What `query-named-block-nodes` tells of a node's bitmaps.
pub(super) fn info(nodes: &NodeRegistry, name: &str) -> Option<Json> {
    let bitmaps = nodes.tracking(name)?.bitmaps();
    let told = bitmaps.iter().map(|bitmap| {
        json!({
            "name": bitmap.name(),
            "recording": bitmap.is_recording(),
            "persistent": false,
            "busy": bitmap.is_busy(),
            "granularity": bitmap.bits().granularity(),
            "count": bitmap.bits().count(),
        })
    });
    (!bitmaps.is_empty()).then(|| told.collect())
}

impl Daemon {
    /// A bitmap of a node.
    fn bitmap(&self, node: &str, name: &str) -> Result<Arc<DirtyBitmap>, QmpError> {
        if self.nodes.node(node).is_err() {
            return Err(refused(format!("Node '{node}' not found")));
        }
        let found = self.nodes.tracking(node).and_then(|tracking| tracking.bitmap(name));
        found.ok_or_else(|| refused(format!("Dirty bitmap '{name}' not found")))
    }

    /// The same, to be changed.
    fn idle_bitmap(&self, of: &BitmapName) -> Result<Arc<DirtyBitmap>, QmpError> {
        idle(self.bitmap(&of.node, &of.name)?)
    }

    /// A bitmap that a backup is to go by.
    pub(super) fn bitmap_for_backup(
        &self,
        node: &str,
        name: &str,
    ) -> Result<Arc<DirtyBitmap>, QmpError> {
        let found = self.nodes.tracking(node).and_then(|tracking| tracking.bitmap(name));
        idle(found.ok_or_else(|| refused(format!("Bitmap '{name}' could not be found")))?)
    }

    /// `block-dirty-bitmap-add`.
    pub(super) async fn add_bitmap(&mut self, new: NewBitmap) -> Result<(), QmpError> {
        let NewBitmap { bitmap: BitmapName { node, name }, granularity, persistent, disabled } =
            new;
        if name.is_empty() {
            return Err(refused("Bitmap name cannot be empty"));
        }
        let missing = || format!("Cannot find device='{node}' nor node-name='{node}'");
        let opened = self.nodes.node(&node).map_err(|_| refused(missing()))?;
        if granularity.is_some_and(|bytes| bytes < 512 || !bytes.is_power_of_two()) {
            return Err(refused("Granularity must be power of 2 and at least 512"));
        }
        if persistent {
            let why = format!("Can't store persistent bitmaps to {node}: Operation not supported");
            return Err(refused(why));
        }
        if self.nodes.grows_by_itself(&node) {
            return Err(refused(format!(
                "Node '{node}' becomes longer as the image on it needs, and a bitmap does not: add the \
                 bitmap to that image"
            )));
        }
        if self.bitmap(&node, &name).is_ok() {
            return Err(refused(format!("Bitmap already exists: {name}")));
        }
        if name.len() > MAX_NAME {
            return Err(refused(format!("Bitmap name too long: {name}")));
        }
        let granularity = granularity.unwrap_or_else(|| {
            let cluster =
                opened.details().and_then(|image| image.cluster_size).unwrap_or(*GRANULARITY.end());
            cluster.clamp(*GRANULARITY.start(), *GRANULARITY.end())
        });
        let size = opened.geometry().size;
        if size.div_ceil(granularity) > MAX_PARTS {
            return Err(refused(format!(
                "{size} bytes in parts of {granularity} are more than {MAX_PARTS} parts: a larger \
                 granularity makes fewer"
            )));
        }
        drop(opened);
        let tracking = self.nodes.track(&node).await.map_err(DaemonError::from)?;
        tracking.add_bitmap(Arc::new(DirtyBitmap::new(name, size, granularity, !disabled)));
        Ok(())
    }

    /// `block-dirty-bitmap-remove`. Returns the bitmap.
    pub(super) fn remove_bitmap(&mut self, of: &BitmapName) -> Result<Arc<DirtyBitmap>, QmpError> {
        let removed = self.idle_bitmap(of)?;
        if let Some(tracking) = self.nodes.tracking(&of.node) {
            tracking.remove_bitmap(&of.name);
        }
        Ok(removed)
    }

    /// `block-dirty-bitmap-clear`. Returns the bitmap, and the bits that it had.
    pub(super) fn clear_bitmap(
        &mut self,
        of: &BitmapName,
    ) -> Result<(Arc<DirtyBitmap>, Bitmap), QmpError> {
        let bitmap = self.idle_bitmap(of)?;
        let bits = bitmap.bits().take();
        Ok((bitmap, bits))
    }

    /// `block-dirty-bitmap-enable` and `-disable`. Returns the bitmap, and whether it was recording.
    pub(super) fn set_recording(
        &mut self,
        of: &BitmapName,
        recording: bool,
    ) -> Result<(Arc<DirtyBitmap>, bool), QmpError> {
        let bitmap = self.idle_bitmap(of)?;
        let before = bitmap.is_recording();
        bitmap.set_recording(recording);
        Ok((bitmap, before))
    }

    /// `block-dirty-bitmap-merge`. Returns the target, and the bits that it had.
    pub(super) fn merge_bitmaps(
        &mut self,
        merge: Merge,
    ) -> Result<(Arc<DirtyBitmap>, Bitmap), QmpError> {
        let Merge { node, target, bitmaps } = merge;
        let to = self.idle_bitmap(&BitmapName { node: node.clone(), name: target })?;
        let mut sources = Vec::new();
        for (of, name) in bitmaps {
            let from = self.bitmap(of.as_deref().unwrap_or(&node), &name)?;
            let (size, other) = (to.bits().size(), from.bits().size());
            if size != other {
                return Err(refused(format!(
                    "Bitmaps are of different sizes (destination size is {size}, source size is {other}) \
                     and can't be merged"
                )));
            }
            sources.push(from);
        }
        let before = Bitmap::new(to.bits().size(), to.bits().granularity(), false);
        before.merge(to.bits());
        for from in sources.iter().filter(|from| !Arc::ptr_eq(from, &to)) {
            to.bits().merge(from.bits());
        }
        Ok((to, before))
    }
}

fn idle(bitmap: Arc<DirtyBitmap>) -> Result<Arc<DirtyBitmap>, QmpError> {
    match bitmap.is_busy() {
        true => Err(refused(format!(
            "Bitmap '{}' is currently in use by another operation and cannot be used",
            bitmap.name()
        ))),
        false => Ok(bitmap),
    }
}
