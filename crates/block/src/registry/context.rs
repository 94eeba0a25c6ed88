//! What a driver opens a node with.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, Weak};

use event_loop::IoThread;

use super::{Child, NodeRegistry, Opened, child};
use crate::driver::Layer;
use crate::drivers::file::{FileNode, ImageLock};
use crate::drivers::qcow2::{Damages, Journals};
use crate::drivers::throttle::ThrottleGroup;
use crate::error::OpenError;
use crate::inherited::Inherited;
use crate::node::BlockNode;
use crate::options::{BlockdevOptions, BlockdevRef};
use crate::own_mounts::OwnMounts;
use crate::services::DriverServices;
use crate::track::DirtyBitmap;

/// A node that is being opened, with the registry's services.
///
/// It has the node's name, options and children.
pub struct OpenContext<'a> {
    pub(super) registry: &'a mut NodeRegistry,
    pub(super) name: &'a str,
    pub(super) options: &'a BlockdevOptions,
    pub(super) children: &'a mut Vec<Child>,
    /// Nodes that were opened for this one, or for the one on top of it.
    pub(super) nested: &'a mut Vec<Opened>,
}

impl<'a> OpenContext<'a> {
    /// Returns the node's name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the options that every driver has, and with them the driver's own.
    pub fn options(&self) -> &'a BlockdevOptions {
        self.options
    }

    /// Returns the child with that role.
    ///
    /// # Errors
    ///
    /// The options name no such child, and the driver has not opened one.
    pub fn child(&self, role: &str) -> Result<Arc<dyn BlockNode>, OpenError> {
        child(self.children, role, self.name)
    }

    /// Whether the node that this one takes the place of has a child with that role.
    pub fn had_child(&self, role: &str) -> bool {
        self.previous_child(role).is_some()
    }

    /// Takes over a child that the options do not name from the node that this one takes the place of, if that has one.
    pub fn take_child_over(&mut self, role: &str) {
        if let Some(child) = self.previous_child(role) {
            self.children.push(child);
        }
    }

    fn previous_child(&self, role: &str) -> Option<Child> {
        let entry = self.registry.nodes.get(self.name)?;
        entry.children.iter().find(|child| child.role == role).cloned()
    }

    /// Returns the daemon's services for drivers.
    pub fn services(&self) -> &Arc<DriverServices> {
        &self.registry.services
    }

    /// Returns the throttle group of that name.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn throttle_group(&self, name: &str) -> Result<Arc<ThrottleGroup>, OpenError> {
        let group = self.registry.throttle_group(name).cloned();
        group.ok_or_else(|| OpenError::new(format!("Throttle group '{name}' does not exist")))
    }

    /// Returns a dirty bitmap of a node.
    ///
    /// # Errors
    ///
    /// There is no such node, or it has no such bitmap.
    pub fn dirty_bitmap(&self, node: &str, name: &str) -> Result<Arc<DirtyBitmap>, OpenError> {
        self.registry.node(node)?;
        let found = self.registry.tracking(node).and_then(|tracking| tracking.bitmap(name));
        found.ok_or_else(|| OpenError::new(format!("Dirty bitmap '{name}' not found")))
    }

    /// Returns where the bytes of a node of that name are, if there is one.
    pub fn layer_of(&self, name: &str) -> Option<Layer> {
        self.options_of(name).map(|options| options.driver.layer())
    }

    /// The options that a node of that name was opened with: one inside this node, or any other.
    fn options_of(&self, name: &str) -> Option<&BlockdevOptions> {
        let nested = self.nested.iter().find(|opened| opened.name == name);
        nested.map(|opened| &opened.options).or_else(|| self.registry.given_options(name))
    }

    /// Returns the name of the driver of the child with that role.
    pub fn driver_of(&self, role: &str) -> Option<&'static str> {
        let child = self.children.iter().find(|child| child.role == role)?;
        let node = child.edge.node();
        let below = self.registry.below_filter(node.name());
        Some(self.options_of(&below)?.driver.kind().name)
    }

    /// Returns the names of a child's images, the first and those behind it.
    ///
    /// `role` is the child's. Filters are left out.
    pub fn chain_below(&self, role: &str) -> Vec<String> {
        let first = self.children.iter().find(|child| child.role == role);
        let mut names = Vec::new();
        let mut next = first.map(|child| child.edge.node().name().to_owned());
        while let Some(name) = next {
            let below = self.registry.below_filter(&name);
            let nested = self.nested.iter().find(|opened| opened.name == below);
            let entry = self.registry.nodes.get(&below);
            let parts = nested.map(|opened| (&opened.options, &opened.children));
            let Some((options, children)) =
                parts.or_else(|| entry.map(|entry| (&entry.options, &entry.children)))
            else {
                break;
            };
            let is_filter = options.driver.layer() == Layer::Filter;
            let next_child = match is_filter {
                true => children.first(),
                false => children.iter().find(|child| child.role == "backing"),
            };
            next = next_child.map(|child| child.edge.node().name().to_owned());
            if !is_filter {
                names.push(below);
            }
        }
        names
    }

    /// Returns the connection that was made for the node.
    ///
    /// See [`BlockDriver::connect`](crate::driver::BlockDriver::connect).
    ///
    /// # Errors
    ///
    /// Those of connecting; or the connection is not a `T`.
    pub fn connection<T: 'static>(&mut self) -> Result<T, OpenError> {
        let connection = {
            let mut connections = std::mem::take(&mut self.registry.connections);
            let taken = connections.take(&self.options.driver, self.registry);
            self.registry.connections = connections;
            taken?.downcast()
        };
        connection.map(|connection| *connection).map_err(|_| {
            OpenError::new(format!("node '{}' has a connection of another kind", self.name))
        })
    }

    /// Returns the thread that connects anew, for which no loop with requests waits.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn connector(&mut self) -> Result<Arc<IoThread>, OpenError> {
        self.registry.connector()
    }

    /// Returns whether the node is opened only for a look: no lock, no warning.
    ///
    /// Another process uses the image.
    pub fn is_look(&self) -> bool {
        self.registry.looks
    }

    /// Returns whether an image that has to be repaired is not opened.
    pub(crate) fn repairs_apart(&self) -> bool {
        self.registry.repairs_apart
    }

    /// Keeps the image that has to be repaired first, if the error is about one.
    pub(crate) fn noting(&mut self, error: OpenError) -> OpenError {
        let (error, dirty) = error.without_dirty_image();
        self.registry.dirty = dirty;
        error
    }

    /// Opens a child that the image names and the options do not.
    ///
    /// # Errors
    ///
    /// Those of opening that node.
    pub fn open_child(&mut self, role: &'static str, node: &BlockdevRef) -> Result<(), OpenError> {
        let edge = self.registry.open_child((self.name, role), node, self.nested);
        let edge = edge.map_err(|error| error.of_child(role))?;
        self.children.push(Child { role, edge });
        Ok(())
    }

    /// Opens a node for a look, which no node refers to.
    ///
    /// # Errors
    ///
    /// Those of opening that node.
    pub fn open_aside(&mut self, node: &BlockdevRef) -> Result<Arc<dyn BlockNode>, OpenError> {
        match node {
            BlockdevRef::Name(name) => self.registry.node(name),
            BlockdevRef::Inline(options) => {
                let name = self.registry.generate_name();
                Ok(self.registry.open_tree(name, options, &mut Vec::new())?.node)
            }
        }
    }

    /// Returns how many nodes were opened for this one and for those on top of it.
    pub fn opened_below(&self) -> usize {
        self.nested.len()
    }

    /// Returns the path of the file of this host that a node lies in.
    pub fn path_of(&self, node: &BlockdevRef) -> Option<PathBuf> {
        self.registry.path_of(node)
    }

    /// Keeps state for the node that takes the place of this one.
    pub fn keep<T: Any + Send + Sync>(&mut self, state: Arc<T>) {
        let state: Arc<dyn Any + Send + Sync> = state;
        self.registry.kept.insert(self.name.to_owned(), Arc::downgrade(&state));
        self.registry.remembered.insert(self.name.to_owned());
    }

    /// Returns what the node that this one replaces has [kept](Self::keep).
    ///
    /// `None` if that node is no longer open.
    pub fn kept<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.registry.kept.get(self.name)?.upgrade()?.downcast().ok()
    }

    /// The mounts of the daemon's own FUSE exports.
    pub(crate) fn own_mounts(&self) -> OwnMounts {
        self.registry.services.own_mounts().clone()
    }

    /// Images that another process has handed over.
    pub(crate) fn inherited(&mut self) -> &mut Inherited {
        &mut self.registry.inherited
    }

    /// Has a node that is opened anew take over the image's lock, and another process the image.
    pub(crate) fn remember_image(&mut self, path: &Path, node: &FileNode) {
        self.registry.remember_image(self.name, path, node);
    }

    /// The lock of the node that this one takes the place of.
    pub(crate) fn image_lock(&self) -> Option<Arc<ImageLock>> {
        self.registry.locks.get(self.name).and_then(Weak::upgrade)
    }

    /// Whether a flush of the node that this one takes the place of has failed.
    pub(crate) fn flush_failed(&self) -> Option<Arc<AtomicI32>> {
        self.registry.images.flush_failed(self.name)
    }

    /// Where damage of qcow2 images is reported.
    pub(crate) fn damages(&self) -> Option<Damages> {
        self.registry.damages.clone()
    }

    /// The journals of qcow2 images.
    pub(crate) fn journals(&self) -> Option<&Journals> {
        self.registry.journals.as_ref()
    }
}
