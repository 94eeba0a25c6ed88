//! virtio-blk (virtio 1.3, section 5.2).
//!
//! The way of a request: a queue [at work](crate::virtio) takes a chain, `parse` makes a request of
//! it that cannot be wrong any more, `requests` submits that to the block node's channel, `complete`
//! writes the status.

mod complete;
mod device;
mod parse;
mod requests;
mod slots;
mod wire;

pub use device::{ConfigError, Device, DeviceConfig, DeviceError};
pub use requests::start_queue;
pub use wire::CONFIG_SIZE;
