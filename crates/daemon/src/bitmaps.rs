//! Commands on dirty bitmaps of nodes.

use std::ops::RangeInclusive;
use std::sync::Arc;

use block::NodeRegistry;
use block::driver::Layer;
use block::job::{Bitmap, MAX_PARTS};
use block::node::listed;
use block::track::{DirtyBitmap, Storage};
use control::BitmapRef;
use control::qmp::QmpError;
use serde_json::{Value as Json, json};

use super::{Daemon, DaemonError};

/// Longest name, bytes.
const MAX_NAME: usize = 1023;
/// Limits of the default granularity in bytes. The default is the image's cluster size, as in QEMU.
const GRANULARITY: RangeInclusive<u64> = 4096..=65536;

/// Bitmaps whose bits can be used.
pub(super) const READABLE: &[Storage] = &[Storage::Memory, Storage::Image, Storage::ReadOnlyImage];

/// Bitmaps with bits that can be changed.
const WRITABLE: &[Storage] = &[Storage::Memory, Storage::Image];

/// The name of a bitmap in commands.
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

fn is_read_only(bitmap: &str) -> QmpError {
    refused(format!("Bitmap '{bitmap}' is readonly and cannot be modified"))
}

fn refused(desc: impl Into<String>) -> QmpError {
    QmpError::generic(desc)
}

/// Checks that a bitmap for `size` bytes, with a bit for each `granularity` bytes, does not take too much memory.
pub(super) fn check_parts(size: u64, granularity: u64) -> Result<(), QmpError> {
    if size.div_ceil(granularity.max(1)) > MAX_PARTS {
        return Err(QmpError::generic(format!(
            "{size} bytes in parts of {granularity} are more than {MAX_PARTS} parts: a larger \
             granularity makes fewer"
        )));
    }
    Ok(())
}

/// The bitmaps of a node in the answer to `query-named-block-nodes`.
///
/// As in QEMU, a bitmap that a job uses has the bits that the job began with. The bits that were set since are those of a bitmap
/// without a name, which is listed first.
pub(super) fn info(nodes: &NodeRegistry, name: &str) -> Option<(Vec<Json>, usize)> {
    let bitmaps = nodes.tracking(name)?.bitmaps();
    let listed = listed(bitmaps.iter().map(|bitmap| bitmap.name()));
    let mut told = Vec::new();
    for bitmap in bitmaps.iter().filter(|bitmap| bitmap.lent().is_some()).take(listed) {
        told.push(json!({
            "recording": bitmap.is_recording(),
            "persistent": false,
            "busy": false,
            "granularity": bitmap.bits().granularity(),
            "count": bitmap.bits().count(),
        }));
    }
    for bitmap in bitmaps.iter().take(listed) {
        let mut named = json!({
            "name": bitmap.name(),
            "recording": bitmap.is_recording(),
            "persistent": bitmap.storage() != Storage::Memory,
            "busy": bitmap.is_busy(),
            "granularity": bitmap.bits().granularity(),
            "count": bitmap.lent().unwrap_or_else(|| bitmap.bits().count()),
        });
        if bitmap.storage() == Storage::Inconsistent {
            named["inconsistent"] = true.into();
        }
        told.push(named);
    }
    (!told.is_empty()).then(|| (told, bitmaps.len() - listed))
}

impl Daemon {
    /// A bitmap of a node.
    pub(super) fn bitmap(&self, node: &str, name: &str) -> Result<Arc<DirtyBitmap>, QmpError> {
        if self.nodes.node(node).is_err() {
            return Err(refused(format!("Node '{node}' not found")));
        }
        let found = self.nodes.tracking(node).and_then(|tracking| tracking.bitmap(name));
        found.ok_or_else(|| refused(format!("Dirty bitmap '{name}' not found")))
    }

    /// A bitmap of a node. Fails if it cannot be changed, or if `usable` does not contain its storage.
    fn own_bitmap(
        &self,
        of: &BitmapName,
        usable: &[Storage],
    ) -> Result<Arc<DirtyBitmap>, QmpError> {
        let bitmap = self.bitmap(&of.node, &of.name)?;
        let is_stored = bitmap.storage() != Storage::Memory;
        // An image behind an overlay is read-only, even if it is open for writing.
        if is_stored && !bitmap.is_busy() && self.inventory.is_read_only(&of.node) {
            return Err(is_read_only(&of.name));
        }
        check(&bitmap, usable)?;
        Ok(bitmap)
    }

    /// The bitmap of an incremental backup.
    pub(super) fn bitmap_for_backup(
        &self,
        node: &str,
        name: &str,
    ) -> Result<Arc<DirtyBitmap>, QmpError> {
        let found = self.nodes.tracking(node).and_then(|tracking| tracking.bitmap(name));
        let found = found.ok_or_else(|| refused(format!("Bitmap '{name}' could not be found")))?;
        check(&found, READABLE)?;
        Ok(found)
    }

    /// The bitmaps of a new export.
    pub(super) fn bitmaps_for_export(
        &self,
        node: &str,
        bitmaps: &[BitmapRef],
        writable: bool,
    ) -> Result<Vec<Arc<DirtyBitmap>>, DaemonError> {
        // A job's filter has no bitmaps.
        let node = &*self.nodes.below_filter(node);
        // Other users of the node can change the bitmap during a read-only export. An image behind an overlay is
        // read-only, even if it is open for writing. A bitmap that is named with its node is not checked, as in QSD.
        let changes = |node: &str| {
            self.nodes.node(node).is_ok_and(|node| !node.geometry().read_only)
                && !self.inventory.is_read_only(node)
        };
        let find = |BitmapRef { node: of, name }: &BitmapRef| {
            let (found_in, bitmap) = match of {
                Some(of) => (None, self.bitmap(of, name)?),
                None => {
                    let found = self.bitmap_behind(node, name);
                    let (of, bitmap) =
                        found.ok_or_else(|| refused(format!("Bitmap '{name}' is not found")))?;
                    (Some(of), bitmap)
                }
            };
            check(&bitmap, READABLE)?;
            if !writable && bitmap.is_recording() && found_in.as_deref().is_some_and(changes) {
                let why = format!("Enabled bitmap '{name}' incompatible with readonly export");
                return Err(refused(why));
            }
            Ok(bitmap)
        };
        let found: Result<Vec<_>, QmpError> = bitmaps.iter().map(find).collect();
        found.map_err(|error| DaemonError::new(error.desc))
    }

    /// A client sends a command that may take bits of bitmaps: it knows what has become of those that were taken.
    pub(super) fn settle_bitmaps(&self) {
        let all = self.nodes.names().filter_map(|name| self.nodes.tracking(name));
        all.for_each(|tracking| tracking.settle_bitmaps());
    }

    /// A bitmap of a node, or of one below its filters or behind it, with the name of its node.
    fn bitmap_behind(&self, node: &str, name: &str) -> Option<(String, Arc<DirtyBitmap>)> {
        let mut node = node.to_owned();
        loop {
            let found = self.nodes.tracking(&node).and_then(|tracking| tracking.bitmap(name));
            if let Some(found) = found {
                return Some((node, found));
            }
            let info = self.nodes.info(&node)?;
            let below = match info.options.driver.layer() {
                Layer::Filter => info.children.first(),
                Layer::Storage | Layer::Window | Layer::Format => {
                    info.children.iter().find(|child| child.role == "backing")
                }
            };
            node = self.nodes.below_filter(below?.edge.node().name());
        }
    }

    /// `block-dirty-bitmap-add`.
    pub(super) async fn add_bitmap(&mut self, new: NewBitmap) -> Result<(), QmpError> {
        let NewBitmap { bitmap: BitmapName { node, name }, granularity, persistent, disabled } =
            new;
        if name.is_empty() {
            return Err(refused("Bitmap name cannot be empty"));
        }
        self.is_no_filter(&node)?;
        let missing = || format!("Cannot find device='{node}' nor node-name='{node}'");
        let opened = self.nodes.node(&node).map_err(|_| refused(missing()))?;
        self.inventory.has_fixed_size(&node).map_err(DaemonError::from)?;
        if granularity.is_some_and(|bytes| bytes < 512 || !bytes.is_power_of_two()) {
            return Err(refused("Granularity must be power of 2 and at least 512"));
        }
        let is_stored = !opened.geometry().read_only
            && !self.inventory.is_read_only(&node)
            && self.inventory.is_active(&node).is_ok();
        if persistent && !is_stored {
            let why = "Cannot add a persistent bitmap to read-only or inactive node";
            return Err(refused(format!("{why} '{node}'")));
        }
        let store = opened.bitmap_store().filter(|_| persistent);
        if persistent && store.is_none() {
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
        if name.len() > MAX_NAME && !persistent {
            return Err(refused(format!("Bitmap name too long: {name}")));
        }
        let granularity = granularity.unwrap_or_else(|| {
            let cluster =
                opened.details().and_then(|image| image.cluster_size).unwrap_or(*GRANULARITY.end());
            cluster.clamp(*GRANULARITY.start(), *GRANULARITY.end())
        });
        if let Some(store) = &store {
            let checked = store.clone().check_new(&name, granularity, &self.control).await;
            checked.map_err(refused)?;
        }
        let size = opened.geometry().size;
        check_parts(size, granularity)?;
        drop(opened);
        let tracking = self.nodes.track(&node).await.map_err(DaemonError::from)?;
        let bitmap = match &store {
            Some(store) => store.new_bitmap(&name, size, granularity, !disabled),
            None => DirtyBitmap::new(name, size, granularity, !disabled, Storage::Memory),
        };
        tracking.add_bitmap(Arc::new(bitmap));
        if store.is_some() {
            tracking.secure(&node, &self.control).await;
        }
        Ok(())
    }

    /// `block-dirty-bitmap-remove`. Returns the bitmap, and its place among the node's.
    pub(super) async fn remove_bitmap(
        &mut self,
        of: &BitmapName,
    ) -> Result<(Arc<DirtyBitmap>, usize), QmpError> {
        let usable = &[Storage::Memory, Storage::Image, Storage::Inconsistent];
        let removed = self.own_bitmap(of, usable)?;
        if removed.storage() != Storage::Memory
            && let Ok(node) = self.nodes.node(&of.node)
            && let Some(store) = node.bitmap_store()
        {
            store.forget(&of.name, &self.control).await.map_err(|errno| {
                let (name, node, why) = (&of.name, &of.node, errno.desc());
                refused(format!("Failed to remove bitmap '{name}' from file of '{node}': {why}"))
            })?;
        }
        let tracking = self.nodes.tracking(&of.node);
        let place = tracking.map_or(0, |tracking| tracking.remove_bitmap(&of.name));
        Ok((removed, place))
    }

    /// `block-dirty-bitmap-clear`. Returns the bits that the bitmap had.
    pub(super) fn clear_bitmap(&mut self, of: &BitmapName) -> Result<Bitmap, QmpError> {
        Ok(self.own_bitmap(of, WRITABLE)?.bits().take())
    }

    /// `block-dirty-bitmap-enable` and `-disable`. Returns whether the bitmap was recording.
    pub(super) fn set_recording(
        &mut self,
        of: &BitmapName,
        recording: bool,
    ) -> Result<bool, QmpError> {
        let bitmap = self.bitmap(&of.node, &of.name)?;
        check(&bitmap, READABLE)?;
        let before = bitmap.is_recording();
        bitmap.set_recording(recording);
        Ok(before)
    }

    /// `block-dirty-bitmap-merge`. Returns the bits that the target had.
    pub(super) fn merge_bitmaps(&mut self, merge: Merge) -> Result<Bitmap, QmpError> {
        let Merge { node, target, bitmaps } = merge;
        let to = self.own_bitmap(&BitmapName { node: node.clone(), name: target }, WRITABLE)?;
        let mut sources = Vec::new();
        for (of, name) in bitmaps {
            let from = self.bitmap(of.as_deref().unwrap_or(&node), &name)?;
            check(&from, READABLE)?;
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
        Ok(before)
    }
}

/// Checks that a bitmap is unused, and that `usable` contains its storage.
pub(super) fn check(bitmap: &DirtyBitmap, usable: &[Storage]) -> Result<(), QmpError> {
    let name = bitmap.name();
    if bitmap.is_busy() {
        let why = "is currently in use by another operation and cannot be used";
        return Err(refused(format!("Bitmap '{name}' {why}")));
    }
    match bitmap.storage() {
        storage if usable.contains(&storage) => Ok(()),
        Storage::Inconsistent => {
            Err(refused(format!("Bitmap '{name}' is inconsistent and cannot be used")))
        }
        Storage::ReadOnlyImage | Storage::Memory | Storage::Image => Err(is_read_only(name)),
    }
}
