//! A region that is registered with a loop's ring.

use std::any::Any;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, LoopMemory};

use crate::region::MappedRegion;

/// A region registered with a loop, for views on that loop's thread.
///
/// See [`MemoryView::with_logging`](crate::MemoryView::with_logging). Clones share the region. Views, and so
/// operations in flight, keep it.
#[derive(Debug, Clone)]
pub struct RegisteredRegion {
    region: Arc<MappedRegion>,
    memory: LoopMemory,
}

impl RegisteredRegion {
    /// Registers a region: see [`EventLoop::register_memory`].
    ///
    /// # Errors
    ///
    /// Those of [`EventLoop::register_memory`].
    pub fn new(
        event_loop: &EventLoop,
        region: Arc<MappedRegion>,
    ) -> impl Future<Output = io::Result<Self>> + use<> {
        let owner: Rc<dyn Any> = Rc::new(region.clone());
        // A mapped length fits `usize`.
        let len = region.size() as usize;
        let registering = event_loop.register_memory(owner, region.host(), len);
        async move { Ok(RegisteredRegion { memory: registering.await?, region }) }
    }

    /// Returns the region.
    pub fn region(&self) -> &Arc<MappedRegion> {
        &self.region
    }

    pub(crate) fn memory(&self) -> &LoopMemory {
        &self.memory
    }

    /// Unregisters the region: see [`LoopMemory::unregister`].
    pub async fn unregister(self) {
        self.memory.unregister().await;
    }
}
