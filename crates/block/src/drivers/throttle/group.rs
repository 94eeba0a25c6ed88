//! `throttle-group`: limits that nodes keep to together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::BottomHalf;
use event_loop::sync::lock;

use super::limits::{LimitsError, ThrottleLimits};
use super::schedule::Schedule;

/// Limits that all requests of all nodes of the group keep to together, on whichever loop.
///
/// Requests do not come here: each channel holds the buckets, which are exchanged by each other when
/// the limits change.
#[derive(Default)]
pub struct ThrottleGroup {
    state: Mutex<State>,
    held: AtomicU64,
}

#[derive(Default)]
struct State {
    limits: ThrottleLimits,
    schedule: Option<Arc<Schedule>>,
    /// Of the channels, by number: to be scheduled when the limits have changed.
    bells: Vec<(u64, BottomHalf)>,
    next: u64,
}

impl State {
    fn schedule(&mut self) -> Arc<Schedule> {
        let State { limits, schedule, .. } = self;
        schedule.get_or_insert_with(|| Arc::new(Schedule::new(limits))).clone()
    }
}

impl ThrottleGroup {
    /// A group with these limits.
    ///
    /// # Errors
    ///
    /// They make no sense.
    pub fn new(limits: ThrottleLimits) -> Result<Arc<Self>, LimitsError> {
        let group = ThrottleGroup::default();
        group.set_limits(limits)?;
        Ok(Arc::new(group))
    }

    /// Its limits.
    pub fn limits(&self) -> ThrottleLimits {
        lock(&self.state).limits
    }

    /// Returns how many requests the limits have delayed since the group was created.
    pub fn held_requests(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Counts a request that waits.
    pub(super) fn count_held(&self) {
        self.held.fetch_add(1, Ordering::Relaxed);
    }

    /// Changes the limits. What was counted so far is forgotten, as in QEMU, and what is held back
    /// keeps to the new limits at once.
    ///
    /// # Errors
    ///
    /// They make no sense; the group goes on as before.
    pub fn set_limits(&self, limits: ThrottleLimits) -> Result<(), LimitsError> {
        limits.check()?;
        let mut state = lock(&self.state);
        state.limits = limits;
        state.schedule = None;
        state.bells.iter().for_each(|(_, bell)| bell.schedule());
        Ok(())
    }

    /// The buckets now.
    pub(super) fn schedule(&self) -> Arc<Schedule> {
        lock(&self.state).schedule()
    }

    /// Has `bell` scheduled whenever the limits have changed, until [`leave`](Self::leave).
    pub(super) fn join(&self, bell: BottomHalf) -> u64 {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.bells.push((number, bell));
        number
    }

    pub(super) fn leave(&self, number: u64) {
        lock(&self.state).bells.retain(|(other, _)| *other != number);
    }
}
