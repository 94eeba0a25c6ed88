//! `block_resize`.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use event_loop::{EventLoop, oneshot};
use nix::errno::Errno;

use super::NodeRegistry;
use crate::driver::Layer;
use crate::error::OpenError;
use crate::graph::{drain, hold};
use crate::job::MAX_PARTS;
use crate::node::ResizeError;
use crate::track::{DirtyBitmap, Storage, Tracking};

type Turn = Arc<tokio::sync::Mutex<()>>;

/// A lock for each node that is given another size.
#[derive(Default)]
pub(super) struct Resizing(Mutex<BTreeMap<String, Turn>>);

impl Resizing {
    fn turn_of(&self, node: &str) -> Turn {
        let mut turns = lock(&self.0);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns.entry(node.to_owned()).or_default().clone()
    }

    /// Whether a node is being given another size.
    pub(super) fn is_any(&self) -> bool {
        lock(&self.0).values().any(|turn| turn.try_lock().is_err())
    }
}

impl NodeRegistry {
    /// Resizes a node's image, as `block_resize` does.
    ///
    /// A node that shrinks is drained meanwhile, because a write in flight would extend the image again. Dirty bitmaps
    /// of the node, and of nodes below and above it that have its size, are resized as well.
    /// Await the future on `event_loop`. If it is dropped, a resize that has begun
    /// [continues](Self::resized).
    ///
    /// # Errors
    ///
    /// There is no such node, its size is fixed, or a bitmap is in use or inconsistent.
    pub fn resize(
        &self,
        name: &str,
        size: u64,
        event_loop: &EventLoop,
    ) -> Result<impl Future<Output = Result<(), ResizeError>> + use<>, OpenError> {
        let node = self.node(name)?;
        let whose = self.whose_size(name);
        let tracking = self.tracking_of_size(name, node.geometry().size)?;
        let has_bitmaps = check_bitmaps(name, &tracking, size)?;
        let (users, turn) = (self.edges(whose), self.resizing.turn_of(whose));
        let (event_loop, all) = (event_loop.clone(), self.all_users());
        let name = name.to_owned();
        // Taken at once if possible, so that `resized` waits for this resize from now on.
        let taken = turn.clone().try_lock_owned();
        Ok(async move {
            let turn = match taken {
                Ok(turn) => turn,
                Err(_) => turn.lock_owned().await,
            };
            let drained = match size < node.geometry().size {
                true => Some(drain(users).await.map_err(|_| ResizeError::Busy)?),
                false => None,
            };
            let (done, resized) = oneshot::channel();
            let on = event_loop.clone();
            event_loop.spawn(async move {
                let before = node.geometry().size;
                let resize = |size| tracking.iter().for_each(|of| of.resize_bitmaps(size));
                if has_bitmaps && size > before {
                    // The bitmaps grow before the new range can be written.
                    let _held = hold(all.clone()).await;
                    resize(size);
                }
                let outcome = node.clone().resize(size, &on).await;
                let now = node.geometry().size;
                if has_bitmaps && now != size.max(before) {
                    let _held = if drained.is_none() { Some(hold(all).await) } else { None };
                    resize(now);
                }
                drop((drained, turn));
                for tracking in &tracking {
                    tracking.secure(&name, &on).await;
                }
                done.send(outcome);
            });
            let what = "Could not resize image";
            resized.await.unwrap_or(Err(ResizeError::Os { what, errno: Errno::ECANCELED }))
        })
    }

    /// Waits until no node is being given another size.
    ///
    /// Before the nodes go: what is cut off then leaves writes to the image under way.
    pub fn resized(&self) -> impl Future<Output = ()> + use<> {
        let turns: Vec<_> = lock(&self.resizing.0).values().cloned().collect();
        async move {
            for turn in turns {
                drop(turn.lock().await);
            }
        }
    }

    /// Waits until the node that a node has its size from is not being given another one.
    ///
    /// # Errors
    ///
    /// There is no node with that name.
    pub fn resized_of(&self, name: &str) -> Result<impl Future<Output = ()> + use<>, OpenError> {
        self.node(name)?;
        let turn = lock(&self.resizing.0).get(self.whose_size(name)).cloned();
        Ok(async move {
            if let Some(turn) = turn {
                drop(turn.lock().await);
            }
        })
    }

    /// Returns the trackers of all nodes that are resized with the node `name`, which has `size` bytes.
    ///
    /// # Errors
    ///
    /// A bitmap is of another size.
    fn tracking_of_size(&self, name: &str, size: u64) -> Result<Vec<Arc<Tracking>>, OpenError> {
        let path = self.path_of_size(name);
        let above = self.above_of_its_size(self.whose_size(name));
        let others = above.iter().filter(|other| !path.contains(other));
        let mut watched = Vec::new();
        for node in others.chain(&path) {
            let Some(tracking) = self.tracking(node) else { continue };
            let bitmaps = tracking.bitmaps();
            // Inconsistent bitmaps have no bits.
            let other_size = |bitmap: &&Arc<DirtyBitmap>| {
                bitmap.storage() != Storage::Inconsistent && bitmap.bits().size() != size
            };
            if let Some(bitmap) = bitmaps.iter().find(other_size) {
                return Err(OpenError::new(format!(
                    "Bitmap '{}' of '{node}' is of another size than '{name}'",
                    bitmap.name()
                ))
                .with_hint("Remove the bitmap."));
            }
            watched.push(tracking.clone());
        }
        Ok(watched)
    }

    /// Returns the name of the node that determines this node's size: itself, or one below it.
    fn whose_size<'a>(&'a self, name: &'a str) -> &'a str {
        self.path_of_size(name).last().copied().unwrap_or(name)
    }

    /// Returns the names of this node and of those below it, down to the one that determines its size.
    fn path_of_size<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        let mut path = vec![name];
        while let Some(entry) = path.last().and_then(|name| self.nodes.get(*name))
            && matches!(entry.options.driver.layer(), Layer::Window | Layer::Filter)
            && let Some(child) = entry.children.first()
            && let Some((below, _)) = self.nodes.get_key_value(child.edge.node().name())
        {
            path.push(below);
        }
        path
    }
}

/// Checks that all bitmaps can be resized. Returns whether there are any. The messages but the last are QEMU's.
pub(super) fn check_bitmaps(
    name: &str,
    tracking: &[Arc<Tracking>],
    size: u64,
) -> Result<bool, OpenError> {
    let bitmaps: Vec<_> = tracking.iter().flat_map(|tracking| tracking.bitmaps()).collect();
    let inconsistent = |bitmap: &&Arc<DirtyBitmap>| bitmap.storage() == Storage::Inconsistent;
    if let Some(bitmap) = bitmaps.iter().rev().find(inconsistent) {
        let bitmap = bitmap.name();
        return Err(OpenError::new(format!(
            "Bitmap '{bitmap}' is inconsistent and cannot be used"
        )));
    }
    if let Some(busy) = bitmaps.iter().find(|bitmap| bitmap.is_busy()) {
        return Err(OpenError::new(format!("Bitmap '{}' of '{name}' is in use", busy.name())));
    }
    for bitmap in &bitmaps {
        let granularity = bitmap.bits().granularity();
        if size.div_ceil(granularity) > MAX_PARTS {
            return Err(OpenError::new(format!(
                "Bitmap '{}' of '{name}' would have more than {MAX_PARTS} parts of {granularity} bytes",
                bitmap.name()
            ))
            .with_hint("Remove the bitmap, or make it with a larger granularity."));
        }
    }
    Ok(!bitmaps.is_empty())
}
