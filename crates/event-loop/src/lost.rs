//! Memory that somebody else can take away: a guest's, whose front end may shrink the file that it is
//! a mapping of. Who maps such memory replaces it when that happens (the program goes on), and says
//! so here; who copies out of memory that may be a guest's asks [`IoBufs::is_lost`] afterwards.
//!
//! [`IoBufs::is_lost`]: crate::IoBufs::is_lost

use std::any::Any;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How often memory was lost since the process began.
static LOSSES: AtomicUsize = AtomicUsize::new(0);
/// Tells of an owner of memory whether some of it was lost.
static ASK: OnceLock<fn(&dyn Any) -> bool> = OnceLock::new();

/// Says how to find out whether an owner of [`IoBufs`](crate::IoBufs) has lost memory. The first who
/// says it is asked.
pub fn ask_by(ask: fn(&dyn Any) -> bool) {
    ASK.get_or_init(|| ask);
}

/// Says that memory was lost, before anybody goes on with what is in its place. Async-signal-safe.
pub fn lost() {
    LOSSES.fetch_add(1, Ordering::Release);
}

/// How often memory was lost since the process began.
#[inline]
pub fn losses() -> usize {
    LOSSES.load(Ordering::Acquire)
}

/// Whether this owner has lost memory.
#[cold]
pub(crate) fn has_lost(owner: &dyn Any) -> bool {
    ASK.get().is_some_and(|ask| ask(owner))
}
