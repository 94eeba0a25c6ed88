//! Nodes whose writes are watched.

use std::sync::Arc;

use event_loop::mailbox;

use super::resize::check_bitmaps;
use super::{Entry, Kept, NodeRegistry, not_found};
use crate::driver::Layer;
use crate::error::OpenError;
use crate::graph::drain;
use crate::node::BlockNode;
use crate::track::{Exceeded, Tracked, Tracking};

/// The bitmaps of nodes that get their size from a node below.
#[derive(Default)]
pub struct BitmapsAbove(Vec<(String, Arc<dyn BlockNode>, Arc<Tracking>)>);

impl BitmapsAbove {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks that all can get that size.
    ///
    /// # Errors
    ///
    /// One is in use or inconsistent, or would take too much memory.
    pub fn check(&self, size: u64) -> Result<(), OpenError> {
        self.0.iter().try_for_each(|(name, _, tracking)| {
            check_bitmaps(name, std::slice::from_ref(tracking), size).map(drop)
        })
    }

    /// Gives all the sizes that their nodes have now. No write of the nodes' users is under way:
    /// [`hold_all`](NodeRegistry::hold_all).
    pub fn resize(&self) {
        for (_, node, tracking) in &self.0 {
            tracking.resize_bitmaps(node.geometry().size);
        }
    }
}

impl NodeRegistry {
    /// Returns a receiver of write thresholds that were exceeded.
    ///
    /// Covers nodes that are watched after this call.
    pub fn exceeded_thresholds(&mut self) -> mailbox::Receiver<Exceeded> {
        let (sender, receiver) = mailbox::channel();
        self.thresholds = Some(Arc::new(sender));
        receiver
    }

    /// Returns the trackers of a node's writes, if there are any.
    pub fn tracking(&self, name: &str) -> Option<&Arc<Tracking>> {
        self.nodes.get(name)?.tracking.as_ref()
    }

    /// Returns the trackers of a node and of the nodes inside it, by name.
    pub fn tracking_within(&self, name: &str) -> Vec<(String, Arc<Tracking>)> {
        let names = self.with_nested(name).into_iter();
        names.filter_map(|name| Some((name.clone(), self.tracking(&name)?.clone()))).collect()
    }

    /// Returns the bitmaps of the nodes above a node that have its size.
    pub fn bitmaps_above(&self, name: &str) -> BitmapsAbove {
        let above = self.above_of_its_size(name).into_iter();
        let watched = above.filter_map(|name| {
            let tracking = self.tracking(name).filter(|tracking| !tracking.bitmaps().is_empty())?;
            Some((name.to_owned(), self.node(name).ok()?, tracking.clone()))
        });
        BitmapsAbove(watched.collect())
    }

    /// The names of the nodes above a node that have its size, at all heights.
    pub(super) fn above_of_its_size(&self, name: &str) -> Vec<&str> {
        let mut names: Vec<&str> = self.right_above(name).collect();
        let mut next = 0;
        while let Some(below) = names.get(next).copied() {
            next += 1;
            names.extend(self.right_above(below));
        }
        names
    }

    /// The filters and windows that have the node as their first child.
    fn right_above<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let follows = move |(_, entry): &(&String, &Entry)| {
            matches!(entry.options.driver.layer(), Layer::Window | Layer::Filter)
                && entry
                    .children
                    .first()
                    .is_some_and(|child| self.below_filter(child.edge.node().name()) == name)
        };
        self.nodes.iter().filter(follows).map(|(above, _)| above.as_str())
    }

    /// Returns whether a node becomes longer as a format that lies on it needs.
    pub fn grows_by_itself(&self, name: &str) -> bool {
        self.grows(name)
    }

    /// Has a node's writes watched from now on, if they are not.
    ///
    /// # Errors
    ///
    /// There is no such node, or the graph is being changed there.
    pub async fn track(&mut self, name: &str) -> Result<Arc<Tracking>, OpenError> {
        if let Some(tracking) = self.tracking(name) {
            return Ok(tracking.clone());
        }
        let node = self.node(name)?;
        let tracking = Arc::new(Tracking::new(name, self.thresholds.clone()));
        let tracked: Arc<dyn BlockNode> = Arc::new(Tracked::new(node.clone(), tracking.clone()));
        let failed = |why: String| OpenError::new(format!("node '{name}': {why}"));
        let users = drain(self.edges(name)).await.map_err(|busy| failed(busy.to_string()))?;
        users.point_to(&tracked).await.map_err(|error| failed(error.to_string()))?;
        let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
        entry.node = match entry.node {
            Kept::Top(_) => Kept::Top(tracked),
            Kept::Nested(_) => Kept::Nested(Arc::downgrade(&tracked)),
        };
        entry.tracking = Some(tracking.clone());
        if let Some(store) = node.bitmap_store() {
            tracking.keep_in(&store, None);
        }
        Ok(tracking)
    }

    /// Gives nodes that were closed and opened again the trackers that they had: bitmaps in memory, and the write threshold.
    /// Bitmaps of an image are opened with the image.
    ///
    /// # Errors
    ///
    /// As [`track`](Self::track).
    pub async fn track_again(
        &mut self,
        before: &[(String, Arc<Tracking>)],
    ) -> Result<(), OpenError> {
        for (name, tracking) in before {
            self.track_one_again(name, tracking).await?;
        }
        Ok(())
    }

    async fn track_one_again(&mut self, name: &str, before: &Tracking) -> Result<(), OpenError> {
        // A node inside another node than the closed one was not closed.
        if self.tracking(name).is_some_and(|now| std::ptr::eq(&**now, before)) {
            return Ok(());
        }
        let (bitmaps, threshold) = (before.in_memory(), before.threshold.get());
        if bitmaps.is_empty() && threshold == 0 {
            return Ok(());
        }
        let tracking = self.track(name).await?;
        bitmaps.into_iter().for_each(|bitmap| tracking.add_bitmap(bitmap));
        tracking.threshold.set(threshold);
        Ok(())
    }

    /// A node that was just opened, watched if its image has bitmaps or if the node of that name was watched before.
    pub(super) fn with_stored_bitmaps(
        &self,
        name: &str,
        node: Arc<dyn BlockNode>,
    ) -> (Arc<dyn BlockNode>, Option<Arc<Tracking>>) {
        let before = self.tracking(name).filter(|_| !self.looks).cloned();
        let store = node.bitmap_store().filter(|_| !self.looks);
        let stored = store.as_ref().map_or_else(Vec::new, |store| store.bitmaps());
        let tracking = match before {
            Some(tracking) => tracking,
            None if stored.is_empty() => return (node, None),
            None => Arc::new(Tracking::new(name, self.thresholds.clone())),
        };
        if let Some(store) = store {
            tracking.set_stored(stored);
            tracking.keep_in(&store, None);
        }
        (Arc::new(Tracked::new(node, tracking.clone())), Some(tracking))
    }

    /// Has a node that is about to be closed store the bitmaps that it has now, and forgets those.
    pub(super) fn detach_stored_bitmaps(&self, name: &str, node: &Arc<dyn BlockNode>) {
        if let (Some(tracking), Some(store)) = (self.tracking(name), node.bitmap_store()) {
            let last = Tracking::new(name, None);
            last.set_stored(tracking.stored());
            store.keep(Arc::new(last));
            tracking.set_stored(Vec::new());
        }
    }

    /// A node that takes the place of the one of that name, watched if that one is.
    pub(super) fn as_tracked(&self, name: &str, node: Arc<dyn BlockNode>) -> Arc<dyn BlockNode> {
        match self.tracking(name) {
            Some(tracking) => Arc::new(Tracked::new(node, tracking.clone())),
            None => node,
        }
    }
}
