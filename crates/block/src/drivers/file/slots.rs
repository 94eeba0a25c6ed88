//! A channel's requests under way.

use event_loop::IoBufs;

use super::plan::Step;
use super::serialise::Ticket;
use super::zeroes::Method;
use crate::request::Request;

/// Slots a channel has room for from the start: enough for several queues. Until they are used their
/// memory is not touched, so that hundreds of exports that do little take little.
const FIRST: usize = 256;

/// What a request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its turn: a range claimed, a bounce buffer; or nothing yet.
    Turn,
    /// A read or write of all of it with its own memory, alone or the first of a
    /// [`Run`](super::merge::Run).
    Simple,
    /// A step of a read or write.
    Step(Step),
    /// The second half of [`Step::Modify`], which changes that many bytes.
    ModifyWrite(usize),
    /// A call that zeroes that many bytes.
    Zero(Method, u64),
    /// A discard of all of it.
    Discard,
    /// A flush: all there is to do, or the last thing.
    Sync,
}

/// One request under way.
pub(crate) struct Slot {
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
    /// The request that continues this one, in the same operation.
    pub(crate) merged_with: Option<u32>,
}

/// Slots by token, and the lists of steps: kept while a slot is free, for their capacity.
pub(crate) struct Slots {
    slots: Vec<(Option<Slot>, IoBufs)>,
    free: Vec<u32>,
}

impl Slots {
    pub(crate) fn new() -> Self {
        Slots { slots: Vec::with_capacity(FIRST), free: Vec::with_capacity(FIRST) }
    }

    /// Puts a request in; the token is its own until it is taken out.
    #[inline]
    pub(crate) fn insert(&mut self, request: Request, stage: Stage) -> u32 {
        let slot = Slot {
            request,
            stage,
            done: 0,
            zeroes: false,
            bounce: None,
            claimed: false,
            ticket: None,
            merged_with: None,
        };
        match self.free.pop() {
            Some(token) => {
                self.slots[token as usize].0 = Some(slot);
                token
            }
            None => {
                self.slots.push((Some(slot), IoBufs::new()));
                self.slots.len() as u32 - 1
            }
        }
    }

    /// The request under `token` and the list for its steps.
    #[inline]
    pub(crate) fn get(&mut self, token: u32) -> Option<(&mut Slot, &mut IoBufs)> {
        let (slot, part) = self.slots.get_mut(token as usize)?;
        Some((slot.as_mut()?, part))
    }

    #[inline]
    pub(crate) fn remove(&mut self, token: u32) -> Option<Slot> {
        let slot = self.slots.get_mut(token as usize)?.0.take()?;
        self.free.push(token);
        Some(slot)
    }

    /// The memory of all requests that are one operation, in a list of the first one's slot.
    pub(crate) fn merge(&mut self, first: u32) -> Option<IoBufs> {
        let mut bufs = std::mem::take(&mut self.slots.get_mut(first as usize)?.1);
        let mut next = Some(first);
        while let Some(token) = next {
            let (slot, _) = self.get(token)?;
            let appended = bufs.append_shared(&slot.request.bufs);
            debug_assert!(appended, "requests of two owners in one operation");
            next = slot.merged_with;
        }
        Some(bufs)
    }

    /// Bytes of all requests that are one operation.
    pub(crate) fn run_len(&mut self, first: u32) -> u64 {
        let mut len = 0;
        let mut next = Some(first);
        while let Some((slot, _)) = next.and_then(|token| self.get(token)) {
            len += slot.request.len;
            next = slot.merged_with;
        }
        len
    }
}
