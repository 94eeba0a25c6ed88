//! When image locks are taken and released.
//!
//! An image that is written is locked as long as its node is open. A read-only image is locked while its
//! node has users, as in QEMU: the first user takes the lock, and [`NodeRegistry::release_unused_locks`]
//! releases the lock after the last user.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use super::{NodeInfo, NodeRegistry, Opened};
use crate::driver::Layer;
use crate::drivers::file::Claims;
use crate::error::OpenError;
use crate::permissions::{ChildUse, Claim};

impl NodeRegistry {
    /// Locks the read-only images at and below a node, for a user of the node.
    ///
    /// `nested`: opened nodes that are not registered yet.
    ///
    /// # Errors
    ///
    /// An image is in use.
    pub(super) fn lock_images(&self, name: &str, nested: &[Opened]) -> Result<(), OpenError> {
        let name = self.below_filter(name);
        let opened = nested.iter().find(|opened| opened.name == name);
        let opened = opened.map(|opened| (&opened.children, opened.active));
        let entry = self.nodes.get(&name).map(|entry| (&entry.children, entry.active));
        let Some((children, true)) = opened.or(entry) else { return Ok(()) };
        for child in children {
            self.lock_images(child.edge.node().name(), nested)?;
        }
        match self.locks.get(&name).and_then(Weak::upgrade) {
            Some(lock) if lock.claims().is_none() => lock.change_for_reader(),
            Some(_) | None => Ok(()),
        }
    }

    /// Releases the locks of read-only images whose nodes have no users any more.
    pub fn release_unused_locks(&self) {
        let is_read_only = |name: &str| {
            self.nodes
                .get(name)
                .and_then(|entry| entry.node())
                .is_some_and(|node| node.geometry().read_only)
        };
        let held: Vec<_> = self
            .locks
            .iter()
            .filter(|(name, _)| is_read_only(name))
            .filter_map(|(name, lock)| Some((name, lock.upgrade()?)))
            .filter(|(_, lock)| !lock.claims().is_none())
            .collect();
        if held.is_empty() {
            return;
        }
        let used = self.used();
        for (_, lock) in held.into_iter().filter(|(name, _)| !used.contains(*name)) {
            // Claiming less cannot conflict.
            let _ = lock.change(Claims::none());
        }
    }

    /// Removes journals of nodes that were closed on other threads than the one which created this registry.
    ///
    /// The sandbox may forbid these threads to remove files. Called on the registry's thread.
    pub fn remove_left_journals(&self) {
        if let Some(journals) = &self.journals {
            journals.remove_left();
        }
    }

    /// Returns the nodes that QEMU would grant a permission: those with a user at the top, and those below
    /// a node that needs its child even if nothing uses the node.
    fn used(&self) -> BTreeSet<String> {
        let mut above = BTreeMap::new();
        for (name, entry) in &self.nodes {
            for child in &entry.children {
                above.insert(Arc::as_ptr(&child.edge), (name, child.role));
            }
        }
        let edges: Vec<_> = self.edges.borrow().iter().filter_map(Weak::upgrade).collect();
        let mut next: Vec<(String, Claim)> = Vec::new();
        for edge in &edges {
            if !above.contains_key(&Arc::as_ptr(edge)) {
                // A filter of a job has the edge to the node below.
                next.push((self.below_filter(edge.node().name()), Claim::of_reader(true)));
            }
        }
        next.extend(self.nodes.keys().map(|name| (name.clone(), Claim::NOTHING)));
        let mut used = BTreeSet::new();
        while let Some((name, claim)) = next.pop() {
            if claim != Claim::NOTHING && !used.insert(name.clone()) {
                continue;
            }
            let Some(entry) = self.nodes.get(&name).filter(|entry| entry.active) else { continue };
            let writable = entry.node().is_some_and(|node| !node.geometry().read_only);
            let options = entry.options.driver.children();
            for child in &entry.children {
                let option = options.iter().find(|option| option.role == child.role);
                let used_as = match (option, child.role) {
                    (Some(option), _) => option.used_as,
                    (None, "backing") => ChildUse::Backing,
                    // The image's header names a file for its data.
                    (None, _) => ChildUse::Data,
                };
                if is_used(used_as, claim, writable) {
                    let below = self.below_filter(child.edge.node().name());
                    next.push((below, Claim::of_reader(true)));
                }
            }
        }
        used
    }

    /// Releases image locks at shutdown. Only the nodes in `busy` are still in use.
    ///
    /// Keeps locks of images below a busy node, and below a format that writes metadata when it is
    /// closed. Images without their lock may still be flushed.
    pub fn give_up_locks(&self, busy: &[String]) {
        // A node that is being resized is still written to.
        if self.resizing.is_any() {
            return;
        }
        let writes = |info: &NodeInfo<'_>| {
            info.active
                && info.options.driver.layer() == Layer::Format
                && !info.node.geometry().read_only
        };
        let formats = self.all().filter(writes).map(|info| info.name.to_owned());
        let mut needed: Vec<String> = busy.iter().cloned().chain(formats).collect();
        let mut at = 0;
        while let Some(name) = needed.get(at) {
            let children = self.nodes.get(name).map_or(&[][..], |entry| &entry.children);
            let below = children.iter().map(|child| child.edge.node().name().to_owned());
            let below: Vec<_> = below.filter(|name| !needed.contains(name)).collect();
            needed.extend(below);
            at += 1;
        }
        let idle = self.locks.iter().filter(|(name, _)| !needed.contains(name));
        for lock in idle.filter_map(|(_, lock)| lock.upgrade()) {
            // Claiming less cannot conflict.
            let _ = lock.change(Claims::none());
        }
    }
}

/// Whether a node needs its child, which it uses as `used_as`. `above`: what the node's users claim.
pub(super) fn is_used(used_as: ChildUse, above: Claim, writable: bool) -> bool {
    used_as.claim(above, writable) != Claim::NOTHING
}
