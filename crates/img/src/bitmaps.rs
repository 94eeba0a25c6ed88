//! Persistent dirty bitmaps.

use std::sync::Arc;

use block::track::{DirtyBitmap, Storage, Tracking};

use crate::error::Error;
use crate::images::{Image, Images};

/// Limits of the default granularity, bytes.
const GRANULARITY: (u64, u64) = (4096, 65536);

/// A change of a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BitmapChange {
    /// Makes it, with a bit for so many bytes. `None`: as many as the image's clusters have.
    Add(Option<u64>),
    /// Removes it.
    Remove,
    /// Clears its bits.
    Clear,
    /// Lets it record writes.
    Enable,
    /// Ends that.
    Disable,
    /// Adds the bits of another one, of that name.
    Merge(String),
}

impl BitmapChange {
    fn word(&self) -> &'static str {
        match self {
            BitmapChange::Add(_) => "add",
            BitmapChange::Remove => "remove",
            BitmapChange::Clear => "clear",
            BitmapChange::Enable => "enable",
            BitmapChange::Disable => "disable",
            BitmapChange::Merge(_) => "merge",
        }
    }
}

impl Images {
    /// Changes a dirty bitmap of an image. `other` has the bitmap that is merged. `None`: the image itself has it.
    ///
    /// # Errors
    ///
    /// There is no such bitmap, or there is one already; the format has none; the image is full.
    pub fn change_bitmap(
        &mut self,
        image: &Image,
        name: &str,
        change: &BitmapChange,
        other: Option<&Image>,
    ) -> Result<(), Error> {
        let changed = self.change_one(image, name, change, other);
        let word = change.word();
        changed.map_err(|error| error.of(format!("Operation {word} on bitmap {name} failed")))
    }

    /// Checks that the persistent bitmaps of an image can be copied, all of them or with `skip_broken` those that are
    /// consistent. Returns the others' names.
    ///
    /// # Errors
    ///
    /// The format has no bitmaps, or one is inconsistent.
    pub fn check_bitmaps(&self, source: &Image, skip_broken: bool) -> Result<Vec<String>, Error> {
        if self.nodes.node(&source.node_name)?.bitmap_store().is_none() {
            return Err(Error::new("Source lacks bitmap support"));
        }
        let is_broken = |bitmap: &Arc<DirtyBitmap>| bitmap.storage() == Storage::Inconsistent;
        let all = self.dirty_bitmaps(source).into_iter().filter(is_broken);
        let broken: Vec<_> = all.map(|bitmap| bitmap.name().to_owned()).collect();
        match broken.first() {
            Some(name) if !skip_broken => {
                let why = format!("Cannot copy inconsistent bitmap '{name}'");
                Err(Error::new(why)
                    .with_hint("Try --skip-broken-bitmaps, or use 'img bitmap --remove'"))
            }
            Some(_) | None => Ok(broken),
        }
    }

    /// Copies the persistent bitmaps of an image that are consistent to another one, which has as many bytes.
    ///
    /// # Errors
    ///
    /// The target has a bitmap of that name already, has another size, or is full.
    pub fn copy_bitmaps(&mut self, source: &Image, target: &Image) -> Result<(), Error> {
        let all = self.dirty_bitmaps(source).into_iter();
        for from in all.filter(|bitmap| bitmap.storage() != Storage::Inconsistent) {
            let name = from.name();
            let failed = |error: Error| error.of(format!("Failed to create bitmap {name}"));
            self.add_bitmap(target, name, Some(from.bits().granularity())).map_err(failed)?;
            let to = self.bitmap(target, name)?;
            to.set_recording(from.is_recording());
            if to.bits().size() != from.bits().size() {
                return Err(Error::new(format!(
                    "Failed to populate bitmap {name}: the target is of another size"
                )));
            }
            to.bits().merge(from.bits());
        }
        Ok(())
    }

    /// The bitmaps of an image, the newest first, as in qemu-img.
    fn dirty_bitmaps(&self, image: &Image) -> Vec<Arc<DirtyBitmap>> {
        let tracking = self.nodes.tracking(&image.node_name);
        tracking.map_or_else(Vec::new, |tracking| tracking.bitmaps())
    }

    fn bitmap(&self, image: &Image, name: &str) -> Result<Arc<DirtyBitmap>, Error> {
        let tracking = self.nodes.tracking(&image.node_name);
        let found = tracking.and_then(|tracking| tracking.bitmap(name));
        found.ok_or_else(|| Error::new(format!("Dirty bitmap '{name}' not found")))
    }

    fn usable(&self, image: &Image, name: &str) -> Result<Arc<DirtyBitmap>, Error> {
        let found = self.bitmap(image, name)?;
        match found.storage() {
            Storage::Inconsistent => {
                let why = format!("Bitmap '{name}' is inconsistent and cannot be used");
                Err(Error::new(why)
                    .with_hint("Try block-dirty-bitmap-remove to delete this bitmap from disk"))
            }
            Storage::Memory | Storage::Image | Storage::ReadOnlyImage => Ok(found),
        }
    }

    fn change_one(
        &mut self,
        image: &Image,
        name: &str,
        change: &BitmapChange,
        other: Option<&Image>,
    ) -> Result<(), Error> {
        match change {
            BitmapChange::Add(granularity) => self.add_bitmap(image, name, *granularity),
            BitmapChange::Remove => self.remove_bitmap(image, name),
            BitmapChange::Clear => {
                drop(self.usable(image, name)?.bits().take());
                Ok(())
            }
            BitmapChange::Enable | BitmapChange::Disable => {
                self.usable(image, name)?.set_recording(*change == BitmapChange::Enable);
                Ok(())
            }
            BitmapChange::Merge(from) => {
                let to = self.usable(image, name)?;
                let from = self.usable(other.unwrap_or(image), from)?;
                let (size, of_source) = (to.bits().size(), from.bits().size());
                if size != of_source {
                    return Err(Error::new(format!(
                        "Bitmaps are of different sizes (destination size is {size}, source size is {of_source}) and can't \
                         be merged"
                    )));
                }
                if !Arc::ptr_eq(&to, &from) {
                    to.bits().merge(from.bits());
                }
                Ok(())
            }
        }
    }

    fn add_bitmap(
        &mut self,
        image: &Image,
        name: &str,
        granularity: Option<u64>,
    ) -> Result<(), Error> {
        if name.is_empty() {
            return Err(Error::new("Bitmap name cannot be empty"));
        }
        if granularity.is_some_and(|bytes| bytes < 512 || !bytes.is_power_of_two()) {
            return Err(Error::new("Granularity must be power of 2 and at least 512"));
        }
        let node = self.nodes.node(&image.node_name)?;
        let Some(store) = node.bitmap_store() else {
            let of = &image.node_name;
            let why = format!("Can't store persistent bitmaps to {of}: Operation not supported");
            return Err(Error::new(why));
        };
        if self.bitmap(image, name).is_ok() {
            return Err(Error::new(format!("Bitmap already exists: {name}")));
        }
        let cluster = node.details().and_then(|details| details.cluster_size);
        let default = cluster.unwrap_or(GRANULARITY.1).clamp(GRANULARITY.0, GRANULARITY.1);
        let granularity = granularity.unwrap_or(default);
        let checked = store.clone().check_new(name, granularity, &self.event_loop);
        self.block_on(checked)?.map_err(Error::new)?;
        let size = node.geometry().size;
        drop(node);
        let tracking = self.track(&image.node_name)?;
        let bitmap = store.new_bitmap(name, size, granularity, true);
        tracking.add_bitmap(Arc::new(bitmap));
        Ok(())
    }

    /// Has a node's writes noted.
    fn track(&mut self, name: &str) -> Result<Arc<Tracking>, Error> {
        // The loop runs a task of its own, which takes the nodes along.
        let mut nodes = std::mem::take(&mut self.nodes);
        let name = name.to_owned();
        let (nodes, tracking) = self.block_on(async move {
            let tracking = nodes.track(&name).await;
            (nodes, tracking)
        })?;
        self.nodes = nodes;
        Ok(tracking?)
    }

    fn remove_bitmap(&mut self, image: &Image, name: &str) -> Result<(), Error> {
        self.bitmap(image, name)?;
        let node = self.nodes.node(&image.node_name)?;
        if let Some(store) = node.bitmap_store() {
            let forgotten = self.block_on(store.forget(name, &self.event_loop))?;
            forgotten
                .map_err(|errno| Error::os("Failed to remove the bitmap from the file", errno))?;
        }
        if let Some(tracking) = self.nodes.tracking(&image.node_name) {
            tracking.remove_bitmap(name);
        }
        Ok(())
    }
}
