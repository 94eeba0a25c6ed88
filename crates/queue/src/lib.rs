//! The device side of split virtqueues (virtio 1.3, section 2.7), for one thread.
//!
//! | Step | Method |
//! |---|---|
//! | take a descriptor chain from the available ring | [`Queue::pop`] fills a [`Chain`] |
//! | put a chain into the used ring, in any order | [`Queue::add_used`] |
//! | publish the used ring with one store | [`Queue::publish`] returns whether to signal |
//!
//! All methods take `&self`, so a completion can be handled while a batch is popped.
//!
//! With a record of requests [in flight](Inflight), a queue can be recovered after its process was killed: requests
//! without an answer are popped again first.
//!
//! The driver may be hostile. Each field of a ring is read once, checked, and kept in a type that cannot be wrong
//! afterwards. A [`QueueError`] breaks its queue alone. Whether the buffers of a chain lie in memory is checked when
//! they are accessed ([`Segments`]). Deviations that drivers in the field are known for, and that leave no doubt, are
//! served ([`Quirk`]).

mod avail;
mod chain;
#[cfg(feature = "driver")]
pub mod driver;
mod error;
mod inflight;
mod lookahead;
pub mod pause;
mod queue;
mod quirks;
mod ring;
mod segments;
mod used;

pub use chain::{Chain, MAX_SEGMENTS};
pub use error::{QueueError, SegmentsError};
pub use inflight::Inflight;
pub use queue::{Queue, QueueConfig};
pub use quirks::Quirk;
pub use ring::{Descriptor, used_ring_len};
pub use segments::{Segment, Segments};
