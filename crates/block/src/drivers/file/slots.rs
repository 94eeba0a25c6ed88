//! A channel's requests under way.

use event_loop::{IoBufs, Pool};

use super::merge::Run;
use super::plan::FileStep;
use super::syncs::Running;
use super::zeroes::Method;
use crate::drivers::range_lock::Ticket;
use crate::request::{Detached, Request};

/// Slots a channel has room for from the start: enough for several queues. Until they are used their
/// memory is not touched, so that hundreds of exports that do little take little.
const FIRST: usize = 256;

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its turn: a range claimed, a bounce buffer; or nothing yet.
    Turn,
    /// A read or write of all of it and of what continues it, a [`Run`].
    Merged,
    /// A step of a read or write.
    FileStep(FileStep),
    /// The second half of [`FileStep::Modify`], which changes that many bytes.
    ModifyWrite(usize),
    /// A call that zeroes that many bytes.
    Zero(Method, u64),
    /// A look for its holes, and the number of holes made before, see [`KnownData`](super::known_data::KnownData).
    Status(u64),
    /// A discard of all of it.
    Discard,
    /// A flush: the whole request, or its last step.
    Sync,
    /// Waits for the results of concurrent flushes: those with lower numbers.
    AwaitingPeerFlushes(u64),
}

/// One request under way.
pub(crate) struct FileSlot {
    pub(crate) request: Request,
    pub(crate) stage: Stage,
    /// Bytes done.
    pub(crate) done: u64,
    /// The memory of the current step comes from the channel's zeroes, not the request.
    pub(crate) zeroes: bool,
    pub(crate) bounce: Option<IoBufs>,
    /// Whether the range was claimed, or need not be.
    pub(crate) claimed: bool,
    pub(crate) ticket: Option<Ticket>,
    /// Its flush of the page cache that is under way.
    pub(crate) sync: Option<Running>,
    /// The request that continues this one, in the same operation.
    pub(crate) merged_with: Option<u32>,
}

impl FileSlot {
    pub(crate) fn new(request: Request, stage: Stage) -> Self {
        FileSlot {
            request,
            stage,
            done: 0,
            zeroes: false,
            bounce: None,
            claimed: false,
            ticket: None,
            sync: None,
            merged_with: None,
        }
    }
}

/// What is kept of a request under way.
#[derive(Default)]
struct RequestSlot {
    /// Nearly all requests are simple: one operation that reads or writes all of it with its own memory.
    simple: Option<Detached>,
    other: Option<FileSlot>,
    /// The list of a step; kept for its capacity.
    part: IoBufs,
}

/// Requests under way, by token.
pub(crate) struct Slots(Pool<RequestSlot>);

impl Slots {
    pub(crate) fn new() -> Self {
        Slots(Pool::with_capacity(FIRST))
    }

    /// How many requests there are.
    pub(crate) fn in_use(&self) -> usize {
        self.0.in_use()
    }

    /// Puts a request in; the token is its own until it is taken out.
    pub(crate) fn insert(&mut self, slot: FileSlot) -> u32 {
        let (token, place) = self.0.take_or_add(|_| RequestSlot::default());
        place.other = Some(slot);
        token
    }

    /// Puts a simple request in.
    #[inline]
    pub(crate) fn insert_simple(&mut self, request: Detached) -> u32 {
        let (token, place) = self.0.take_or_add(|_| RequestSlot::default());
        place.simple = Some(request);
        token
    }

    /// Takes a simple request out, if the one under `token` is one. The token is to be given back by
    /// [`release`](Self::release), or the request to be [`put`](Self::put) in anew.
    #[inline]
    pub(crate) fn take_simple(&mut self, token: u32) -> Option<Detached> {
        self.0.get_mut(token)?.simple.take()
    }

    /// Puts in, under a token that it has already, a request that is not simple.
    pub(crate) fn put(&mut self, token: u32, slot: FileSlot) {
        if let Some(place) = self.0.get_mut(token) {
            place.other = Some(slot);
        }
    }

    /// The request under `token` and the list for its steps.
    pub(crate) fn get(&mut self, token: u32) -> Option<(&mut FileSlot, &mut IoBufs)> {
        let place = self.0.get_mut(token)?;
        Some((place.other.as_mut()?, &mut place.part))
    }

    pub(crate) fn remove(&mut self, token: u32) -> Option<FileSlot> {
        let place = self.0.get_mut(token)?;
        let slot = place.other.take()?;
        // A step may have been planned that was not made.
        place.part.clear();
        self.release(token);
        Some(slot)
    }

    /// Gives the token of a request back that was taken out.
    #[inline]
    pub(crate) fn release(&mut self, token: u32) {
        self.0.give(token);
    }

    /// Adds a request to those of an operation that it continues.
    pub(crate) fn add_to(&mut self, run: &mut Run, request: Request) {
        // Each has its own memory when it is answered, the operation a list of all of it.
        if let Some(place) = self.0.get_mut(run.first)
            && let Some(alone) = place.simple.take()
        {
            let bufs = std::mem::replace(&mut run.bufs, std::mem::take(&mut place.part));
            run.bufs.append_shared(&bufs);
            place.other = Some(FileSlot::new(alone.attach(bufs), Stage::Merged));
        }
        let appended = run.bufs.append_shared(&request.bufs);
        debug_assert!(appended, "requests of two owners in one operation");
        let token = self.insert(FileSlot::new(request, Stage::Merged));
        if let Some((last, _)) = self.get(run.last) {
            last.merged_with = Some(token);
        }
        run.last = token;
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use event_loop::{AlignedBuf, IoOp};
    use nix::errno::Errno;

    use super::*;
    use crate::request::{Op, RequestOwner};

    struct Ignore;

    impl RequestOwner for Ignore {
        fn complete(&self, _tag: u32, _result: Result<(), Errno>, _bufs: IoBufs) {}
    }

    /// A read of half of `memory`.
    fn half(memory: &IoBufs, offset: usize, to: &Rc<dyn RequestOwner>) -> Request {
        let len = memory.len() / 2;
        let mut bufs = IoBufs::new();
        bufs.set_part(memory, offset, len, 1);
        Request::new(Op::Read, offset as u64, len as u64, bufs, to, 0)
    }

    #[test]
    fn an_operation_has_no_memory_of_a_request_that_ended_between_two_steps() {
        let to: Rc<dyn RequestOwner> = Rc::new(Ignore);
        let memory = AlignedBuf::io_bufs(8192, 4096).unwrap();
        let mut slots = Slots::new();
        // It ends with a step planned and not made: no memory for a bounce buffer.
        let token = slots.insert(FileSlot::new(half(&memory, 0, &to), Stage::Turn));
        slots.get(token).unwrap().1.set_part(&memory, 0, 512, 1);
        slots.remove(token).unwrap().request.complete(Err(Errno::ENOMEM));

        let (first, bufs) = half(&memory, 0, &to).detach();
        let first = slots.insert_simple(first);
        assert_eq!(first, token);
        let mut run = Run::new(IoOp::Read { offset: 0 }, first, bufs);
        slots.add_to(&mut run, half(&memory, 4096, &to));
        assert_eq!(run.bufs.len(), 8192);
        for token in [run.first, run.last] {
            slots.remove(token).unwrap().request.complete(Ok(()));
        }
    }
}
