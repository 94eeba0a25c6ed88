//! Points at which other parties may act: guests, which write into the same rings, and a kill.
//!
//! The order of two stores matters only if it can be observed in between. In a simulation on one thread it could not
//! be, so each such point calls `pause`. Without the feature `sim` the call does nothing.

#[cfg(feature = "sim")]
use std::cell::Cell;

#[cfg(feature = "sim")]
thread_local! {
    static CALL: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Makes this thread call `call` at each point.
#[cfg(feature = "sim")]
pub fn on_pause(call: fn()) {
    CALL.set(Some(call));
}

/// Lets other parties act, in a simulation.
#[inline(always)]
pub fn pause() {
    #[cfg(feature = "sim")]
    if let Some(call) = CALL.get() {
        call();
    }
}
