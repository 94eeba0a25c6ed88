//! What an export reports of its requests: counters and latencies per queue, failures, and the requests in
//! flight. The same for each protocol.
#![forbid(unsafe_code)]

mod bins;
mod failures;
mod queue;

pub use bins::Bins;
pub use failures::{Failure, Failures};
pub use queue::{Batch, Kind, KindNumbers, QueueNumbers, QueueStats};

/// A request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlight {
    /// A number that is unique within its queue until the queue is started again.
    pub id: u64,
    /// The kind under which the request is counted.
    pub kind: Kind,
    /// The number of the logical unit, for devices with several.
    pub lun: Option<u16>,
    /// First byte on the disk.
    pub offset: u64,
    /// Length, bytes; 0 for a flush.
    pub len: u64,
    /// Loop time at which the request was taken, nanoseconds.
    pub started_ns: u64,
}
