//! Timers: a heap of deadlines; the nearest one rides on the call that waits (contract E6).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use crate::op::IoTarget;

/// Names a timer. Unique for the life of the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimerId(u64);

/// A loop's timers.
#[derive(Default)]
pub(crate) struct Timers {
    /// By deadline, then by age.
    heap: BinaryHeap<Reverse<(u64, TimerId, u32)>>,
    slots: Vec<Option<(TimerId, Rc<dyn IoTarget>, u32)>>,
    free: Vec<u32>,
    next_id: u64,
}

impl Timers {
    pub(crate) fn add(&mut self, deadline: u64, target: Rc<dyn IoTarget>, token: u32) -> TimerId {
        let id = TimerId(self.next_id);
        self.next_id += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize] = Some((id, target, token));
        self.heap.push(Reverse((deadline, id, index)));
        id
    }

    /// Cancels a timer; its place in the heap goes when its time comes. `None`: it has run.
    pub(crate) fn cancel(&mut self, id: TimerId) -> Option<Rc<dyn IoTarget>> {
        let slot = self.slots.iter_mut().find(|s| s.as_ref().is_some_and(|s| s.0 == id))?;
        let (_, target, _) = slot.take()?;
        Some(target)
    }

    /// The nearest deadline.
    pub(crate) fn next_deadline(&mut self) -> Option<u64> {
        while let Some(Reverse((deadline, id, index))) = self.heap.peek().copied() {
            if self.is_live(id, index) {
                return Some(deadline);
            }
            self.heap.pop();
            self.free.push(index);
        }
        None
    }

    fn is_live(&self, id: TimerId, index: u32) -> bool {
        self.slots[index as usize].as_ref().is_some_and(|slot| slot.0 == id)
    }

    /// Takes the next timer that is due and is older than `newest`: one that a callback adds waits
    /// for the next iteration, however near its deadline (contract E11).
    pub(crate) fn take_due(
        &mut self,
        now: u64,
        newest: TimerId,
    ) -> Option<(Rc<dyn IoTarget>, u32)> {
        let deadline = self.next_deadline()?;
        let Reverse((_, id, index)) = self.heap.peek().copied()?;
        if deadline > now || id >= newest {
            return None;
        }
        self.heap.pop();
        self.free.push(index);
        self.slots[index as usize].take().map(|(_, target, token)| (target, token))
    }

    /// The id that the next timer gets.
    pub(crate) fn newest(&self) -> TimerId {
        TimerId(self.next_id)
    }

    pub(crate) fn clear(&mut self) -> Vec<Option<(TimerId, Rc<dyn IoTarget>, u32)>> {
        self.heap.clear();
        self.free.clear();
        std::mem::take(&mut self.slots)
    }
}
