//! A request queue's commands in flight, in a preallocated slot per queue entry.

use std::rc::Rc;

use block::request::Op;
use event_loop::{IoBufs, Slab};
use guest_memory::MemoryView;
use nix::errno::Errno;
use queue::{Segment, Segments};

use super::sense::Sense;
use super::tasks::Tasks;
use super::wire::Response;
use stats::Kind;

/// A command in flight.
pub(crate) struct ScsiSlot {
    /// Head of the chain.
    pub(crate) head: u16,
    pub(crate) lun: u16,
    /// The driver's identifier.
    pub(crate) id: u64,
    /// The command's number on its queue.
    pub(crate) number: u64,
    /// Guest memory of the response, in the slot's memory.
    pub(crate) response: Vec<Segment>,
    pub(crate) memory: Rc<MemoryView>,
    /// Length of the data buffer in bytes, how many of these a success uses, and whether the device writes them.
    pub(crate) buffer: u32,
    pub(crate) used: u32,
    pub(crate) is_read: bool,
    /// The operation requested from the block layer.
    pub(crate) op: Op,
    /// Unanswered block requests.
    pub(crate) pending: u32,
    /// The first error.
    pub(crate) sense: Option<Sense>,
    /// The rest of a WRITE SAME.
    pub(crate) repeat: Option<Repeat>,
    /// A part of it was given up: the next process has to repeat the command.
    pub(crate) given_up: bool,
    /// The response of a task management function that has ended the command.
    pub(crate) ended: Option<Response>,
    /// Kind, for statistics and the search of slow requests.
    pub(crate) kind: Kind,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) started_ns: u64,
}

/// The rest of a WRITE SAME.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Repeat {
    pub(crate) offset: u64,
    /// Bytes left, more than 0.
    pub(crate) left: u64,
}

/// The effect of a block answer on its command.
pub(crate) enum Progress {
    /// Other answers are outstanding.
    Waits,
    /// The next part has to be written from these buffers.
    Repeats(IoBufs),
    Done(ScsiSlot),
}

/// The table of slots. It keeps lists for their capacity.
pub(crate) struct SlotTable {
    slots: Slab<ScsiSlot>,
    spare_bufs: Vec<IoBufs>,
    spare_responses: Vec<Vec<Segment>>,
}

impl SlotTable {
    pub(crate) fn new(size: u16) -> Self {
        let size = usize::from(size);
        SlotTable {
            slots: Slab::with_capacity(size),
            spare_bufs: Vec::with_capacity(size),
            spare_responses: (0..size).map(|_| Vec::with_capacity(2)).collect(),
        }
    }

    /// Takes a slot. One is free, as the queue pops no more chains than it has entries.
    pub(crate) fn insert(&mut self, slot: ScsiSlot) -> Option<u32> {
        self.slots.has_room().then(|| self.slots.insert(slot))
    }

    pub(crate) fn get_mut(&mut self, tag: u32) -> Option<&mut ScsiSlot> {
        self.slots.get_mut(tag)
    }

    /// Counts an answer for `tag`.
    pub(crate) fn answer(&mut self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) -> Progress {
        let Some(slot) = self.slots.get_mut(tag) else { return Progress::Waits };
        if slot.op == Op::Read {
            slot.memory.mark_bufs(&bufs, slot.bytes);
        }
        if let Err(errno) = result {
            slot.sense.get_or_insert(Sense::of_errno(slot.op, errno));
        }
        if slot.repeat.is_some() && slot.sense.is_none() && slot.ended.is_none() {
            return Progress::Repeats(bufs);
        }
        slot.pending = slot.pending.saturating_sub(1);
        let done = if slot.pending == 0 { self.slots.remove(tag) } else { None };
        self.keep_bufs(bufs);
        done.map_or(Progress::Waits, Progress::Done)
    }

    /// Marks tasks as ended with `response`.
    pub(crate) fn end(&mut self, tasks: Tasks, response: Response) {
        for slot in self.slots.values_mut().filter(|slot| tasks.have(slot.lun, slot.id)) {
            slot.ended = Some(response);
        }
    }

    /// Whether a task management function has ended the task under `tag`.
    pub(crate) fn has_ended(&self, tag: u32) -> bool {
        self.slots.get(tag).is_some_and(|slot| slot.ended.is_some())
    }

    /// Number of matching tasks with a number below `before`.
    pub(crate) fn count(&self, tasks: Tasks, before: u64) -> usize {
        let counts = |slot: &&ScsiSlot| slot.number < before && tasks.have(slot.lun, slot.id);
        self.slots.values().filter(counts).count()
    }

    /// The commands in flight.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ScsiSlot> {
        self.slots.values()
    }

    /// Returns an empty list of segments for the block layer.
    pub(crate) fn take_bufs(&mut self) -> IoBufs {
        self.spare_bufs.pop().unwrap_or_default()
    }

    /// Keeps a list for reuse.
    pub(crate) fn keep_bufs(&mut self, mut bufs: IoBufs) {
        bufs.clear();
        if self.spare_bufs.len() < self.spare_bufs.capacity() {
            self.spare_bufs.push(bufs);
        }
    }

    /// Returns a list with the segments of a response.
    pub(crate) fn take_response(&mut self, response: Segments<'_>) -> Vec<Segment> {
        let mut list = self.spare_responses.pop().unwrap_or_default();
        list.extend(response.iter());
        list
    }

    /// Keeps a list for reuse.
    pub(crate) fn keep_response(&mut self, mut list: Vec<Segment>) {
        list.clear();
        if self.spare_responses.len() < self.spare_responses.capacity() {
            self.spare_responses.push(list);
        }
    }
}
