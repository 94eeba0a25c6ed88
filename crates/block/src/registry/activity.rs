//! Inactive nodes: known by name and in use, without image locks.
//!
//! Another process, such as the other side of a migration, finds the image unlocked. Until the node becomes
//! active, its image is open for reading only. Activation opens the image anew: no state from before is
//! kept.

use std::sync::Arc;

use event_loop::{EventLoop, IoBufs};

use super::{Child, Kept, NodeRegistry, Opened, not_found};
use crate::driver::{ChildOption, Layer, Look};
use crate::drivers::file::Claims;
use crate::drivers::inactive::InactiveNode;
use crate::error::OpenError;
use crate::graph::drain;
use crate::node::{BlockNode, Geometry};
use crate::options::{BlockdevOptions, BlockdevRef, Discard, Driver};
use crate::request::Op;
use crate::submit::submit;
use crate::track::{DirtyBitmap, Storage};

impl NodeRegistry {
    /// Returns whether the node of that name is active. `true` if there is none.
    pub fn is_active(&self, name: &str) -> bool {
        self.nodes.get(name).is_none_or(|entry| entry.active)
    }

    /// Makes a node inactive. No active node may lie on it.
    ///
    /// Waits for the node's requests, flushes it, closes its image and the nodes defined inside it, and
    /// releases their locks. Its users stay: reads and flushes succeed, and all other requests fail with
    /// `EPERM`.
    ///
    /// # Errors
    ///
    /// There is no such node, its flush failed, or the graph is being changed there. The node is unchanged
    /// then.
    pub async fn inactivate(&mut self, control: &EventLoop, name: &str) -> Result<(), OpenError> {
        let node = self.node(name)?;
        let failed =
            |why: String| OpenError::new(format!("Failed to inactivate node '{name}': {why}"));
        let users = drain(self.edges(name)).await.map_err(|busy| failed(busy.to_string()))?;
        if !node.geometry().read_only {
            let channel = node.clone().open_channel(control).map_err(|e| failed(e.to_string()))?;
            let (flushed, _) = submit(&channel, Op::Flush, 0, 0, IoBufs::new()).await;
            flushed.map_err(|errno| failed(errno.desc().to_owned()))?;
        }
        let options = self.options(name).ok_or_else(|| not_found(name))?.clone();
        let reader = self.open_reader(name, &options);
        let inactive: Arc<dyn BlockNode> =
            Arc::new(InactiveNode::new(name.to_owned(), node.geometry(), reader));
        users.point_to(&inactive).await.map_err(|error| failed(error.to_string()))?;
        self.detach_stored_bitmaps(name, &node);
        let going = self.with_nested(name);
        let locks: Vec<_> =
            going.iter().filter_map(|name| self.locks.get(name)?.upgrade()).collect();
        let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
        let before = std::mem::replace(&mut entry.node, Kept::Top(inactive));
        let named = entry.options.driver.children();
        let stays = |role: &str| {
            named
                .iter()
                .any(|child| child.role == role && matches!(child.node, BlockdevRef::Name(_)))
        };
        let (stay, go): (Vec<_>, Vec<_>) =
            std::mem::take(&mut entry.children).into_iter().partition(|child| stays(child.role));
        entry.children = stay;
        entry.active = false;
        drop((node, before, go, users));
        self.forget_closed();
        // A ring may keep the file open a little longer.
        for lock in locks {
            lock.change(Claims::none())?;
        }
        Ok(())
    }

    /// A node's name and those of all that are defined inside it.
    fn with_nested(&self, name: &str) -> Vec<String> {
        let mut names = vec![name.to_owned()];
        let mut at = 0;
        while let Some(entry) = names.get(at).and_then(|name| self.nodes.get(name)) {
            let below = entry.children.iter().map(|child| child.edge.node().name().to_owned());
            let nested = |name: &String| {
                self.nodes.get(name).is_some_and(|entry| matches!(entry.node, Kept::Nested(_)))
            };
            let below: Vec<_> = below.filter(nested).collect();
            names.extend(below);
            at += 1;
        }
        names
    }

    /// Makes an inactive node active: opens its image and locks it.
    ///
    /// All nodes that it refers to must be active. Notifies its users of its size, which may have changed.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open); then it stays inactive.
    pub async fn activate(&mut self, name: &str) -> Result<(), OpenError> {
        let entry = self.nodes.get(name).ok_or_else(|| not_found(name))?;
        if entry.active {
            return Ok(());
        }
        let options = entry.options.clone();
        let mut nested = Vec::new();
        let top = self.open_tree(name.to_owned(), &options, &mut nested)?;
        if self.grows(name) {
            top.node.enable_growth();
        }
        let users =
            drain(self.edges(name)).await.map_err(|busy| OpenError::new(busy.to_string()))?;
        let node = top.node;
        let pointed = users.point_to(&node).await;
        pointed.map_err(|error| OpenError::new(error.to_string()))?;
        let nested = nested.into_iter().map(|nested| {
            let held = Kept::Nested(Arc::downgrade(&nested.node));
            nested.entry(held)
        });
        self.nodes.extend(nested);
        let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
        let size = node.geometry().size;
        entry.node = Kept::Top(node);
        entry.children = top.children;
        entry.active = true;
        entry.tracking = top.tracking;
        if let Some(tracking) = &entry.tracking {
            // Another process may have written anywhere. It has kept up bitmaps that are in the image.
            tracking.resize_bitmaps(size);
            let in_memory = |bitmap: &Arc<DirtyBitmap>| bitmap.storage() == Storage::Memory;
            let bitmaps = tracking.bitmaps().into_iter().filter(in_memory);
            bitmaps.for_each(|bitmap| bitmap.bits().set(0, size));
        }
        Ok(())
    }

    /// A node that is to be inactive. Its image is looked at, without a lock, for what users of a
    /// node have to know; it may be in use by others meanwhile.
    pub(super) fn open_inactive(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
    ) -> Result<(Arc<dyn BlockNode>, Vec<Child>), OpenError> {
        let mut children = Vec::new();
        for ChildOption { role, node, .. } in options.driver.children() {
            if let BlockdevRef::Name(below) = node {
                children.push(Child { role, edge: self.get_edge(below)? });
            }
        }
        let looking = self.for_a_look(options, Look::Geometry)?;
        let geometry = self.look(name, &looking)?.node.geometry();
        let geometry = match formats(&looking) {
            true if !options.read_only => Geometry {
                read_only: false,
                discard: options.discard == Discard::Unmap,
                write_zeroes: true,
                write_cache: true,
                ..geometry
            },
            _ => geometry,
        };
        let reader = self.open_reader(name, options);
        Ok((Arc::new(InactiveNode::new(name.to_owned(), geometry, reader)), children))
    }

    /// Opens an inactive node's image for reading, without locks on it and on its backing images.
    fn open_reader(&mut self, name: &str, options: &BlockdevOptions) -> Option<Arc<dyn BlockNode>> {
        let mut reading = self.for_a_look(options, Look::Contents).ok()?;
        set_read_only(&mut reading);
        let opened = self.look(name, &reading);
        let why =
            |error: &OpenError| log::info!("node '{name}' is inactive, not readable: {error}");
        opened.inspect_err(why).ok().map(|opened| opened.node)
    }

    /// Returns the way to read a node on another thread: one that is there, or an inline one, which is looked at.
    ///
    /// # Errors
    ///
    /// There is no such node, or a driver has no nodes that can be looked at.
    pub(crate) fn to_read(&self, node: &BlockdevRef) -> Result<ToRead, OpenError> {
        let options = match node {
            BlockdevRef::Name(name) => return self.node(name).map(ToRead::Node),
            BlockdevRef::Inline(options) => options,
        };
        let mut looking = self.for_a_look(options, Look::Contents)?;
        set_read_only(&mut looking);
        let registry = NodeRegistry {
            throttle_groups: self.throttle_groups.clone(),
            credentials: self.credentials.clone(),
            services: self.services.clone(),
            ..NodeRegistry::default()
        };
        Ok(ToRead::Options(Box::new(registry), Box::new(looking)))
    }

    /// Opens a node without locks, and without adding its name to the registry.
    fn look(&mut self, name: &str, options: &BlockdevOptions) -> Result<Opened, OpenError> {
        self.looks = true;
        let looked = self.open_tree(name.to_owned(), options, &mut Vec::new());
        self.looks = false;
        looked
    }

    /// Returns options that open the same node without locks. The nodes have no names, since the nodes that are
    /// referred to are inactive too. Formats, which keep state, are read-only: nothing is written.
    fn for_a_look(
        &self,
        options: &BlockdevOptions,
        look: Look,
    ) -> Result<BlockdevOptions, OpenError> {
        let mut looking = BlockdevOptions { node_name: None, active: true, ..options.clone() };
        let below = |child: &BlockdevRef| -> Result<BlockdevRef, OpenError> {
            let options = match child {
                BlockdevRef::Inline(options) => options.as_ref(),
                BlockdevRef::Name(name) => {
                    &self.nodes.get(name).ok_or_else(|| not_found(name))?.options
                }
            };
            Ok(BlockdevRef::Inline(Box::new(self.for_a_look(options, look)?)))
        };
        let refused = |_| OpenError::new("A node of this driver cannot be inactive");
        looking.driver.look(look).map_err(refused)?;
        looking.read_only |= looking.driver.layer() == Layer::Format;
        for (role, child) in own_children(&looking.driver) {
            looking.driver.set_child(role, below(&child)?);
        }
        Ok(looking)
    }
}

/// A node to be read on another thread.
pub(crate) enum ToRead {
    /// It is open.
    Node(Arc<dyn BlockNode>),
    /// It is to be opened, for a look.
    Options(Box<NodeRegistry>, Box<BlockdevOptions>),
}

impl ToRead {
    /// Opens the node, if it is not open.
    ///
    /// # Errors
    ///
    /// As of [`NodeRegistry::open`].
    pub(crate) fn open(self) -> Result<Arc<dyn BlockNode>, OpenError> {
        match self {
            ToRead::Node(node) => Ok(node),
            ToRead::Options(mut registry, options) => Ok(registry.look("look", &options)?.node),
        }
    }
}

/// Makes the node and all nodes defined inside it read-only.
fn set_read_only(options: &mut BlockdevOptions) {
    options.read_only = true;
    for (role, mut child) in own_children(&options.driver) {
        if let BlockdevRef::Inline(below) = &mut child {
            set_read_only(below);
            options.driver.set_child(role, child);
        }
    }
}

fn own_children(driver: &Driver) -> Vec<(&'static str, BlockdevRef)> {
    driver.children().into_iter().map(|child| (child.role, child.node.clone())).collect()
}

/// Whether there is a format in it, of which another node than itself was opened.
fn formats(options: &BlockdevOptions) -> bool {
    let is_inside = |child: ChildOption<'_>| match child.node {
        BlockdevRef::Inline(options) => formats(options),
        BlockdevRef::Name(_) => false,
    };
    options.driver.layer() == Layer::Format || options.driver.children().into_iter().any(is_inside)
}
