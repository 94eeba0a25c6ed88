//! The policy before the weighted one: each source has a window of its own, which doubles while it
//! is too short and is given up when the interval exceeds the maximum. The loop polls for the largest
//! window in the polling set, of sources with an event and without.
//!
//! After the first polling of QEMU's AioContext, as its documentation of `poll-max-ns`, `poll-grow` and
//! `poll-shrink` has it. Kept to be compared with.

use super::policy::PollParams;

/// What a window begins with.
const FIRST_NS: u64 = 4_000;

/// A source had an event `interval` ns after the wait began: its window, `ns`, follows.
pub fn update(ns: &mut u64, params: &PollParams, interval: u64) {
    if interval <= *ns {
        // Polling found it, or would have.
    } else if interval > params.max_ns {
        *ns = if params.shrink == 0 { 0 } else { *ns / u64::from(params.shrink) };
    } else {
        let grown = if *ns == 0 { FIRST_NS } else { ns.saturating_mul(params.grow()) };
        *ns = grown.min(params.max_ns);
    }
}
