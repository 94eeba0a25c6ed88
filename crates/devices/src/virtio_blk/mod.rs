//! virtio-blk (virtio 1.3, section 5.2).
//!
//! The way of a request: `handler` takes a chain off the queue, `parse` makes a request of it that
//! cannot be wrong any more, the handler submits that to the block node's channel, `complete` writes
//! the status and, once per batch, publishes and signals.

mod complete;
mod device;
mod handler;
mod parse;
mod slots;
pub(crate) mod stats;
mod wire;

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use guest_memory::MemoryView;
use queue::QueueError;

pub use device::{ConfigError, Device, DeviceConfig, DeviceError};
pub use handler::QueueHandler;
pub use stats::QueueStats;
pub use wire::CONFIG_SIZE;

impl crate::virtio::Virtqueue for QueueHandler {
    fn set_enabled(&self, enabled: bool) {
        self.set_enabled(enabled);
    }

    fn set_call(&self, call: Option<Arc<OwnedFd>>) {
        self.set_call(call);
    }

    fn set_err(&self, err: Option<Arc<OwnedFd>>) {
        self.set_err(err);
    }

    fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError> {
        self.replace_memory(memory)
    }

    fn stop(&self, done: Box<dyn FnOnce(u16)>) {
        self.stop(done);
    }
}
