//! What a node needs that takes its time, made before the node is opened.

use std::any::Any;

use event_loop::{EventLoop, LoopConfig};

use crate::error::OpenError;
use crate::options::{BlockdevOptions, BlockdevRef, Driver};

/// Connections to the servers of nodes that are to be opened.
#[derive(Default)]
pub struct Connections(Vec<(Driver, Box<dyn Any + Send>)>);

impl Connections {
    /// Connects to the servers of all nodes among these options, nested ones included.
    ///
    /// Takes as long as those servers take: of an `nbd` node, 10 seconds at most, or its `open-timeout` besides.
    /// `event_loop` goes on meanwhile.
    ///
    /// # Errors
    ///
    /// As of [`NodeRegistry::open`](crate::NodeRegistry::open).
    pub async fn new(event_loop: &EventLoop, options: &BlockdevOptions) -> Result<Self, OpenError> {
        let mut connections = Vec::new();
        let mut unseen = vec![options];
        while let Some(BlockdevOptions { driver, .. }) = unseen.pop() {
            if let Some(connecting) = driver.connect(event_loop) {
                connections.push((driver.clone(), connecting.await?));
            }
            unseen.extend(driver.children().into_iter().filter_map(|child| match child.node {
                BlockdevRef::Inline(options) => Some(&**options),
                BlockdevRef::Name(_) => None,
            }));
        }
        Ok(Connections(connections))
    }

    /// Returns the connection of a node with these options. If there is none, a loop of its own makes it now.
    pub(crate) fn take(&mut self, driver: &Driver) -> Result<Box<dyn Any + Send>, OpenError> {
        if let Some(index) = self.0.iter().position(|(of, _)| of == driver) {
            return Ok(self.0.swap_remove(index).1);
        }
        let failed =
            |error: &dyn std::fmt::Display| OpenError::new(format!("connecting failed: {error}"));
        let event_loop = EventLoop::new(LoopConfig::default()).map_err(|error| failed(&error))?;
        let Some(connecting) = driver.connect(&event_loop) else {
            return Err(OpenError::new("connecting failed: the driver makes no connections"));
        };
        event_loop.block_on(connecting).map_err(|error| failed(&error))?
    }
}
