//! What virtio devices have in common: a queue at work on its I/O thread.

mod cache_record;
mod runner;

use std::rc::Rc;

use event_loop::Signal;
use guest_memory::MemoryView;
use queue::QueueError;

use stats::InFlight;

pub use cache_record::CacheRecord;
pub(crate) use cache_record::KeptModes;
pub(crate) use runner::{Broken, RANGE_BYTES, Runner, Service};

/// A started queue of any device, as whoever has started it sees it. Lives on its I/O thread.
pub trait Virtqueue: std::fmt::Debug {
    /// Enables or disables the queue (SET_VRING_ENABLE). What waits in an enabled queue is taken at
    /// once: its kick may have come earlier.
    fn set_enabled(&self, enabled: bool);

    /// Sets the way out for signals (SET_VRING_CALL), and signals it once: what was answered just
    /// before may have gone to another. Without one the driver polls.
    fn set_call(&self, call: Option<Signal>);

    /// Sets where a broken queue is reported (SET_VRING_ERR).
    fn set_err(&self, err: Option<Signal>);

    /// Goes on in new memory (SET_MEM_TABLE while running). Requests in flight finish in the old.
    ///
    /// # Errors
    ///
    /// The rings are not in the new memory; the queue then is broken.
    fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError>;

    /// Has writes to the used ring logged under this guest address (VHOST_VRING_F_LOG), or not.
    fn set_used_log(&self, addr: Option<u64>);

    /// The requests in flight, for those that look for one that takes long. Not for each request.
    fn in_flight(&self) -> Vec<InFlight>;

    /// Takes no more requests, finishes those in flight, then calls `done` with the next available
    /// index, once, maybe before this returns. Stopping twice finishes the first stop's wait.
    fn stop(&self, held: Held, done: Box<dyn FnOnce(u16)>);

    /// Calls a stop back that has not come to its end: `done` is dropped, and requests are taken again once the
    /// queue is [enabled](Self::set_enabled). `false`: it has stopped, or will, since requests were left to
    /// whoever serves it next.
    fn call_back(&self) -> bool;
}

/// What becomes of requests that a policy holds (`werror=stop`) when their queue stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// They are left to whoever serves the queue next, where there is a record of what is in flight.
    Left,
    /// They fail: the guest may be about to go where the record does not follow, with an available index
    /// behind them.
    Failed,
}
