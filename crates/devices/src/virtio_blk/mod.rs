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
mod stats;
mod wire;

pub use device::{ConfigError, Device, DeviceConfig, DeviceError};
pub use handler::QueueHandler;
pub use stats::QueueStats;
pub use wire::CONFIG_SIZE;
