//! What all virtio devices share: a queue running on its I/O thread.

mod cache_record;
mod probes;
mod worker;

use std::rc::Rc;

use event_loop::Signal;
use guest_memory::MemoryView;
use queue::QueueError;

use stats::InFlight;

pub use cache_record::CacheRecord;
pub(crate) use cache_record::KeptModes;
pub(crate) use worker::{Broken, RANGE_BYTES, VirtQueueWorker, VirtioBackend};

/// A running queue of any device. Lives on its I/O thread.
pub trait Virtqueue: std::fmt::Debug {
    /// Enables or disables the queue (SET_VRING_ENABLE).
    ///
    /// Enabling takes waiting requests at once, as their kick may have come earlier.
    fn set_enabled(&self, enabled: bool);

    /// Sets the call eventfd (SET_VRING_CALL) and signals it once.
    ///
    /// Earlier answers may have been signalled to another eventfd. `None`: the driver polls.
    fn set_call(&self, call: Option<Signal>);

    /// Sets the eventfd that reports a broken queue (SET_VRING_ERR).
    fn set_err(&self, err: Option<Signal>);

    /// Sets the receiver of texts for the log: why the queue broke, and deviations of its driver that are served.
    ///
    /// Called before the queue is first enabled. The receiver is called on the queue's thread and must not wait.
    fn set_report(&self, report: Report);

    /// Switches to new memory while running (SET_MEM_TABLE).
    ///
    /// Requests in flight finish in the old memory.
    ///
    /// # Errors
    ///
    /// The rings are not in the new memory. The queue is broken then.
    fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError>;

    /// Starts or stops logging writes to the used ring (VHOST_VRING_F_LOG).
    ///
    /// `addr`: the ring's guest address for the log. `None` stops.
    fn set_used_log(&self, addr: Option<u64>);

    /// Returns the requests in flight, for the search of slow requests.
    ///
    /// Too expensive for the data path.
    fn in_flight(&self) -> Vec<InFlight>;

    /// Takes no more requests, and finishes those in flight.
    ///
    /// Then calls `done` once with the next available index, perhaps before this returns. A second stop calls
    /// both.
    fn stop(&self, held: Held, done: Box<dyn FnOnce(u16)>);

    /// Cancels a stop in progress: drops `done`.
    ///
    /// The queue takes requests again once [enabled](Self::set_enabled). Returns `false` if the queue has
    /// stopped or will stop, since requests were left to the next process.
    fn call_back(&self) -> bool;
}

/// Receives a text for the log, without the name of the export.
pub type Report = Rc<dyn Fn(String)>;

/// How a stopping queue treats requests that an error policy holds (`werror=stop`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// They are left to the next process that serves the queue, if a record of requests in flight exists.
    Left,
    /// They fail. The guest may migrate to a host without the record, with an available index beyond them.
    Failed,
}
