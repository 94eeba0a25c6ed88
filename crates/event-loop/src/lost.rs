//! Detection of memory that another process takes away.
//!
//! A guest's memory is a mapping of a file that its front end may shrink. The code that maps such memory
//! replaces lost pages, so that the program survives, and counts the loss here. Code that copies out of
//! memory that may be a guest's calls [`IoBufs::is_lost`] afterwards, which asks the [`MemoryOwner`].
//!
//! [`IoBufs::is_lost`]: crate::IoBufs::is_lost
//! [`MemoryOwner`]: crate::MemoryOwner

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of losses in this process.
static LOSSES: AtomicUsize = AtomicUsize::new(0);

/// Records a loss of memory. Call before the lost pages can be read as something else. Async-signal-safe.
pub fn lost() {
    LOSSES.fetch_add(1, Ordering::Release);
}

/// Returns the number of losses in this process.
#[inline]
pub fn losses() -> usize {
    LOSSES.load(Ordering::Acquire)
}
