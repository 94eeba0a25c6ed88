//! The policy before the weighted one. Each source has its own window. The window doubles while it is too
//! short, and drops to 0 when the interval exceeds the maximum. The loop polls for the largest window in the
//! polling set, of sources with an event and without.
//!
//! It follows the first polling of QEMU's AioContext, as the documentation of `poll-max-ns`, `poll-grow` and
//! `poll-shrink` describes it. Kept for comparison.

use super::policy::PollParams;

/// The first window, nanoseconds.
const FIRST_NS: u64 = 4_000;

/// Updates a source's window of `ns` nanoseconds after an event.
///
/// `interval`: nanoseconds from the start of the wait to the event.
pub fn update(ns: &mut u64, params: &PollParams, interval: u64) {
    if interval <= *ns {
        // The poll found the event, or would have found it.
    } else if interval > params.max_ns {
        *ns = if params.shrink == 0 { 0 } else { *ns / u64::from(params.shrink) };
    } else {
        let grown = if *ns == 0 { FIRST_NS } else { ns.saturating_mul(params.grow()) };
        *ns = grown.min(params.max_ns);
    }
}
