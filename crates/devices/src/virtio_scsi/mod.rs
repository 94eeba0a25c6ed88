//! virtio-scsi (virtio 1.3, section 5.6): one target with logical units that are disks.
//!
//! A command's path: `requests` takes a chain off a request queue, and `cdb` parses a valid command. `execute`
//! decides what to do: either an answer by the device itself (`answers`, `inquiry`, `mode`, `opcodes`), or a
//! request to the logical unit's block node. `complete` writes the response. The virtqueue itself is in
//! [`virtio`](crate::virtio).
//!
//! A device has a [`DeviceOnLoop`] on each loop that runs queues of it. Task management concerns commands of all
//! queues, so it is sent to each of them as an order (`tasks`).

mod answers;
mod cdb;
mod complete;
mod control;
mod device;
mod events;
mod execute;
mod inquiry;
mod lun;
mod mode;
mod on_loop;
mod opcodes;
mod probes;
mod requests;
mod sense;
mod slots;
mod tasks;
mod unmap;
mod wire;

pub use device::{ConfigError, Device, DeviceConfig, DeviceError, MAX_LUNS};
pub use lun::LunConfig;
pub use on_loop::DeviceOnLoop;
pub use wire::{CONFIG_SIZE, FIRST_REQUEST_QUEUE};
