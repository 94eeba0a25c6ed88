//! What a node needs that takes its time, made before the node is opened.

use std::fmt;

use event_loop::{EventLoop, LoopConfig};

use crate::drivers::nbd::{self, Connected};
use crate::error::OpenError;
use crate::options::{BlockdevOptions, BlockdevRef, Driver, NbdOptions};

/// Connections to the servers of `nbd` nodes that are to be opened.
#[derive(Default)]
pub struct Connections(Vec<(NbdOptions, Connected)>);

impl Connections {
    /// Connects to the servers of all `nbd` nodes among these options, nested ones included. It takes
    /// as long as those servers take, 10 seconds at most for each, or its `open-timeout` besides;
    /// `event_loop` goes on meanwhile.
    ///
    /// # Errors
    ///
    /// As of [`NodeRegistry::open`](crate::NodeRegistry::open).
    pub async fn new(event_loop: &EventLoop, options: &BlockdevOptions) -> Result<Self, OpenError> {
        let mut connections = Vec::new();
        let mut unseen = vec![options];
        while let Some(options) = unseen.pop() {
            if let Driver::Nbd(nbd) = &options.driver {
                connections.push((nbd.clone(), nbd::connect(event_loop, nbd).await?));
            }
            unseen.extend(options.driver.children().into_iter().filter_map(
                |(_, child)| match child {
                    BlockdevRef::Inline(options) => Some(&**options),
                    BlockdevRef::Name(_) => None,
                },
            ));
        }
        Ok(Connections(connections))
    }

    /// The connection of a node with these options; where none was made, it is made now, by a loop of
    /// its own.
    pub(crate) fn take(&mut self, options: &NbdOptions) -> Result<Connected, OpenError> {
        if let Some(index) = self.0.iter().position(|(of, _)| of == options) {
            return Ok(self.0.swap_remove(index).1);
        }
        let fail = |error: &dyn fmt::Display| OpenError::new(format!("connecting failed: {error}"));
        let event_loop = EventLoop::new(LoopConfig::default()).map_err(|error| fail(&error))?;
        let (on_loop, options) = (event_loop.clone(), options.clone());
        let connecting = async move { nbd::connect(&on_loop, &options).await };
        event_loop.block_on(connecting).map_err(|error| fail(&error))?
    }
}
