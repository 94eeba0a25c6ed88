//! virtio-blk (virtio 1.3, section 5.2).
//!
//! A request's path: a [running queue](crate::virtio) takes a chain, `parse` turns it into a valid request,
//! `requests` submits it to the block node's channel, and `complete` writes the status.

mod complete;
mod device;
mod parse;
mod probes;
mod requests;
mod slots;
mod wire;

pub use device::{ConfigIgnored, Device, DeviceConfig, DeviceError};
pub use requests::start_queue;
pub use wire::CONFIG_SIZE;
