//! Detection of memory that another process takes away.
//!
//! A guest's memory is a mapping of a file that its front end may shrink. The code that maps such memory
//! replaces lost pages, so that the program survives, and reports the loss here. Code that copies out of
//! memory that may be a guest's calls [`IoBufs::is_lost`] afterwards.
//!
//! [`IoBufs::is_lost`]: crate::IoBufs::is_lost

use std::any::Any;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of losses in this process.
static LOSSES: AtomicUsize = AtomicUsize::new(0);
/// Returns whether an owner of memory has lost some of it.
static ASK: OnceLock<fn(&dyn Any) -> bool> = OnceLock::new();

/// Sets the function that returns whether an owner of [`IoBufs`](crate::IoBufs) has lost memory. Only the
/// first call takes effect.
pub fn set_loss_probe(ask: fn(&dyn Any) -> bool) {
    ASK.get_or_init(|| ask);
}

/// Records a loss of memory. Call before the lost pages can be read as something else. Async-signal-safe.
pub fn lost() {
    LOSSES.fetch_add(1, Ordering::Release);
}

/// Returns the number of losses in this process.
#[inline]
pub fn losses() -> usize {
    LOSSES.load(Ordering::Acquire)
}

/// Whether `owner` has lost memory.
#[cold]
pub(crate) fn has_lost(owner: &dyn Any) -> bool {
    ASK.get().is_some_and(|ask| ask(owner))
}
