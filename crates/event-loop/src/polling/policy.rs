//! What the polling policies have in common: their parameters, what they keep per source, and the
//! steps in which the loop asks them. Pure values, no clock and no I/O.

use super::histogram::Histogram;
use super::{stepped, weighted};

/// How the window is chosen, `poll-policy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PollPolicy {
    /// By what polling has lately been worth, see [`histogram`](super::histogram).
    #[default]
    Histogram,
    /// By a weighted mean per source, as QEMU does it since, see [`weighted`].
    Weighted,
    /// By doubling and resetting per source, as QEMU did it first, see [`stepped`].
    Stepped,
}

/// An I/O thread's polling parameters, changeable while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollParams {
    /// `poll-policy`: how the window is chosen.
    pub policy: PollPolicy,
    /// `poll-max-ns`: the longest window, nanoseconds. 0 turns polling off.
    pub max_ns: u64,
    /// `poll-grow`: the factor the window grows by. 0 means the default, 2.
    pub grow: u32,
    /// `poll-shrink`: the divisor it shrinks by. 0 means the default: 2, and with
    /// [`PollPolicy::Stepped`] to nothing at once.
    pub shrink: u32,
    /// `poll-weight`: a new interval counts 1/2^weight. 0 means the default, 3; at most 63.
    pub weight: u32,
}

impl Default for PollParams {
    fn default() -> Self {
        PollParams { policy: PollPolicy::default(), max_ns: 32768, grow: 0, shrink: 0, weight: 0 }
    }
}

impl PollParams {
    pub(super) fn grow(&self) -> u64 {
        if self.grow == 0 { 2 } else { self.grow.into() }
    }

    pub(super) fn shrink(&self) -> u64 {
        if self.shrink == 0 { 2 } else { self.shrink.into() }
    }

    pub(super) fn weight(&self) -> u32 {
        if self.weight == 0 { 3 } else { self.weight.min(63) }
    }
}

/// What kind of source an event came from: a policy may expect different things after each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// The completion ring.
    Ring,
    /// A handler: a virtqueue, say.
    Handler,
    /// Messages from other threads.
    Inbox,
}

/// A wait, as [`EventLoop::record_waits`](crate::EventLoop::record_waits) records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// From its start to its events, nanoseconds; the time to wake up included, if it was slept.
    pub interval_ns: u64,
    /// Operations of the loop's own had completed.
    pub by_ring: bool,
    /// A handler or the inbox had an event.
    pub by_others: bool,
    /// Operations are in flight afterwards.
    pub in_flight: bool,
}

/// What a policy keeps per source. A new one, and one after a change of policy, is the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceState {
    /// [`PollPolicy::Weighted`]: the mean interval, nanoseconds, 0 when polling is not worth it.
    /// [`PollPolicy::Stepped`]: the source's own window.
    pub ns: u64,
}

/// A loop's policy with its state.
///
/// At the end of each iteration that had events: [`begin`](Self::begin), then
/// [`account`](Self::account) for each source in the polling set, then [`end`](Self::end).
#[derive(Debug, Clone, Default)]
pub struct Policy {
    window_ns: u64,
    interval: u64,
    /// The largest that sources have asked for in this iteration, if any has.
    best: Option<u64>,
    /// [`PollPolicy::Histogram`]: the window that the weighted policy would choose.
    weighted_ns: u64,
    histogram: Histogram,
}

impl Policy {
    /// How long to poll before sleeping, nanoseconds, at most `poll-max-ns`. 0: not at all.
    pub fn window_ns(&self) -> u64 {
        self.window_ns
    }

    /// The parameters have changed: a smaller maximum holds at once, another policy begins anew.
    pub fn change(&mut self, before: &PollParams, after: &PollParams) {
        if before.policy != after.policy {
            *self = Policy::default();
        }
        self.window_ns = self.window_ns.min(after.max_ns);
        self.weighted_ns = self.weighted_ns.min(after.max_ns);
    }

    /// An iteration took `interval` ns from the start of its wait to its events.
    pub fn begin(&mut self, interval: u64) {
        self.interval = interval;
        self.best = None;
        self.histogram.begin();
    }

    /// One source, and whether it was one of those with an event.
    pub fn account(
        &mut self,
        params: &PollParams,
        source: &mut SourceState,
        kind: SourceKind,
        had_event: bool,
    ) {
        let asks = match params.policy {
            PollPolicy::Histogram | PollPolicy::Weighted => {
                self.histogram.account(kind, had_event);
                weighted::update(&mut source.ns, params, self.interval, had_event);
                had_event
            }
            PollPolicy::Stepped => {
                if had_event {
                    stepped::update(&mut source.ns, params, self.interval);
                }
                true
            }
        };
        if asks {
            self.best = self.best.max(Some(source.ns));
        }
    }

    /// All sources are accounted for: what becomes of the window. `in_flight`: operations of the loop's
    /// own are under way.
    pub fn end(&mut self, params: &PollParams, in_flight: bool) {
        let before = self.window_ns;
        self.window_ns = match (params.policy, self.best) {
            (PollPolicy::Histogram, best) => {
                if let Some(best) = best {
                    self.weighted_ns = weighted::follow(self.weighted_ns, params, best);
                }
                self.histogram.end(params, self.interval, in_flight, self.weighted_ns)
            }
            (_, None) => before,
            (PollPolicy::Weighted, Some(best)) => weighted::follow(before, params, best),
            (PollPolicy::Stepped, Some(best)) => best.min(params.max_ns),
        };
    }
}
