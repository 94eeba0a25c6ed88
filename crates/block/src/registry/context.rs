//! What a driver opens a node with.

use std::sync::Arc;

use event_loop::IoThread;

use super::{Child, NodeRegistry, child};
use crate::drivers::throttle::ThrottleGroup;
use crate::error::OpenError;
use crate::node::BlockNode;
use crate::options::BlockdevOptions;

/// A node that is being opened: its name, its options and what is there for it.
pub struct OpenContext<'a> {
    pub(super) registry: &'a mut NodeRegistry,
    pub(super) name: String,
    pub(super) options: &'a BlockdevOptions,
    pub(super) children: &'a mut Vec<Child>,
}

impl OpenContext<'_> {
    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the options that every driver has, and with them the driver's own.
    pub fn options(&self) -> &BlockdevOptions {
        self.options
    }

    /// Returns the child with that role.
    ///
    /// # Errors
    ///
    /// The options name none, and the driver has not opened one.
    pub fn child(&self, role: &str) -> Result<Arc<dyn BlockNode>, OpenError> {
        child(self.children, role, &self.name)
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

    /// Returns what [`BlockDriver::connect`](crate::driver::BlockDriver::connect) has made for the node.
    ///
    /// # Errors
    ///
    /// Those of connecting; or what was made is no `T`.
    pub fn connection<T: 'static>(&mut self) -> Result<T, OpenError> {
        let connection = self.registry.connections.take(&self.options.driver)?.downcast();
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

    /// Whether the node is opened for a look at an image that another process uses: no lock, no warning.
    pub fn is_look(&self) -> bool {
        self.registry.looks
    }
}
