//! Inactive nodes: known by name and in use, without image locks.
//!
//! Another process, such as the other side of a migration, finds the image unlocked. Until the node becomes
//! active, its image is open for reading only. Activation opens the image anew: no state from before is
//! kept.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use event_loop::EventLoop;

use super::{Child, Entry, GeneratedNames, Kept, NodeRegistry, Opened, not_found};
use crate::connections::{ConnectContext, Connections};
use crate::driver::{ChildOption, Layer, Look};
use crate::drivers::file::Claims;
use crate::drivers::inactive::InactiveNode;
use crate::error::OpenError;
use crate::flush::flush_for_command;
use crate::graph::{Drained, Edge, drain};
use crate::node::{BlockNode, Geometry};
use crate::options::{BlockdevOptions, BlockdevRef, Discard, Driver};

impl NodeRegistry {
    /// Returns whether the node of that name is active. `true` if there is none.
    pub fn is_active(&self, name: &str) -> bool {
        self.nodes.get(name).is_none_or(|entry| entry.active)
    }

    /// Makes a node and the nodes defined inside it inactive. No active node may lie on them.
    ///
    /// Waits for the nodes' requests, flushes, closes the image and releases its locks. Users stay: reads
    /// and flushes succeed, and all other requests fail with `EPERM`.
    ///
    /// # Errors
    ///
    /// There is no such node, its flush failed, or the graph is being changed there. The nodes are unchanged
    /// then.
    pub async fn inactivate(&mut self, control: &EventLoop, name: &str) -> Result<(), OpenError> {
        let node = self.node(name)?;
        let failed =
            |why: String| OpenError::new(format!("Failed to inactivate node '{name}': {why}"));
        let going = self.with_nested(name);
        let inner: Vec<Child> = going
            .iter()
            .filter_map(|name| self.nodes.get(name))
            .flat_map(|e| e.children.clone())
            .collect();
        let mut users = Vec::new();
        for name in &going {
            let is_inner =
                |edge: &Arc<Edge>| inner.iter().any(|child| Arc::ptr_eq(&child.edge, edge));
            let outer = self.edges(name).into_iter().filter(|edge| !is_inner(edge)).collect();
            users.push(drain(outer).await.map_err(|busy| failed(busy.to_string()))?);
        }
        drop(inner);
        if !node.geometry().read_only {
            let channel = node.clone().open_channel(control).map_err(|e| failed(e.to_string()))?;
            let flushed = flush_for_command(&channel).await;
            flushed.map_err(|errno| failed(errno.desc().to_owned()))?;
        }
        let mut moves = Vec::new();
        for (name, users) in going.iter().zip(users) {
            let options = self.options(name).ok_or_else(|| not_found(name))?;
            let before = self.node(name)?;
            let reader = match has_no_lock(&options) {
                true => Some(before.clone()),
                false => self.connect_reader(control, name, &options).await,
            };
            let inactive = InactiveNode::new(name.clone(), before.geometry(), reader);
            moves.push(Move { users, before, after: Arc::new(inactive) });
        }
        move_users(&moves).await.map_err(|error| failed(error.to_string()))?;
        self.detach_stored_bitmaps(name, &node);
        let locks: Vec<_> =
            going.iter().filter_map(|name| self.locks.get(name)?.upgrade()).collect();
        let edges: Vec<_> = moves.iter().map(|moved| self.edge_to(moved.after.clone())).collect();
        let mut closed = Vec::new();
        for (name, Move { after, .. }) in going.iter().zip(&moves) {
            let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
            let held = match entry.node {
                Kept::Top(_) => Kept::Top(after.clone()),
                Kept::Nested(_) => Kept::Nested(Arc::downgrade(after)),
            };
            closed.push(std::mem::replace(&mut entry.node, held));
            for child in &mut entry.children {
                let inside =
                    edges.iter().find(|edge| edge.node().name() == child.edge.node().name());
                child.edge = inside.unwrap_or(&child.edge).clone();
            }
            entry.active = false;
        }
        drop((node, moves, closed, edges));
        self.forget_closed();
        // A ring may keep the file open a little longer.
        for lock in locks {
            lock.change(Claims::none())?;
        }
        Ok(())
    }

    /// A node's name and those of all that are defined inside it.
    pub(super) fn with_nested(&self, name: &str) -> Vec<String> {
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

    /// Makes an inactive node active: opens its image and locks it. `connections`: made beforehand.
    ///
    /// All nodes that it refers to must be active. Notifies its users of its size, which may have changed.
    ///
    /// # Errors
    ///
    /// As of [`open`](Self::open); then it stays inactive.
    pub async fn activate(
        &mut self,
        name: &str,
        connections: Connections,
    ) -> Result<(), OpenError> {
        self.connections = connections;
        self.set_generated_names(self.generated_names(name));
        let activated = self.activate_connected(name).await;
        self.set_generated_names(GeneratedNames::default());
        self.connections = Connections::default();
        activated
    }

    async fn activate_connected(&mut self, name: &str) -> Result<(), OpenError> {
        let entry = self.nodes.get(name).ok_or_else(|| not_found(name))?;
        if entry.active {
            return Ok(());
        }
        let options = self.options(name).ok_or_else(|| not_found(name))?;
        // The nodes that are opened anew take the names.
        let inside: Vec<_> = self.with_nested(name).into_iter().skip(1).collect();
        let mut inactive: BTreeMap<_, _> =
            inside.into_iter().filter_map(|name| self.nodes.remove_entry(&name)).collect();
        match self.open_over(name, &options, &inactive).await {
            Ok(()) => {
                inactive.clear();
                self.forget_closed();
                Ok(())
            }
            Err(error) => {
                self.nodes.append(&mut inactive);
                Err(error)
            }
        }
    }

    /// Opens a node, and has the users of the inactive node of that name use it. `inactive`: the nodes
    /// inside that one, whose users move too.
    async fn open_over(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        inactive: &BTreeMap<String, Entry>,
    ) -> Result<(), OpenError> {
        let (own_name, own_options) = (name.to_owned(), options.clone());
        let opened = self.apart(Self::around(name, options), move |registry| {
            let mut nested = Vec::new();
            let top = registry.open_tree(own_name, &own_options, &mut nested)?;
            Ok((top, nested))
        });
        let (top, mut nested) = opened.await??;
        if self.grows(name) {
            top.node.enable_growth();
        }
        nested.push(top);
        let mut moves = Vec::new();
        for new in &nested {
            let before = match new.name == name {
                true => Some(self.node(name)?),
                false => inactive.get(&new.name).and_then(Entry::node),
            };
            let Some(before) = before else { continue };
            let uses = |edge: &Arc<Edge>| is_same(&edge.node(), &before);
            let users: Vec<_> = self.edges(&new.name).into_iter().filter(uses).collect();
            if !users.is_empty() {
                self.lock_images(&new.name, &nested)?;
            }
            let users = drain(users).await.map_err(|busy| OpenError::new(busy.to_string()))?;
            moves.push(Move { users, before, after: new.node.clone() });
        }
        move_users(&moves).await.map_err(|error| OpenError::new(error.to_string()))?;
        let Some(top) = nested.pop() else { return Ok(()) };
        self.nodes.extend(nested.into_iter().map(Opened::into_nested));
        let entry = self.nodes.get_mut(name).ok_or_else(|| not_found(name))?;
        let size = top.node.geometry().size;
        entry.node = Kept::Top(top.node);
        entry.children = top.children;
        entry.active = true;
        entry.tracking = top.tracking;
        if let Some(tracking) = &entry.tracking {
            // Another process may have written anywhere. It has kept up bitmaps that are in the image.
            tracking.resize_bitmaps(size);
            tracking.in_memory().iter().for_each(|bitmap| bitmap.bits().set(0, size));
        }
        Ok(())
    }

    /// Opens a node that is to be inactive, and those defined inside it. Their images are looked at without
    /// a lock, for what users of a node have to know: other processes may have them in use.
    pub(super) fn open_inactive(
        &mut self,
        name: String,
        options: &BlockdevOptions,
        nested: &mut Vec<Opened>,
    ) -> Result<Opened, OpenError> {
        let mut children = Vec::new();
        for ChildOption { role, node, .. } in options.driver.children() {
            let edge = match node {
                BlockdevRef::Name(below) => self.get_edge(below)?,
                BlockdevRef::Inline(options) => {
                    let below = self.child_name((&name, role), options, nested)?;
                    let below = self.open_inactive(below, options, nested)?;
                    let edge = self.edge_to(below.node.clone());
                    nested.push(below);
                    edge
                }
            };
            children.push(Child { role, edge });
        }
        let looking = self.for_a_look(options, Look::Geometry)?;
        let looked = self.look(&name, &looking)?.node;
        let geometry = looked.geometry();
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
        let reader = match has_no_lock(options) {
            true => Some(looked),
            false => {
                drop(looked);
                self.open_reader(&name, options)
            }
        };
        let node = Arc::new(InactiveNode::new(name.clone(), geometry, reader));
        Ok(Opened { name, node, options: options.clone(), active: false, children, tracking: None })
    }

    /// Opens an inactive node's image for reading, as [`open_reader`](Self::open_reader) does. `control` runs while
    /// servers of nodes below are connected to.
    async fn connect_reader(
        &mut self,
        control: &EventLoop,
        name: &str,
        options: &BlockdevOptions,
    ) -> Option<Arc<dyn BlockNode>> {
        let reading = self.for_reading(options).ok()?;
        let context = ConnectContext {
            event_loop: control,
            credentials: &self.credentials,
            nodes: self,
            inherited: &|fd| {
                Err(OpenError::new(format!("file descriptor {fd} has been connected already")))
            },
        };
        if let Some(connecting) = Connections::begin(&context, &reading) {
            let connected = connecting.await;
            self.connections = connected.inspect_err(|error| not_readable(name, error)).ok()?;
        }
        let (own_name, around) = (name.to_owned(), Self::around(name, &reading));
        let reader =
            self.apart(around, move |registry| registry.look_to_read(&own_name, &reading)).await;
        self.connections = Connections::default();
        reader.inspect_err(|error| not_readable(name, error)).ok()?
    }

    /// Opens an inactive node's image for reading, without locks on it and on its backing images.
    fn open_reader(&mut self, name: &str, options: &BlockdevOptions) -> Option<Arc<dyn BlockNode>> {
        let reading = self.for_reading(options).ok()?;
        self.look_to_read(name, &reading)
    }

    fn look_to_read(
        &mut self,
        name: &str,
        reading: &BlockdevOptions,
    ) -> Option<Arc<dyn BlockNode>> {
        let opened = self.look(name, reading);
        opened.inspect_err(|error| not_readable(name, error)).ok().map(|opened| opened.node)
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
        let reading = self.for_reading(options)?;
        let registry = NodeRegistry {
            throttle_groups: self.throttle_groups.clone(),
            credentials: self.credentials.clone(),
            services: self.services.clone(),
            ..NodeRegistry::default()
        };
        Ok(ToRead::Options(Box::new(registry), Box::new(reading)))
    }

    /// Opens a node without locks, and without adding its name to the registry.
    fn look(&mut self, name: &str, options: &BlockdevOptions) -> Result<Opened, OpenError> {
        self.looks = true;
        let looked = self.open_tree(name.to_owned(), options, &mut Vec::new());
        self.looks = false;
        looked
    }

    /// Returns options that open the same node for reading, without locks on it and on its backing images.
    fn for_reading(&self, options: &BlockdevOptions) -> Result<BlockdevOptions, OpenError> {
        let mut reading = self.for_a_look(options, Look::Contents)?;
        set_read_only(&mut reading);
        Ok(reading)
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
            let below = match child {
                BlockdevRef::Inline(options) => self.for_a_look(options, look)?,
                BlockdevRef::Name(name) => {
                    let options = self.options(name).ok_or_else(|| not_found(name))?;
                    self.for_a_look(&options, look)?
                }
            };
            Ok(BlockdevRef::Inline(Box::new(below)))
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

fn not_readable(name: &str, error: &OpenError) {
    log::info!("node '{name}' is inactive, not readable: {error}");
}

/// Users that are drained, and the nodes that they leave and get.
struct Move {
    users: Drained,
    before: Arc<dyn BlockNode>,
    after: Arc<dyn BlockNode>,
}

/// Moves users to other nodes: all or none.
async fn move_users(moves: &[Move]) -> io::Result<()> {
    for (at, Move { users, after, .. }) in moves.iter().enumerate() {
        if let Err(error) = users.point_to(after).await {
            for Move { users, before, .. } in moves.iter().take(at) {
                // The loops still have the channels to it, or can open one as before.
                let _ = users.point_to(before).await;
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Whether two nodes are one.
fn is_same(one: &Arc<dyn BlockNode>, other: &Arc<dyn BlockNode>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
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

/// Returns the children that a driver's options name or define: their roles, and what the options say.
pub(super) fn own_children(driver: &Driver) -> Vec<(&'static str, BlockdevRef)> {
    driver.children().into_iter().map(|child| (child.role, child.node.clone())).collect()
}

/// Returns whether the node has no image file to close, such as one of driver `nbd`.
///
/// An inactive node of such a driver keeps its connection, and reads through it.
fn has_no_lock(options: &BlockdevOptions) -> bool {
    let mut driver = options.driver.clone();
    driver.layer() == Layer::Storage
        && driver.local_file().is_none()
        && driver.children().is_empty()
        && driver.look(Look::Contents).is_ok()
}

/// Whether there is a format in it, of which another node than itself was opened.
fn formats(options: &BlockdevOptions) -> bool {
    let is_inside = |child: ChildOption<'_>| match child.node {
        BlockdevRef::Inline(options) => formats(options),
        BlockdevRef::Name(_) => false,
    };
    options.driver.layer() == Layer::Format || options.driver.children().into_iter().any(is_inside)
}
