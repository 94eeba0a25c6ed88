//! Where others get in between: guests, which write into the same rings, and death.
//!
//! The order of two stores matters only to somebody who looks between them. In a simulation on one
//! thread nobody would, so each such place is announced. Without the feature `sim` that is nothing.

#[cfg(feature = "sim")]
use std::cell::Cell;

#[cfg(feature = "sim")]
thread_local! {
    static CALL: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Has this thread call `call` at each of the places.
#[cfg(feature = "sim")]
pub fn on_pause(call: fn()) {
    CALL.set(Some(call));
}

/// One of the places.
#[inline(always)]
pub(crate) fn pause() {
    #[cfg(feature = "sim")]
    if let Some(call) = CALL.get() {
        call();
    }
}
