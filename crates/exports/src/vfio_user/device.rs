//! What this server asks of a device: the seam between the protocol, which is the same for all PCI
//! devices, and the device models.

#![forbid(unsafe_code)]

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use devices::pci::Description;
use event_loop::oneshot;
use guest_memory::GuestMemory;
use nix::errno::Errno;
use stats::{InFlight, QueueStats};

/// A PCI device, as the control plane knows it.
pub trait Device {
    /// What it is.
    fn description(&self) -> &Description;

    /// Reads registers of a BAR that the description has, within its size.
    fn read_bar(&self, bar: usize, offset: u64, data: &mut [u8]);

    /// Writes registers of a BAR that the description has, within its size.
    fn write_bar(&self, bar: usize, offset: u64, data: &[u8]);

    /// Exchanges the guest's memory. Requests that have begun go on in the old.
    fn set_memory(&self, memory: Arc<GuestMemory>);

    /// Takes it to the state after a power-on. Requests that have begun go on, and are answered to nobody.
    fn reset(&self);

    /// Completes when the requests that have begun before have ended: nothing uses memory then that the device
    /// had before it was exchanged.
    fn settle(&self) -> oneshot::Receiver<()>;

    /// Makes durable what was written.
    fn flush(&self) -> oneshot::Receiver<Result<(), Errno>>;
}

/// Completes when a device is off its I/O thread.
pub type Ended = Pin<Box<dyn Future<Output = ()>>>;

/// A device of an export.
pub trait Served: Device {
    /// The counters of each drive or queue.
    fn stats(&self) -> &[Arc<QueueStats>];

    /// The requests in flight, with the drive or queue that they came by: its place in [`stats`](Self::stats).
    fn in_flight(&self) -> oneshot::Receiver<Vec<(u64, InFlight)>>;

    /// Takes it off its I/O thread. For the last that has it.
    fn end(self: Rc<Self>) -> Ended;
}
