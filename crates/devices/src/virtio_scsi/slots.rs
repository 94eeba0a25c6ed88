//! A request queue's commands in flight: preallocated, as many as the queue has entries.

use std::rc::Rc;

use block::request::Op;
use event_loop::IoBufs;
use guest_memory::MemoryView;
use nix::errno::Errno;
use queue::{Segment, Segments};

use super::sense::Sense;
use super::tasks::Tasks;
use super::wire::Response;
use stats::Kind;

/// A command in flight.
pub(crate) struct Slot {
    /// By which the chain goes back.
    pub(crate) head: u16,
    pub(crate) lun: u16,
    /// The driver's identifier.
    pub(crate) id: u64,
    /// The command's number on its queue.
    pub(crate) number: u64,
    /// Where the response goes, in this memory.
    pub(crate) response: Vec<Segment>,
    pub(crate) memory: Rc<MemoryView>,
    /// Bytes of the data buffers, and how many of them are used when all goes well; whether the
    /// device writes them.
    pub(crate) buffer: u32,
    pub(crate) used: u32,
    pub(crate) is_read: bool,
    /// What the block layer was asked for.
    pub(crate) op: Op,
    /// Block requests that it was split into and that are not answered yet.
    pub(crate) pending: u32,
    /// What went wrong first.
    pub(crate) sense: Option<Sense>,
    /// What is left of a WRITE SAME.
    pub(crate) repeat: Option<Repeat>,
    /// A part of it was given up: it is to be done again by whoever comes next.
    pub(crate) given_up: bool,
    /// A task management function has ended it.
    pub(crate) ended: Option<Response>,
    /// For the statistics, and for who asks what takes so long.
    pub(crate) kind: Kind,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) started_ns: u64,
}

/// Blocks that are still to be written with what was written before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Repeat {
    pub(crate) offset: u64,
    /// Bytes, more than 0.
    pub(crate) left: u64,
}

/// What an answer of the block layer means to a command.
pub(crate) enum Progress {
    /// There are more answers to come.
    Waits,
    /// The next part is to be written, from these buffers.
    Repeats(IoBufs),
    Done(Slot),
}

/// The table. Its lists are kept for their capacity.
pub(crate) struct SlotTable {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    spare_bufs: Vec<IoBufs>,
    spare_responses: Vec<Vec<Segment>>,
}

impl SlotTable {
    pub(crate) fn new(size: u16) -> Self {
        let size = usize::from(size);
        SlotTable {
            slots: (0..size).map(|_| None).collect(),
            free: (0..size as u32).rev().collect(),
            spare_bufs: Vec::with_capacity(size),
            spare_responses: (0..size).map(|_| Vec::with_capacity(2)).collect(),
        }
    }

    /// Takes a place. The queue pops no more chains than there are places.
    pub(crate) fn insert(&mut self, slot: Slot) -> Option<u32> {
        let tag = self.free.pop()?;
        self.slots[tag as usize] = Some(slot);
        Some(tag)
    }

    pub(crate) fn get_mut(&mut self, tag: u32) -> Option<&mut Slot> {
        self.slots.get_mut(tag as usize)?.as_mut()
    }

    /// Accounts for one answer under `tag`; `given_up`: it is an error by which nothing was done.
    pub(crate) fn answer(
        &mut self,
        tag: u32,
        result: Result<(), Errno>,
        given_up: bool,
        bufs: IoBufs,
    ) -> Progress {
        let Some(place) = self.slots.get_mut(tag as usize) else { return Progress::Waits };
        let Some(slot) = place.as_mut() else { return Progress::Waits };
        if slot.op == Op::Read {
            slot.memory.mark_bufs(&bufs, slot.bytes);
        }
        if let Err(errno) = result {
            slot.given_up |= given_up;
            slot.sense.get_or_insert(Sense::of_errno(slot.op, errno));
        }
        if slot.repeat.is_some() && slot.sense.is_none() && slot.ended.is_none() {
            return Progress::Repeats(bufs);
        }
        slot.pending = slot.pending.saturating_sub(1);
        let done = if slot.pending == 0 { place.take() } else { None };
        self.keep_bufs(bufs);
        match done {
            Some(slot) => {
                self.free.push(tag);
                Progress::Done(slot)
            }
            None => Progress::Waits,
        }
    }

    /// Marks tasks as ended with `response`.
    pub(crate) fn end(&mut self, tasks: Tasks, response: Response) {
        for slot in self.slots.iter_mut().flatten().filter(|slot| tasks.have(slot.lun, slot.id)) {
            slot.ended = Some(response);
        }
    }

    /// Whether a task management function has ended the task under `tag`.
    pub(crate) fn has_ended(&self, tag: u32) -> bool {
        let slot = self.slots.get(tag as usize).and_then(Option::as_ref);
        slot.is_some_and(|slot| slot.ended.is_some())
    }

    /// How many of these tasks there are, of those that came before number `before`.
    pub(crate) fn count(&self, tasks: Tasks, before: u64) -> usize {
        let counts = |slot: &&Slot| slot.number < before && tasks.have(slot.lun, slot.id);
        self.slots.iter().flatten().filter(counts).count()
    }

    /// The commands in flight.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten()
    }

    /// An empty list of segments for the block layer.
    pub(crate) fn take_bufs(&mut self) -> IoBufs {
        self.spare_bufs.pop().unwrap_or_default()
    }

    /// Keeps a list for later.
    pub(crate) fn keep_bufs(&mut self, mut bufs: IoBufs) {
        bufs.clear();
        if self.spare_bufs.len() < self.spare_bufs.capacity() {
            self.spare_bufs.push(bufs);
        }
    }

    /// A list of where a response goes.
    pub(crate) fn take_response(&mut self, response: Segments<'_>) -> Vec<Segment> {
        let mut list = self.spare_responses.pop().unwrap_or_default();
        list.extend(response.iter());
        list
    }

    /// Keeps a list for later.
    pub(crate) fn keep_response(&mut self, mut list: Vec<Segment>) {
        list.clear();
        if self.spare_responses.len() < self.slots.len() {
            self.spare_responses.push(list);
        }
    }
}
