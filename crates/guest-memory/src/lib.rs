//! A guest's memory as received from a vhost-user front end: regions, translation, access.
//!
//! The control plane maps each region it gets ([`Region::map`]) and keeps the set in a
//! [`GuestMemory`], immutable and shared by `Arc`; adding or removing a region makes a new set.
//! Each I/O thread accesses the set through its own [`MemoryView`], which remembers recently used regions. So most
//! translations are a subtraction and a comparison. A mapping lives until its last user is dropped: a set, a view, a
//! ring, or an operation in flight ([`IoBufs`](event_loop::IoBufs) own their view).
//!
//! The guest may write its memory at any time, so no Rust reference to it exists. Volatile accesses copy it, or the
//! kernel gets it as segments. Each value is read once and then checked.
//!
//! During a migration, writes through a view are recorded in a [`DirtyLog`].
//!
//! [`Region::map`] refuses regions that extend past their file's end. A front end that shrinks the file later affects
//! only its own guest: see [`losses`]. All regions together are limited: see [`MAX_MAPPED`]. A separate
//! thread unmaps large regions: see [`release()`].

mod access;
mod any_thread;
mod bus_error;
mod dirty;
mod error;
mod limits;
mod mapping;
mod memory;
mod read_only;
mod region;
mod registered;
mod release;
#[cfg(feature = "test-util")]
pub mod test_util;
mod view;

pub use access::prefetch;
pub use bus_error::losses;
pub use dirty::{DirtyLog, LOG_PAGE, Logging};
pub use error::{AccessError, Error};
pub use limits::{MAX_MAPPED, MAX_REGIONS, default_max_memory};
pub use mapping::is_elsewhere;
pub use memory::{GuestMemory, RingArea, Source};
pub use read_only::ReadOnly;
pub use region::{MappedRegion, Region};
pub use registered::RegisteredRegion;
pub use release::{is_large, release};
pub use view::MemoryView;
