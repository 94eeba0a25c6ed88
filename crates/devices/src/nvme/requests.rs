//! I/O commands under way: from an entry to requests of the namespaces' channels, and back to a completion.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use block::request::{Op, Request, RequestOwner};
use event_loop::{AlignedBuf, IoBufs, Slab};
use nix::errno::Errno;

use super::bits::{BLOCK_SHIFT, MAX_ENTRIES, PAGE};
use super::command::{ByteRange, Entry, IoCommand};
use super::data::DataPointer;
use super::logs::Failed;
use super::probes;
use super::queues::WorkerState;
use super::shared::Shared;
use super::status::Status;
use super::worker::Worker;
use stats::InFlight;
use stats::Kind;
use trace::trace;

/// The most commands under way.
const MAX_SLOTS: usize = 4096;
/// Bytes that Verify reads at a time.
const VERIFY_PIECE: u64 = 128 << 10;
/// Bytes that Compare compares at a time.
const COMPARE_PIECE: usize = 4096;
/// The longest list of segments that is kept for the next command.
const KEPT_SEGMENTS: usize = 512;

/// A command under way.
pub(super) struct CommandSlot {
    sqid: u16,
    cid: u16,
    nsid: u32,
    life: u64,
    /// Rises from command to command.
    number: u64,
    kind: Kind,
    range: ByteRange,
    /// Block requests that are not answered yet.
    pending: u32,
    /// The worst answer so far.
    status: Status,
    work: Work,
    started_ns: u64,
}

/// What a command reads next.
pub(super) struct Piece {
    tag: u32,
    nsid: u32,
    range: ByteRange,
}

/// What is done when a block request is answered.
enum Work {
    Plain,
    /// What was read is compared with the guest's data.
    Compare(IoBufs),
    /// What was read is forgotten, and this is read next.
    Verify(ByteRange),
    /// A node that cannot discard has done what the hint asks for.
    Deallocate,
}

/// The commands under way, and what is kept for its capacity. Places that were never used take no memory.
pub(super) struct Slots {
    slots: Slab<CommandSlot>,
    spare_bufs: Vec<IoBufs>,
    /// The number of the next command.
    next: u64,
}

impl Slots {
    /// Those of so many queues.
    pub(super) fn new(queues: usize) -> Self {
        let size = MAX_SLOTS.min(queues * MAX_ENTRIES as usize);
        Slots { slots: Slab::with_capacity(size), spare_bufs: Vec::with_capacity(size), next: 0 }
    }

    pub(super) fn has_room(&self) -> bool {
        self.slots.has_room()
    }

    /// The number that the next command gets.
    pub(super) fn next_number(&self) -> u64 {
        self.next
    }

    /// The number of the oldest command under way. Looks at all of them.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.slots.values().map(|slot| slot.number).min()
    }

    /// The commands under way, with their queues.
    pub(super) fn in_flight(&self) -> Vec<(u64, InFlight)> {
        let of = |slot: &CommandSlot| {
            let CommandSlot { sqid, cid, kind, range, started_ns, .. } = *slot;
            let (offset, len) = (range.offset, range.len);
            let queue = u64::from(sqid) - 1;
            (queue, InFlight { id: cid.into(), kind, lun: None, offset, len, started_ns })
        };
        self.slots.values().map(of).collect()
    }

    /// Takes a place; there is room.
    fn insert(&mut self, mut slot: CommandSlot) -> u32 {
        slot.number = self.next;
        self.next += 1;
        self.slots.insert(slot)
    }

    fn get(&mut self, tag: u32) -> Option<&mut CommandSlot> {
        self.slots.get_mut(tag)
    }

    fn remove(&mut self, tag: u32) -> Option<CommandSlot> {
        self.slots.remove(tag)
    }

    /// The life of the controller that a command belongs to.
    pub(super) fn life_of(&self, tag: u32) -> Option<u64> {
        self.slots.get(tag).map(|slot| slot.life)
    }

    /// The namespace of a command.
    pub(super) fn nsid_of(&self, tag: u32) -> u32 {
        self.slots.get(tag).map_or(0, |slot| slot.nsid)
    }

    /// A Dataset Management command has so many ranges, which are these bytes.
    pub(super) fn begin_deallocation(&mut self, tag: u32, all: ByteRange, count: u32) {
        if let Some(slot) = self.slots.get_mut(tag) {
            (slot.range, slot.pending) = (all, count);
        }
    }

    pub(super) fn take_bufs(&mut self) -> IoBufs {
        self.spare_bufs.pop().unwrap_or_default()
    }

    fn keep_bufs(&mut self, mut bufs: IoBufs) {
        if self.spare_bufs.len() < self.spare_bufs.capacity()
            && bufs.iovecs().len() <= KEPT_SEGMENTS
        {
            bufs.clear();
            self.spare_bufs.push(bufs);
        }
    }
}

/// What becomes of an entry.
pub(super) enum EntryStep {
    /// It is answered.
    Done { sqid: u16, entry: Entry, status: Status },
    /// A request of a namespace.
    Submit { tag: u32, nsid: u32, op: Op, range: ByteRange, bufs: IoBufs },
    /// A Dataset Management command waits for its turn.
    Deallocate,
    /// A flush of all namespaces.
    FlushAll { tag: u32 },
}

impl WorkerState {
    /// Takes the next command of a queue. `None`: there is none, or no room for it.
    pub(super) fn next(&mut self, worker: &Worker, qid: u16) -> Option<EntryStep> {
        match self.pop(worker, qid) {
            Ok(None) => None,
            Ok(Some((entry, true))) => {
                Some(EntryStep::Done { sqid: qid, entry, status: Status::ABORT_REQUESTED })
            }
            Ok(Some((entry, false))) => {
                let kind = IoCommand::kind_of(&entry);
                let slot = CommandSlot {
                    sqid: qid,
                    cid: entry.cid,
                    nsid: entry.nsid,
                    life: self.life,
                    number: 0,
                    kind,
                    range: ByteRange::default(),
                    pending: 1,
                    status: Status::SUCCESS,
                    work: Work::Plain,
                    started_ns: worker.event_loop.now_ns(),
                };
                Some(
                    self.judge(&worker.shared, slot, &entry)
                        .unwrap_or_else(|status| EntryStep::Done { sqid: qid, entry, status }),
                )
            }
            Err(error) => {
                self.break_queue(worker, qid, error);
                None
            }
        }
    }

    /// Takes an entry for which there are a slot and a place in the completion queue, and says whether it was aborted.
    #[inline]
    fn pop(
        &mut self,
        worker: &Worker,
        qid: u16,
    ) -> Result<Option<(Entry, bool)>, super::queue::QueueError> {
        let Some(submission) = self.submissions.get(qid).filter(|queue| queue.is_taking()) else {
            return Ok(None);
        };
        if submission.queue.is_empty() {
            // What comes in meanwhile is taken too.
            submission.queue.refresh(&self.memory)?;
            if submission.queue.is_empty() {
                return Ok(None);
            }
        }
        // After the doorbell was read, and before what it announces.
        self.refresh_memory(&worker.shared);
        if !self.slots.has_room() {
            self.wants_slot = true;
            return Ok(None);
        }
        let Some(submission) = self.submissions.get(qid) else { return Ok(None) };
        let Some(completion) = self.completions.get(submission.cqid) else { return Ok(None) };
        completion.is_full = !completion.queue.reserve(&self.memory)?;
        if completion.is_full {
            return Ok(None);
        }
        let place = submission.queue.place();
        let popped = submission.queue.pop(&self.memory);
        match &popped {
            Ok(Some(entry)) => {
                submission.in_flight += 1;
                let controller = worker.shared.trace_id();
                let Entry { cid, nsid, opcode, .. } = *entry;
                trace!(probes::pci_nvme_io_cmd(controller, qid, cid, nsid, opcode, entry.slba()));
            }
            Ok(None) | Err(_) => completion.queue.unreserve(),
        }
        Ok(popped?.map(|entry| (entry, submission.was_aborted(place))))
    }

    /// What an entry asks for.
    fn judge(
        &mut self,
        shared: &Shared,
        mut slot: CommandSlot,
        entry: &Entry,
    ) -> Result<EntryStep, Status> {
        if IoCommand::is_broadcast_flush(entry) {
            // Refuses what other commands refuse.
            entry.data()?;
            slot.pending = shared.namespaces.len() as u32;
            return Ok(EntryStep::FlushAll { tag: self.slots.insert(slot) });
        }
        let nsid = entry.nsid;
        let namespace = shared.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?;
        let is_through = !shared.write_cache.load(Ordering::Relaxed);
        let whole = |op, range| (op, range, None);
        let (op, range, data) = match IoCommand::parse(entry, namespace)? {
            IoCommand::Read { range, data } => (Op::Read, range, Some(data)),
            IoCommand::Write { range, data, fua } => {
                (Op::Write { fua: fua || is_through }, range, Some(data))
            }
            IoCommand::Flush => whole(Op::Flush, ByteRange::default()),
            IoCommand::WriteZeroes { range, may_unmap, fua } => {
                let fua = fua || is_through;
                whole(Op::WriteZeroes { may_unmap, no_fallback: false, fua }, range)
            }
            IoCommand::Compare { range, data } => return self.compare(slot, range, &data),
            IoCommand::Verify { range } => return self.verify(slot, range),
            IoCommand::Deallocate { count, data } => {
                slot.work = Work::Deallocate;
                let tag = self.slots.insert(slot);
                self.deallocations.add(tag, count, data);
                return Ok(EntryStep::Deallocate);
            }
            IoCommand::Hint => return Err(Status::SUCCESS),
        };
        let bufs = match data {
            Some(data) => self.guest_bufs(&data, range.len)?,
            None => self.slots.take_bufs(),
        };
        slot.range = range;
        Ok(EntryStep::Submit { tag: self.slots.insert(slot), nsid, op, range, bufs })
    }

    /// The guest's memory that a command names.
    #[inline]
    fn guest_bufs(&mut self, data: &DataPointer, len: u64) -> Result<IoBufs, Status> {
        let mut bufs = self.slots.take_bufs();
        let memory = &self.memory;
        let pushed = data.pieces(memory, len, |addr, len| {
            let pushed = memory.push_iovecs(addr, len as usize, &mut bufs);
            pushed.map_err(|_| Status::DATA_TRANSFER_ERROR)
        });
        match pushed {
            Ok(()) => Ok(bufs),
            Err(status) => {
                self.slots.keep_bufs(bufs);
                Err(status)
            }
        }
    }

    #[cold]
    fn compare(
        &mut self,
        mut slot: CommandSlot,
        range: ByteRange,
        data: &DataPointer,
    ) -> Result<EntryStep, Status> {
        let bufs = bounce(range.len)?;
        slot.work = Work::Compare(self.guest_bufs(data, range.len)?);
        (slot.range, slot.kind) = (range, Kind::Other);
        let nsid = slot.nsid;
        Ok(EntryStep::Submit { tag: self.slots.insert(slot), nsid, op: Op::Read, range, bufs })
    }

    #[cold]
    fn verify(&mut self, mut slot: CommandSlot, range: ByteRange) -> Result<EntryStep, Status> {
        let (piece, rest) = cut(range);
        let bufs = bounce(piece.len)?;
        (slot.work, slot.range, slot.kind) = (Work::Verify(rest), range, Kind::Other);
        let nsid = slot.nsid;
        let tag = self.slots.insert(slot);
        Ok(EntryStep::Submit { tag, nsid, op: Op::Read, range: piece, bufs })
    }
}

/// Memory of our own.
fn bounce(len: u64) -> Result<IoBufs, Status> {
    AlignedBuf::io_bufs(len as usize, PAGE as usize).ok_or(Status::INTERNAL_ERROR)
}

/// The first piece of what Verify reads, and the rest.
fn cut(range: ByteRange) -> (ByteRange, ByteRange) {
    let len = range.len.min(VERIFY_PIECE);
    let rest = ByteRange { offset: range.offset + len, len: range.len - len };
    (ByteRange { len, ..range }, rest)
}

/// Whether two lists of segments have the same bytes.
fn are_equal(one: &IoBufs, other: &IoBufs) -> bool {
    let mut pieces = [[0; COMPARE_PIECE]; 2];
    let [a, b] = &mut pieces;
    (0..one.len()).step_by(COMPARE_PIECE).all(|at| {
        let (read, of_guest) = (one.copy_out(at, a), other.copy_out(at, b));
        read == of_guest && a.get(..read) == b.get(..read)
    })
}

impl Worker {
    /// Carries a step out. Returns how much work it is.
    pub(super) fn begin(&self, me: &Rc<Worker>, step: EntryStep) -> usize {
        match step {
            EntryStep::Done { sqid, entry, status } => {
                self.answer_at_once(sqid, &entry, status);
                1
            }
            EntryStep::Submit { tag, nsid, op, range, bufs } => {
                let pieces = bufs.iovecs().len() + 1;
                self.submit(me, tag, nsid, op, range, bufs);
                pieces
            }
            EntryStep::Deallocate => 1 + self.deallocate_more(me, false),
            EntryStep::FlushAll { tag } => {
                for channel in &self.channels {
                    let to: Rc<dyn RequestOwner> = me.clone();
                    let bufs = self.state.borrow_mut().slots.take_bufs();
                    channel.submit(Request::new(Op::Flush, 0, 0, bufs, &to, tag));
                }
                self.channels.len()
            }
        }
    }

    /// Goes on with commands that read piece by piece.
    pub(super) fn go_on(&self) {
        let unfinished = std::mem::take(&mut self.state.borrow_mut().unfinished);
        let Some(me) = self.me() else { return };
        self.deallocate_more(&me, false);
        for Piece { tag, nsid, range } in unfinished {
            match bounce(range.len) {
                Ok(bufs) => self.submit(&me, tag, nsid, Op::Read, range, bufs),
                Err(_) => self.complete(tag, Err(Errno::ENOMEM), IoBufs::new()),
            }
        }
    }

    /// Answers a command that has a slot and no request.
    #[cold]
    pub(super) fn answer_unbegun(&self, tag: u32, status: Status) {
        let slot = self.state.borrow_mut().slots.remove(tag);
        if let Some(slot) = slot {
            self.answer(CommandSlot { status, ..slot });
        }
    }

    /// So many of a command's requests will not be made.
    #[cold]
    pub(super) fn leave_out(&self, tag: u32, requests: usize) {
        let left = self.state.borrow_mut().slots.get(tag).map(|slot| {
            slot.pending = slot.pending.saturating_sub(requests as u32);
            (slot.pending, slot.status)
        });
        if let Some((0, status)) = left {
            self.answer_unbegun(tag, status);
        }
    }

    pub(super) fn submit(
        &self,
        me: &Rc<Worker>,
        tag: u32,
        nsid: u32,
        op: Op,
        range: ByteRange,
        bufs: IoBufs,
    ) {
        let to: Rc<dyn RequestOwner> = me.clone();
        let channel = (nsid as usize).checked_sub(1).and_then(|at| self.channels.get(at));
        match channel {
            Some(channel) => {
                channel.submit(Request::new(op, range.offset, range.len, bufs, &to, tag));
            }
            None => {
                debug_assert!(false, "a channel for each namespace");
                self.complete(tag, Err(Errno::ENXIO), bufs);
            }
        }
    }

    /// Answers an entry for which nothing was begun.
    #[cold]
    fn answer_at_once(&self, sqid: u16, entry: &Entry, status: Status) {
        let kind = IoCommand::kind_of(entry);
        let at = usize::from(sqid) - 1;
        if let (Some(batch), Some(stats)) = (self.batches.get(at), self.shared.stats.get(at)) {
            let now_ns = self.event_loop.now_ns();
            match status.is_success() {
                true => batch.done(stats, kind, 0, now_ns, now_ns),
                false => batch.invalid(stats, kind),
            }
        }
        self.post(sqid, entry.cid, status, entry.nsid, entry.slba());
    }

    /// Shows the driver a completion.
    #[inline]
    fn post(&self, sqid: u16, cid: u16, status: Status, nsid: u32, lba: u64) {
        if !status.is_success() {
            let failed = Failed { sqid, cid, status, lba, nsid };
            event_loop::sync::lock(&self.shared.errors).add(failed);
        }
        trace!(probes::pci_nvme_enqueue_req_completion(
            self.shared.trace_id(),
            sqid,
            cid,
            status.code_and_type(),
        ));
        let mut state = self.state.borrow_mut();
        let WorkerState { memory, submissions, completions, .. } = &mut *state;
        let Some(submission) = submissions.get(sqid) else { return };
        submission.in_flight -= 1;
        submission.has_answers = true;
        if let Some(completion) = completions.get(submission.cqid) {
            let from = (sqid, submission.queue.head());
            completion.has_posts = true;
            if let Err(error) = completion.queue.post(memory, status.into(), from, cid) {
                self.tell(error);
            }
        }
        drop(state);
        self.finish_later();
    }

    /// A command is done.
    #[inline]
    fn answer(&self, slot: CommandSlot) {
        let CommandSlot { sqid, cid, nsid, life, kind, range, status, started_ns, .. } = slot;
        let at = usize::from(sqid) - 1;
        if let (Some(batch), Some(stats)) = (self.batches.get(at), self.shared.stats.get(at)) {
            let now_ns = self.event_loop.now_ns();
            match status.is_success() {
                true => batch.done(stats, kind, range.len, started_ns, now_ns),
                false => batch.failed(stats, kind, started_ns, now_ns),
            }
        }
        if life == self.state.borrow().life {
            self.post(sqid, cid, status, nsid, range.offset >> BLOCK_SHIFT);
        } else {
            // The batch is counted with the next, and somebody may wait for this one.
            self.finish_later();
        }
    }
}

impl RequestOwner for Worker {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let mut state = self.state.borrow_mut();
        let WorkerState { slots, deallocations, .. } = &mut *state;
        let Some(slot) = slots.get(tag) else { return };
        if matches!(slot.work, Work::Deallocate) {
            deallocations.ended();
        }
        let mut next = None;
        match (result, &mut slot.work) {
            (Ok(()), Work::Plain | Work::Deallocate) => {}
            (Ok(()), Work::Compare(guest)) => {
                if !are_equal(&bufs, guest) {
                    slot.status = Status::COMPARE_FAILURE;
                }
            }
            (Ok(()), Work::Verify(rest)) => {
                if rest.len > 0 {
                    let (piece, left) = cut(*rest);
                    *rest = left;
                    next = Some((piece, slot.nsid));
                }
            }
            (Err(Errno::EOPNOTSUPP), Work::Deallocate) => {}
            (Err(errno), _) => {
                let unit = slot.nsid.saturating_sub(1) as u16;
                if let Some(stats) = self.shared.stats.get(usize::from(slot.sqid) - 1) {
                    stats.node_failed(unit, slot.kind, slot.range.offset, errno);
                }
                let kind = match slot.work {
                    Work::Compare(_) | Work::Verify(_) => Kind::Read,
                    Work::Plain | Work::Deallocate => slot.kind,
                };
                slot.status = Status::of(errno, kind);
            }
        }
        if let Some((range, nsid)) = next {
            // Not from here: a node that answers at once would nest as deep as there are pieces.
            state.unfinished.push(Piece { tag, nsid, range });
            drop(state);
            return self.finish_later();
        }
        slot.pending = slot.pending.saturating_sub(1);
        let goes_on = matches!(slot.work, Work::Deallocate) && slot.pending > 0;
        let done = if slot.pending == 0 { state.slots.remove(tag) } else { None };
        state.slots.keep_bufs(bufs);
        drop(state);
        if let Some(slot) = done {
            self.answer(slot);
        } else if goes_on {
            // There is room for another range.
            self.finish_later();
        }
    }
}
