//! What this server asks of a device: the seam between the protocol, which is the same for all
//! devices, and the device models.
//!
//! A device is seen from two sides, as everything here: [`Device`] by the control plane, shared
//! between threads; [`DeviceOnLoop`] and [`Virtqueue`] by the I/O thread that they live on.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::flush::FlushDone;
use block::node::Watcher;
use devices::virtio::{CacheRecord, Virtqueue};
use event_loop::{EventLoop, Signal};
use queue::Queue;

/// A virtio device, as the control plane knows it.
pub trait Device: Send + Sync {
    /// Returns the feature bits of the device type (virtio 1.3, section 5).
    ///
    /// Those of queues and transport are the server's.
    fn features(&self) -> u64;

    /// Sets the bits of the features that the driver accepted.
    ///
    /// They are some of [`features`](Self::features) and of the server's.
    fn set_features(&self, negotiated: u64);

    /// Resets the device to its power-on state, its configuration included.
    fn reset(&self);

    /// Returns the number of queues, at least one.
    fn num_queues(&self) -> u16;

    /// Returns whether front ends read the configuration space from the device.
    ///
    /// QEMU keeps the configuration space of virtio-scsi itself, and warns of a back end that offers one.
    fn has_config(&self) -> bool {
        true
    }

    /// Returns its configuration space as the driver sees it now.
    fn config_space(&self) -> Vec<u8>;

    /// Writes to the configuration space from byte `offset` on. Returns what was ignored, for the log.
    ///
    /// # Errors
    ///
    /// Why not, for people.
    fn write_config(&self, offset: u32, data: &[u8]) -> Result<Option<String>, String>;

    /// Has `watcher` told when what is behind it has changed.
    fn watch(&self, watcher: &Watcher);

    /// Takes note of such a change. Whether the configuration space shows it.
    fn refresh(&self) -> bool;

    /// Returns what the device remembers of its driver, for the next process.
    ///
    /// Without what messages say. Called while no queue runs.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Continues with what another process has [saved](Self::save).
    ///
    /// Bytes that make no sense are ignored.
    fn restore(&self, _saved: &[u8]) {}

    /// Keeps the write cache mode of the device's disks in `record` from now on.
    ///
    /// Takes over what the record says of the driver already, unless that is less strict. Returns whether
    /// the record says something. Called while no queue runs. `None`: the modes are not kept any more.
    fn keep_write_cache(&self, _record: Option<CacheRecord>) -> bool {
        false
    }

    /// Reports that the answer to the front end's last message is on its way.
    fn answered(&self) {}

    /// Gets ready for queues on this loop. Called on the loop's thread, once.
    ///
    /// # Errors
    ///
    /// When the loop lacks what the device needs.
    fn attach(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>>;
}

/// A device on one loop.
pub trait DeviceOnLoop {
    /// Starts the queue with the number `index`, disabled.
    ///
    /// The queue takes nothing before it is [enabled](Virtqueue::set_enabled).
    ///
    /// `kick` fires when the driver has put buffers in; without it the queue is to be polled.
    fn start_queue(
        &self,
        index: u16,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Signal>,
    ) -> Rc<dyn Virtqueue>;

    /// Makes everything that was answered so far durable, then calls `done`.
    fn flush(&self, done: FlushDone);
}
