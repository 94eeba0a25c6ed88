//! What the polling policies have in common: their parameters, what they keep per source, and the
//! steps in which the loop asks them. Pure values, no clock and no I/O.

use super::measured::{Measured, look_ns};
use super::price::Price;
use super::{stepped, weighted};
use crate::stats::LoopStats;

/// How the window is chosen, `poll-policy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PollPolicy {
    /// By what polling and sleeping were measured to cost, see [`measured`](super::measured).
    #[default]
    Measured,
    /// By a weighted mean per source, as QEMU does it since, see [`weighted`].
    Weighted,
    /// By doubling and resetting per source, as QEMU did it first, see [`stepped`].
    Stepped,
    /// Always `poll-max-ns`.
    Fixed,
}

impl PollPolicy {
    /// All policies: the value of `poll-policy`, the policy, and its help.
    pub const ALL: [(&'static str, PollPolicy, &'static str); 4] = [
        ("measured", PollPolicy::Measured, "poll where it was measured to cost less than a sleep"),
        (
            "weighted",
            PollPolicy::Weighted,
            "follow a weighted mean of the intervals between events",
        ),
        ("stepped", PollPolicy::Stepped, "double while too short, reset when too long"),
        ("fixed", PollPolicy::Fixed, "always poll-max-ns"),
    ];
}

/// What polling is for, `poll-goal`, with [`PollPolicy::Measured`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PollGoal {
    /// A microsecond of latency is worth four of CPU time.
    Latency,
    /// A microsecond of latency is worth half of one of CPU time.
    #[default]
    Balanced,
    /// CPU time alone counts: poll where it saves the CPU time of sleeps.
    Cpu,
}

impl PollGoal {
    /// What a latency is worth in CPU time, nanoseconds.
    pub(super) fn worth_of(self, latency_ns: u64) -> u64 {
        match self {
            PollGoal::Latency => latency_ns.saturating_mul(4),
            PollGoal::Balanced => latency_ns / 2,
            PollGoal::Cpu => 0,
        }
    }
}

/// An I/O thread's polling parameters, changeable while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollParams {
    /// `poll-policy`: how the window is chosen.
    pub policy: PollPolicy,
    /// `poll-goal`: what a measured window is for.
    pub goal: PollGoal,
    /// `poll-max-ns`: the longest window, nanoseconds. 0 turns polling off. [`PollPolicy::Measured`] needs
    /// none: it polls for no longer than a sleep is worth.
    pub max_ns: u64,
    /// `poll-grow`: the factor by which the window grows. 0 means the default, 2.
    pub grow: u32,
    /// `poll-shrink`: the divisor it shrinks by. 0 means the default: 2, and with
    /// [`PollPolicy::Stepped`] to nothing at once.
    pub shrink: u32,
    /// `poll-weight`: a new interval counts 1/2^weight. 0 means the default, 3; at most 63.
    pub weight: u32,
}

impl Default for PollParams {
    fn default() -> Self {
        Self::of(PollPolicy::default())
    }
}

impl PollParams {
    /// No polling.
    pub const OFF: Self = PollParams {
        policy: PollPolicy::Measured,
        goal: PollGoal::Balanced,
        max_ns: 0,
        grow: 0,
        shrink: 0,
        weight: 0,
    };

    /// `poll-max-ns` of QEMU's policies, where it is not given.
    pub const QEMU_MAX_NS: u64 = 32_768;

    /// Returns the defaults of `policy`.
    pub fn of(policy: PollPolicy) -> Self {
        let max_ns = match policy {
            PollPolicy::Measured => u64::MAX,
            PollPolicy::Weighted | PollPolicy::Stepped | PollPolicy::Fixed => Self::QEMU_MAX_NS,
        };
        PollParams { policy, max_ns, ..Self::OFF }
    }

    /// Returns the longest time that is polled, in nanoseconds.
    ///
    /// `stats` say what a sleep costs.
    pub fn bound_ns(&self, stats: &LoopStats) -> u64 {
        match self.policy {
            PollPolicy::Measured => self.max_ns.min(look_ns(Price::of(stats), self.goal)),
            PollPolicy::Weighted | PollPolicy::Stepped | PollPolicy::Fixed => self.max_ns,
        }
    }

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

/// The kind of source that an event came from.
///
/// A policy may expect different things after each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// The completion ring.
    Ring,
    /// A handler: a virtqueue, say.
    Handler,
    /// Messages from other threads.
    Inbox,
}

/// What a policy keeps per source.
///
/// A new one, and one after a change of policy, is the default.
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
    measured: Measured,
}

impl Policy {
    /// Returns how long to poll before a sleep, nanoseconds, at most `poll-max-ns`.
    ///
    /// 0: not at all.
    pub fn window_ns(&self) -> u64 {
        self.window_ns
    }

    /// Changes the parameters.
    ///
    /// A smaller maximum takes effect at once; another policy begins anew.
    pub fn change(&mut self, before: &PollParams, after: &PollParams) {
        if before.policy != after.policy {
            *self = Policy::default();
        }
        self.window_ns = self.window_ns.min(after.max_ns);
    }

    /// Begins the accounting of an iteration.
    ///
    /// `interval`: nanoseconds from the start of its wait to its events.
    pub fn begin(&mut self, interval: u64) {
        self.interval = interval;
        self.best = None;
        self.measured.begin();
    }

    /// Accounts for one source. `had_event`: whether the source had an event.
    pub fn account(
        &mut self,
        params: &PollParams,
        source: &mut SourceState,
        kind: SourceKind,
        had_event: bool,
    ) {
        let asks = match params.policy {
            PollPolicy::Measured => {
                self.measured.account(kind, had_event);
                false
            }
            PollPolicy::Weighted => {
                weighted::update(&mut source.ns, params, self.interval, had_event);
                had_event
            }
            PollPolicy::Fixed => false,
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

    /// Chooses the next window, after all sources are accounted for.
    ///
    /// `price` is that of a sleep. `in_flight` operations of the loop's own are under way, and `answered`
    /// have just completed.
    pub fn end(&mut self, params: &PollParams, price: Price, in_flight: usize, answered: u64) {
        let before = self.window_ns;
        self.window_ns = match (params.policy, self.best) {
            (PollPolicy::Measured, _) => {
                self.measured.end(params, price, self.interval, in_flight as u64, answered)
            }
            (PollPolicy::Fixed, _) => params.max_ns,
            (PollPolicy::Weighted | PollPolicy::Stepped, None) => before,
            (PollPolicy::Weighted, Some(best)) => weighted::follow(before, params, best),
            (PollPolicy::Stepped, Some(best)) => best.min(params.max_ns),
        };
    }
}
