//! Hands over dirty bitmaps of nodes: first the list of bitmaps and, once the queues have stopped, their bits.

use std::sync::Arc;

use block::NodeRegistry;
use block::track::{DirtyBitmap, Storage};
use serde_json::{Value as Json, json};

use super::super::{Daemon, DaemonError};
use super::document::{Collected, Document, boolean, list, number, text};

/// A handed-over bitmap. Its node is opened later.
pub(super) struct TakenBitmap {
    node: String,
    name: String,
    granularity: u64,
    recording: bool,
    storage: Storage,
}

/// The bits of a bitmap.
pub(super) struct TakenBits {
    node: String,
    name: String,
    bits: Vec<u8>,
}

const STORAGES: [(Storage, &str); 4] = [
    (Storage::Memory, "memory"),
    (Storage::Image, "image"),
    (Storage::ReadOnlyImage, "read-only-image"),
    (Storage::Inconsistent, "inconsistent"),
];

/// All bitmaps, the oldest of a node first.
fn all(nodes: &NodeRegistry) -> impl Iterator<Item = (&str, Arc<DirtyBitmap>)> {
    nodes.names().flat_map(|node| {
        let bitmaps = nodes.tracking(node).map_or_else(Vec::new, |tracking| tracking.bitmaps());
        bitmaps.into_iter().rev().map(move |bitmap| (node, bitmap))
    })
}

/// The list of all bitmaps.
pub(super) fn describe(nodes: &NodeRegistry) -> Json {
    let describe = |(node, bitmap): (&str, Arc<DirtyBitmap>)| {
        let storage = STORAGES.iter().find(|(storage, _)| *storage == bitmap.storage());
        json!({
            "node": node,
            "name": bitmap.name(),
            "granularity": bitmap.bits().granularity(),
            "recording": bitmap.is_recording(),
            "storage": storage.map(|(_, name)| *name),
        })
    };
    all(nodes).map(describe).collect()
}

/// The bits of all bitmaps. The queues are stopped.
pub(super) fn bits(nodes: &NodeRegistry, fds: &mut Collected) -> Result<Json, String> {
    let set = all(nodes).filter(|(_, bitmap)| bitmap.bits().count() > 0);
    let told = set.map(|(node, bitmap)| {
        let bits = fds.memory(&bitmap.bits().to_bytes())?;
        Ok(json!({"node": node, "name": bitmap.name(), "bits": bits}))
    });
    told.collect()
}

/// Parses the output of [`describe`]. Older versions send null.
pub(super) fn read(json: &Json) -> Result<Vec<TakenBitmap>, String> {
    if json.is_null() {
        return Ok(Vec::new());
    }
    let read = |bitmap: &Json| {
        let storage = text(&bitmap["storage"])?;
        let storage = STORAGES.iter().find(|(_, name)| *name == storage);
        let granularity: u64 = number(&bitmap["granularity"])?;
        Ok(TakenBitmap {
            node: text(&bitmap["node"])?.to_owned(),
            name: text(&bitmap["name"])?.to_owned(),
            granularity: Some(granularity)
                .filter(|bytes| bytes.is_power_of_two())
                .ok_or_else(|| format!("{granularity} is no granularity"))?,
            recording: boolean(&bitmap["recording"])?,
            storage: storage.ok_or("no such place of a bitmap")?.0,
        })
    };
    list(json)?.iter().map(read).collect()
}

/// Parses the output of [`bits`].
pub(super) fn read_bits(document: &mut Document, json: &Json) -> Result<Vec<TakenBits>, String> {
    if json.is_null() {
        return Ok(Vec::new());
    }
    let mut all = Vec::new();
    for bitmap in list(json)? {
        all.push(TakenBits {
            node: text(&bitmap["node"])?.to_owned(),
            name: text(&bitmap["name"])?.to_owned(),
            bits: document.content(&bitmap["bits"])?,
        });
    }
    Ok(all)
}

impl Daemon {
    /// Replaces the bitmaps of newly opened nodes by those of the other process. The bitmaps in the images are
    /// marked as in use.
    pub(crate) async fn take_bitmaps(&mut self) -> Result<(), DaemonError> {
        let Some(taken) = &mut self.origin.taken else { return Ok(()) };
        let is_there = |bitmap: &mut TakenBitmap| self.nodes.node(&bitmap.node).is_ok();
        let bitmaps: Vec<_> = taken.bitmaps.extract_if(.., is_there).collect();
        for group in bitmaps.chunk_by(|one, other| one.node == other.node) {
            let Some(TakenBitmap { node, .. }) = group.first() else { continue };
            let opened = self.nodes.node(node)?;
            let (size, store) = (opened.geometry().size, opened.bitmap_store());
            drop(opened);
            let tracking = self.nodes.track(node).await?;
            let make = |taken: &TakenBitmap| {
                let TakenBitmap { name, granularity, recording, storage, .. } = taken;
                Arc::new(match store.as_ref().filter(|_| *storage == Storage::Image) {
                    Some(store) => store.new_bitmap(name, size, *granularity, *recording),
                    None => {
                        DirtyBitmap::new(name.clone(), size, *granularity, *recording, *storage)
                    }
                })
            };
            tracking.set_bitmaps(group.iter().map(make).collect());
        }
        Ok(())
    }

    /// Sets the bits of the bitmaps.
    pub(super) fn take_bits(&self, all: &[TakenBits]) {
        for TakenBits { node, name, bits } in all {
            let tracking = self.nodes.tracking(node);
            match tracking.and_then(|tracking| tracking.bitmap(name)) {
                Some(bitmap) => bitmap.bits().set_bytes(0, bits),
                None => log::warn!("upgrade: bitmap '{name}' of node '{node}' is lost"),
            }
        }
    }
}
