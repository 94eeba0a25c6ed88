//! What this server asks of a device: the seam between the protocol, which is the same for all PCI
//! devices, and the device models.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use devices::pci::Description;
use event_loop::LoopGone;
use guest_memory::GuestMemory;
use nix::errno::Errno;
use stats::{InFlight, QueueStats};

/// A part of a BAR that clients may map and write without messages.
pub struct MappedArea {
    /// The BAR's number, 0 to 5.
    pub bar: usize,
    /// Offset in the BAR, and in the file, in bytes: a multiple of the page size.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
    /// Its memory.
    pub file: OwnedFd,
}

/// A PCI device, as the control plane knows it.
pub trait Device {
    /// Returns the description of the device.
    fn description(&self) -> &Description;

    /// Reads registers of BAR number `bar` from byte `offset` on.
    ///
    /// The description has the BAR, and the range is within its size.
    ///
    /// The description has the BAR.
    fn read_bar(&self, bar: usize, offset: u64, data: &mut [u8]);

    /// Writes registers of BAR number `bar` from byte `offset` on.
    ///
    /// The description has the BAR, and the range is within its size.
    ///
    /// The description has the BAR.
    fn write_bar(&self, bar: usize, offset: u64, data: &[u8]);

    /// Returns the part of a BAR that the client may map, if there is one.
    ///
    /// # Errors
    ///
    /// Its descriptor cannot be duplicated.
    fn mapped_area(&self) -> io::Result<Option<MappedArea>>;

    /// Makes another mapped area for a new client. Earlier clients may still have the previous area mapped.
    ///
    /// Called after a reset.
    ///
    /// # Errors
    ///
    /// It cannot be made.
    fn renew_mapped_area(&self) -> io::Result<()>;

    /// Replaces the guest's memory. Requests in flight keep using the old memory.
    fn set_memory(&self, memory: Arc<GuestMemory>);

    /// Resets the device to its power-on state.
    ///
    /// Requests in flight continue, and their answers are dropped.
    fn reset(&self);

    /// Completes when the requests that have begun before have ended.
    ///
    /// Nothing uses memory then that the device had before it was exchanged.
    fn settle(&self) -> Settled;

    /// Makes durable what was written.
    fn flush(&self) -> Flushed;

    /// Returns how it is handed over to another process.
    fn hands_over(&self) -> &dyn HandsOver;
}

/// Completes when requests have ended.
pub type Settled = Pin<Box<dyn Future<Output = Result<(), LoopGone>>>>;

/// Completes when what was written is durable.
pub type Flushed = Pin<Box<dyn Future<Output = Result<Result<(), Errno>, LoopGone>>>>;

/// Completes with the state of a paused device, in the device's own format.
pub type Paused = Pin<Box<dyn Future<Output = Result<Vec<u8>, LoopGone>>>>;

/// Lets a device continue with a state that was checked.
pub type Restore = Box<dyn FnOnce()>;

/// A device that can be handed over to another process.
pub trait HandsOver {
    /// Takes no more requests.
    ///
    /// Completes with the state when those that have begun are answered.
    fn pause(&self) -> Paused;

    /// Takes requests again.
    fn resume(&self);

    /// Checks the state of another process' device.
    ///
    /// The result is called when the guest's memory is set.
    ///
    /// # Errors
    ///
    /// What is wrong.
    fn check(&self, state: &[u8]) -> Result<Restore, String>;

    /// Replaces the device's mapped area by that of the device in another process.
    ///
    /// A client has mapped that area.
    ///
    /// # Errors
    ///
    /// It has none, or this one cannot be used.
    fn adopt_mapped_area(&self, file: OwnedFd) -> Result<(), String>;
}

/// Completes with the requests in flight.
pub type AllInFlight = Pin<Box<dyn Future<Output = Vec<(u64, InFlight)>>>>;

/// Completes when a device is off its I/O threads.
pub type Ended = Pin<Box<dyn Future<Output = ()>>>;

/// A device of an export.
pub trait Served: Device {
    /// Returns the counters of each drive or queue.
    fn stats(&self) -> &[Arc<QueueStats>];

    /// Returns the requests in flight, each with its drive or queue.
    ///
    /// The number is the place in [`stats`](Self::stats), from 0.
    fn in_flight(&self) -> AllInFlight;

    /// Returns the number of the I/O thread that serves a drive or queue.
    ///
    /// The number is the place among the threads that the device was started with, from 0.
    fn thread_of(&self, queue: usize) -> usize;

    /// Takes it off its I/O threads. For the last that has it.
    fn end(self: Rc<Self>) -> Ended;
}
