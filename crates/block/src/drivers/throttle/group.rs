//! `throttle-group`: limits that nodes share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::BottomHalf;
use event_loop::sync::lock;

use super::limits::{LimitsError, ThrottleLimits};
use super::schedule::Schedule;

/// Limits for the sum of all requests of all nodes of the group, on all loops.
///
/// Requests do not pass through the group: each channel has a reference to the present buckets, and
/// replaces it when the limits change.
#[derive(Default)]
pub struct ThrottleGroup {
    state: Mutex<GroupState>,
    held: AtomicU64,
}

#[derive(Default)]
struct GroupState {
    limits: ThrottleLimits,
    schedule: Option<Arc<Schedule>>,
    /// Bottom halves of the channels, by number: scheduled when the limits have changed.
    bottom_halves: Vec<(u64, BottomHalf)>,
    next: u64,
}

impl GroupState {
    fn schedule(&mut self) -> Arc<Schedule> {
        let GroupState { limits, schedule, .. } = self;
        schedule.get_or_insert_with(|| Arc::new(Schedule::new(limits))).clone()
    }
}

impl ThrottleGroup {
    /// Creates a group with these limits.
    ///
    /// # Errors
    ///
    /// The limits contradict each other.
    pub fn new(limits: ThrottleLimits) -> Result<Arc<Self>, LimitsError> {
        let group = ThrottleGroup::default();
        group.set_limits(limits)?;
        Ok(Arc::new(group))
    }

    /// Returns the present limits.
    pub fn limits(&self) -> ThrottleLimits {
        lock(&self.state).limits
    }

    /// Returns how many requests the limits have delayed since the group was created.
    pub fn held_requests(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Counts a delayed request.
    pub(super) fn count_held(&self) {
        self.held.fetch_add(1, Ordering::Relaxed);
    }

    /// Changes the limits.
    ///
    /// The buckets start empty, as in QEMU, and the new limits hold at once for held requests.
    ///
    /// # Errors
    ///
    /// The limits contradict each other; the group keeps its old ones.
    pub fn set_limits(&self, limits: ThrottleLimits) -> Result<(), LimitsError> {
        limits.check()?;
        let mut state = lock(&self.state);
        state.limits = limits;
        state.schedule = None;
        state.bottom_halves.iter().for_each(|(_, bottom_half)| bottom_half.schedule());
        Ok(())
    }

    /// The present buckets.
    pub(super) fn schedule(&self) -> Arc<Schedule> {
        lock(&self.state).schedule()
    }

    /// Registers `bottom_half`, which is scheduled on each change of the limits until [`leave`](Self::leave).
    pub(super) fn join(&self, bottom_half: BottomHalf) -> u64 {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.bottom_halves.push((number, bottom_half));
        number
    }

    pub(super) fn leave(&self, number: u64) {
        lock(&self.state).bottom_halves.retain(|(other, _)| *other != number);
    }
}
