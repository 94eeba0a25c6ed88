//! Dataset Management: ranges that are discarded, a few commands and a few requests at a time.
//!
//! A command may have 256 ranges, and a driver thousands of commands. Their ranges are read when it is the command's turn,
//! into lists that are kept. Until then a command takes no memory but its slot.

use std::collections::VecDeque;
use std::rc::Rc;

use block::request::Op;
use event_loop::Meter;

use super::command::{ByteRange, DSM_RANGE, MAX_DSM_RANGES, dsm_range};
use super::data::DataPointer;
use super::queues::WorkerState;
use super::shared::Shared;
use super::status::Status;
use super::worker::Worker;

/// Commands whose ranges are discarded at once.
const MAX_ACTIVE: usize = 16;
/// Ranges that are discarded at once.
const MAX_IN_FLIGHT: usize = 64;
/// Units of the loop's meter for a list of ranges that is read, and for a range.
const LIST_UNITS: u64 = 8;
const RANGE_UNITS: u64 = 1;

/// A command whose ranges are not read yet.
struct Waiting {
    tag: u32,
    count: usize,
    data: DataPointer,
}

/// A command whose ranges are being discarded.
struct Active {
    tag: u32,
    ranges: Vec<ByteRange>,
    /// The next of them.
    next: usize,
}

/// The Dataset Management commands under way that have ranges left.
pub(super) struct Deallocations {
    waiting: VecDeque<Waiting>,
    /// In turns.
    active: VecDeque<Active>,
    /// Lists that are not in use.
    spare: Vec<Vec<ByteRange>>,
    /// Requests that are not answered.
    in_flight: usize,
    meter: Meter,
}

/// The next step.
pub(super) enum Next {
    /// Nothing, until a request is answered.
    Nothing,
    /// Nothing in this iteration.
    Later,
    /// A range is to be discarded, in the namespace of the command's slot.
    Discard(u32, ByteRange),
    /// A command is to be answered before any of its ranges was discarded.
    Answer(u32, Status),
    /// A command of before a reset does nothing more: its other ranges are left out, so many.
    GiveUp(u32, usize),
}

impl Deallocations {
    pub(super) fn new(meter: Meter) -> Deallocations {
        Deallocations {
            waiting: VecDeque::new(),
            active: VecDeque::with_capacity(MAX_ACTIVE),
            spare: Vec::with_capacity(MAX_ACTIVE),
            in_flight: 0,
            meter,
        }
    }

    /// Adds a command with a slot.
    pub(super) fn add(&mut self, tag: u32, count: usize, data: DataPointer) {
        self.waiting.push_back(Waiting { tag, count, data });
    }

    /// A range was discarded.
    pub(super) fn ended(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty()
    }
}

impl WorkerState {
    /// What Dataset Management commands do next. `is_free`: also when the loop's budget is spent.
    fn next_deallocation(&mut self, shared: &Shared, is_free: bool) -> Next {
        let own = &mut self.deallocations;
        if own.is_idle() || own.in_flight >= MAX_IN_FLIGHT {
            return Next::Nothing;
        }
        if !is_free && own.meter.is_half_over() {
            return Next::Later;
        }
        if own.active.len() < MAX_ACTIVE
            && let Some(waiting) = own.waiting.pop_front()
        {
            own.meter.charge(LIST_UNITS);
            if own.waiting.is_empty() {
                own.waiting.shrink_to(MAX_ACTIVE);
            }
            return match self.activate(shared, &waiting) {
                Ok(next) => next,
                Err(status) => Next::Answer(waiting.tag, status),
            };
        }
        self.next_range()
    }

    /// The next range of the commands that have their turns.
    fn next_range(&mut self) -> Next {
        let WorkerState { deallocations: own, slots, life, .. } = self;
        let Some(mut active) = own.active.pop_front() else { return Next::Nothing };
        let (tag, left) = (active.tag, active.ranges.len() - active.next);
        if slots.life_of(tag) != Some(*life) {
            own.spare.push(active.ranges);
            return Next::GiveUp(tag, left);
        }
        let range = active.ranges.get(active.next).copied().unwrap_or_default();
        active.next += 1;
        own.in_flight += 1;
        own.meter.charge(RANGE_UNITS);
        match left {
            0 | 1 => own.spare.push(active.ranges),
            _ => own.active.push_back(active),
        }
        Next::Discard(tag, range)
    }

    /// Reads the ranges of a command. Its memory is not looked at after a reset.
    ///
    /// # Errors
    ///
    /// The status that the command is answered with. Nothing was discarded.
    fn activate(&mut self, shared: &Shared, waiting: &Waiting) -> Result<Next, Status> {
        let &Waiting { tag, count, data } = waiting;
        if self.slots.life_of(tag) != Some(self.life) {
            return Err(Status::ABORT_REQUESTED);
        }
        let nsid = self.slots.nsid_of(tag);
        let namespace = shared.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?;
        let mut bytes = [0; MAX_DSM_RANGES * DSM_RANGE];
        let bytes = bytes.get_mut(..count * DSM_RANGE).unwrap_or_default();
        data.read(&self.memory, bytes)?;
        let own = &mut self.deallocations;
        let mut ranges = own.spare.pop().unwrap_or_else(|| Vec::with_capacity(MAX_DSM_RANGES));
        ranges.clear();
        for entry in bytes.as_chunks().0 {
            match dsm_range(entry, namespace) {
                Ok(range) if range.len > 0 => ranges.push(range),
                Ok(_) => {}
                Err(status) => {
                    own.spare.push(ranges);
                    return Err(status);
                }
            }
        }
        let Some(first) = ranges.first() else {
            own.spare.push(ranges);
            return Err(Status::SUCCESS);
        };
        let len = ranges.iter().map(|range| range.len).sum();
        let all = ByteRange { offset: first.offset, len };
        self.slots.begin_deallocation(tag, all, ranges.len() as u32);
        own.active.push_back(Active { tag, ranges, next: 0 });
        Ok(self.next_range())
    }
}

impl Worker {
    /// Continues Dataset Management, as far as the iteration's budget allows. Returns how many steps were done.
    ///
    /// `is_turn`: the loop calls the handler, once in an iteration. One step is free then, as other sources may spend the
    /// budget in every iteration. A deferred call or an answer has no free step: it may follow the one before at once.
    pub(super) fn deallocate_more(&self, me: &Rc<Worker>, is_turn: bool) -> usize {
        let mut steps = 0;
        loop {
            // Not borrowed while a request begins, which may answer it.
            let next =
                self.state.borrow_mut().next_deallocation(&self.shared, is_turn && steps == 0);
            match next {
                Next::Nothing => return steps,
                Next::Later => {
                    self.look_again();
                    return steps;
                }
                Next::Discard(tag, range) => {
                    let (nsid, bufs) = {
                        let mut state = self.state.borrow_mut();
                        (state.slots.nsid_of(tag), state.slots.take_bufs())
                    };
                    self.submit(me, tag, nsid, Op::Discard, range, bufs);
                }
                Next::Answer(tag, status) => self.answer_unbegun(tag, status),
                Next::GiveUp(tag, left) => self.leave_out(tag, left),
            }
            steps += 1;
        }
    }
}
