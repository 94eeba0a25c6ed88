//! A guest's memory, as a vhost-user front end hands it over: regions, translation, access.
//!
//! The control plane maps each region it gets ([`Region::map`]) and keeps the set in a
//! [`GuestMemory`], immutable and shared by `Arc`; adding or removing a region makes a new set.
//! Each I/O thread looks at the set through a [`MemoryView`] of its own, which remembers the
//! regions it last hit, so that translating an address is a subtraction and a comparison. A mapping lives
//! until its last user drops: a set, a view, a ring, an operation in flight
//! ([`IoBufs`](event_loop::IoBufs) own their view).
//!
//! The guest may write its memory at any time. So there is never a Rust reference to it: volatile accesses copy
//! it, or the kernel gets it as segments. Each value is read once and then checked.
//!
//! While a guest is migrated, what is written to its memory through a view is marked in a [`DirtyLog`].
//!
//! [`Region::map`] refuses regions that reach past their file's end. A front end that shrinks the file
//! later affects its own guest alone: see [`losses`].

mod access;
mod any_thread;
mod bus_error;
mod dirty;
mod error;
mod mapping;
mod memory;
mod region;
mod registered;
#[cfg(feature = "test-util")]
pub mod test_util;
mod view;

pub use access::prefetch;
pub use bus_error::losses;
pub use dirty::{DirtyLog, LOG_PAGE, Logging};
pub use error::{AccessError, Error};
pub use mapping::is_elsewhere;
pub use memory::{GuestMemory, RingArea};
pub use region::{MappedRegion, Region};
pub use registered::RegisteredRegion;
pub use view::MemoryView;
