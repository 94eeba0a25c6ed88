//! virtio-scsi (virtio 1.3, section 5.6): one target with logical units that are disks.
//!
//! The way of a command: `requests` takes a chain off a request queue, `cdb` makes a command of it
//! that cannot be wrong any more, `execute` says what is to be done: an answer of the device's own
//! (`answers`, `inquiry`, `mode`, `opcodes`) or a request to the logical unit's block node;
//! `complete` writes the response. The virtqueue itself is [`virtio`](crate::virtio)'s.
//!
//! A device has a [`DeviceOnLoop`] on each loop that has queues of it. What concerns commands of all
//! queues, task management, goes to all of them as an order (`tasks`).

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
