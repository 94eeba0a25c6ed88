//! Timers: a heap of deadlines. The nearest one is the timeout of the call that waits (one-call contract).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::buf::IoBufs;
use crate::op::IoTarget;
use crate::slab::Pool;

/// Identifies a timer. Unique for the life of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimerId {
    /// Order of creation: later timers have larger numbers.
    serial: u64,
    index: u32,
    /// The loop's [`Timers::id`].
    of: u32,
}

/// Distinguishes the loops of a process.
static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// A loop's timers.
pub(crate) struct Timers {
    /// By deadline, then by age. Cancelled timers stay until their deadline, or until too many accumulate.
    heap: BinaryHeap<Reverse<(u64, TimerId)>>,
    /// Timers of this iteration, removed from the heap.
    due: VecDeque<TimerId>,
    /// A slot is free once its timer is neither in the heap nor in `due`.
    slots: Pool<Option<Timer>>,
    next_serial: u64,
    id: u32,
    /// Cancelled timers in the heap.
    dead: usize,
}

pub(crate) struct Timer {
    serial: u64,
    is_due: bool,
    target: Rc<dyn IoTarget>,
    token: u32,
}

impl Timer {
    /// Completes the timer with `-ECANCELED`.
    pub(crate) fn cancel(self) {
        self.target.complete(self.token, -libc::ECANCELED, IoBufs::new());
    }
}

/// Maximum cancelled timers in the heap before it is cleaned.
const MAX_DEAD: usize = 64;

impl Default for Timers {
    /// Reserves room for the maximum of cancelled timers and as many live ones. Their number fluctuates at
    /// random, and steady state must not allocate.
    fn default() -> Self {
        const ROOM: usize = 2 * MAX_DEAD;
        Timers {
            heap: BinaryHeap::with_capacity(ROOM),
            due: VecDeque::with_capacity(ROOM),
            slots: Pool::with_capacity(ROOM),
            next_serial: 0,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            dead: 0,
        }
    }
}

impl Timers {
    pub(crate) fn add(&mut self, deadline: u64, target: Rc<dyn IoTarget>, token: u32) -> TimerId {
        let (index, slot) = self.slots.take_or_add(|_| None);
        let id = TimerId { serial: self.next_serial, index, of: self.id };
        self.next_serial += 1;
        *slot = Some(Timer { serial: id.serial, is_due: false, target, token });
        self.heap.push(Reverse((deadline, id)));
        id
    }

    /// Cancels a timer. `None` if it has run, or is another loop's.
    pub(crate) fn cancel(&mut self, id: TimerId) -> Option<Timer> {
        if id.of != self.id || !is_live(&self.slots, id) {
            return None;
        }
        let timer = self.slots.get_mut(id.index)?.take()?;
        if !timer.is_due {
            self.dead += 1;
            self.tidy_up();
        }
        Some(timer)
    }

    /// Removes cancelled timers from the heap. Timeouts are mostly cancelled long before their deadline.
    fn tidy_up(&mut self) {
        if self.dead > MAX_DEAD && self.dead > self.heap.len() / 2 {
            let Timers { heap, slots, .. } = self;
            heap.retain(|Reverse((_, id))| {
                let live = is_live(slots, *id);
                if !live {
                    slots.give(id.index);
                }
                live
            });
            self.dead = 0;
        }
    }

    /// The nearest deadline.
    pub(crate) fn next_deadline(&mut self) -> Option<u64> {
        while let Some(Reverse((deadline, id))) = self.heap.peek().copied() {
            if is_live(&self.slots, id) {
                return Some(deadline);
            }
            self.heap.pop();
            self.slots.give(id.index);
            self.dead -= 1;
        }
        None
    }

    /// Lists the timers that are due, for [`take_due`](Self::take_due). A timer added by a callback waits for
    /// the next iteration, whatever its deadline (fairness contract).
    pub(crate) fn list_due(&mut self, now: u64) {
        while self.next_deadline().is_some_and(|deadline| deadline <= now) {
            let Some(Reverse((_, id))) = self.heap.pop() else { return };
            if let Some(Some(timer)) = self.slots.get_mut(id.index) {
                timer.is_due = true;
            }
            self.due.push_back(id);
        }
    }

    /// Takes the next listed timer that was not cancelled since.
    pub(crate) fn take_due(&mut self) -> Option<(Rc<dyn IoTarget>, u32)> {
        while let Some(id) = self.due.pop_front() {
            self.slots.give(id.index);
            if let Some(timer) = self.slots.get_mut(id.index).and_then(Option::take) {
                return Some((timer.target, timer.token));
            }
        }
        None
    }

    /// All timers, to be dropped outside of the loop's borrow.
    pub(crate) fn clear(&mut self) -> Pool<Option<Timer>> {
        self.heap.clear();
        self.due.clear();
        self.dead = 0;
        std::mem::take(&mut self.slots)
    }
}

fn is_live(slots: &Pool<Option<Timer>>, id: TimerId) -> bool {
    let slot = slots.get(id.index).and_then(Option::as_ref);
    slot.is_some_and(|timer| timer.serial == id.serial)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;
    impl IoTarget for Nobody {
        fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {}
    }

    fn due(timers: &mut Timers, now: u64) -> Vec<u32> {
        timers.list_due(now);
        std::iter::from_fn(|| timers.take_due().map(|(_, token)| token)).collect()
    }

    #[test]
    fn timers_come_by_deadline_then_by_age() {
        let mut timers = Timers::default();
        for (deadline, token) in [(20, 0), (10, 1), (10, 2), (30, 3)] {
            timers.add(deadline, Rc::new(Nobody), token);
        }
        assert_eq!(timers.next_deadline(), Some(10));
        assert_eq!(due(&mut timers, 9), []);
        assert_eq!(due(&mut timers, 20), [1, 2, 0]);
        assert_eq!(timers.next_deadline(), Some(30));
    }

    #[test]
    fn a_due_timer_can_be_cancelled_and_ids_are_unique() {
        let mut timers = Timers::default();
        let ids = [0, 1].map(|token| timers.add(5, Rc::new(Nobody), token));
        timers.list_due(5);
        assert!(timers.cancel(ids[1]).is_some() && timers.cancel(ids[1]).is_none());
        assert_eq!(timers.take_due().map(|(_, token)| token), Some(0));
        assert!(timers.take_due().is_none());
        let again = timers.add(5, Rc::new(Nobody), 7);
        assert!(timers.cancel(ids[0]).is_none() && timers.cancel(ids[1]).is_none());
        assert!(timers.cancel(again).is_some());
        assert_eq!(timers.next_deadline(), None);
    }

    #[test]
    fn another_loops_timer_is_not_cancelled() {
        let [mut one, mut other] = [Timers::default(), Timers::default()];
        let id = one.add(5, Rc::new(Nobody), 0);
        other.add(5, Rc::new(Nobody), 1);
        assert!(other.cancel(id).is_none());
        assert_eq!(due(&mut other, 5), [1]);
        assert!(one.cancel(id).is_some());
    }

    #[test]
    fn cancelled_timeouts_do_not_pile_up() {
        let mut timers = Timers::default();
        let last = timers.add(1, Rc::new(Nobody), 1);
        for _ in 0..100_000 {
            let id = timers.add(u64::MAX, Rc::new(Nobody), 0);
            timers.cancel(id);
        }
        let slots = timers.slots.iter().len();
        assert!(slots < 200 && timers.heap.len() < 200, "{slots}");
        assert!(timers.cancel(last).is_some());
    }
}
