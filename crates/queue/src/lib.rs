//! Split virtqueues (virtio 1.3, section 2.7), the device's side, for one thread.
//!
//! A [`Queue`] hands out descriptor chains ([`Queue::pop`] fills a [`Chain`]) and takes them back
//! ([`Queue::add_used`]), in any order; [`Queue::publish`] shows the driver all that were taken
//! back since the last time, with one store, and says whether it wants a signal. All methods take
//! `&self`, so that a completion can be handled while a batch is being popped.
//!
//! With a record of what is [in flight](Inflight) a queue can be taken over from a process that was
//! killed: what that one had not answered is popped again, before all else.
//!
//! The rings are written by the driver, who is hostile until proven otherwise: each field is read
//! once, checked, and kept in a type that is right from then on. A [`QueueError`] breaks that one
//! queue and nothing else. What is not checked here is whether the buffers of a chain are memory:
//! that shows when they are accessed ([`Segments`]).

mod avail;
mod chain;
#[cfg(feature = "driver")]
pub mod driver;
mod error;
mod inflight;
mod lookahead;
pub mod pause;
mod queue;
mod ring;
mod segments;
mod used;

pub use chain::{Chain, MAX_SEGMENTS};
pub use error::{QueueError, SegmentsError};
pub use inflight::Inflight;
pub use queue::{Queue, QueueConfig};
pub use ring::{Descriptor, used_ring_len};
pub use segments::{Segment, Segments};
