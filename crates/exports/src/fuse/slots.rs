//! A thread's requests under way: preallocated, each with the memory of its data.

#![forbid(unsafe_code)]

use event_loop::{AlignedBuf, IoBufs, Pool};
use stats::InFlight;

use super::session::counted;
use super::wire::{
    Answer, Encoded, IN_HEADER, MAX_ANSWER, MAX_DATA, MAX_REQUEST, Message, OUT_HEADER, Request,
    WRITE_ARGUMENTS,
};

/// Requests of a thread that are under way at once. Further requests wait in the kernel.
pub(super) const SLOTS: usize = 64;

/// Where data begins in a slot's memory: at a page, as direct I/O wants it.
const DATA: usize = 4096;
/// Where a request is received: the data of a write then begins at [`DATA`].
const REQUEST: usize = DATA - IN_HEADER - WRITE_ARGUMENTS;
/// Where an answer begins: the data of a read follows.
const ANSWER: usize = DATA - OUT_HEADER;
/// Bytes for the extents of a search.
const EXTENTS: usize = 4096;

/// What a slot is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Free,
    /// A request is being read into it.
    Receiving,
    /// The node has a request; then the answer.
    Node(Answer),
    /// The node looks for data, or a hole, from `offset` on.
    Seeking {
        hole: bool,
        offset: u64,
        end: u64,
    },
    /// The node is being given another size.
    Resizing,
    /// The node is asked how many bytes are allocated.
    Describing,
}

pub(super) struct FuseSlot {
    pub(super) at: At,
    pub(super) unique: u64,
    pub(super) request: Request,
    /// Loop time at which it was taken, nanoseconds.
    pub(super) started_ns: u64,
    /// The node was given another size for this request.
    pub(super) grown: bool,
    memory: IoBufs,
    /// The list that goes down; kept for its capacity.
    bufs: IoBufs,
}

impl FuseSlot {
    fn new() -> Option<Self> {
        Some(FuseSlot {
            at: At::Free,
            unique: 0,
            request: Request::Forget,
            started_ns: 0,
            grown: false,
            memory: AlignedBuf::io_bufs(DATA + MAX_DATA as usize, DATA)?,
            bufs: IoBufs::with_capacity(1),
        })
    }

    /// Makes it that of another request.
    pub(super) fn begin(&mut self, message: Message, now_ns: u64) {
        self.unique = message.unique;
        self.request = message.request;
        self.started_ns = now_ns;
        self.grown = false;
    }

    /// Takes a list back.
    pub(super) fn give_back(&mut self, bufs: IoBufs) {
        self.bufs = bufs;
    }

    fn part(&mut self, offset: usize, len: usize) -> IoBufs {
        let mut bufs = std::mem::take(&mut self.bufs);
        bufs.clear();
        bufs.append_part(&self.memory, offset, len);
        bufs
    }

    /// Memory for a request and the data of a write.
    pub(super) fn request_memory(&mut self) -> IoBufs {
        self.part(REQUEST, IN_HEADER + WRITE_ARGUMENTS + MAX_DATA as usize)
    }

    /// The first bytes of what was received.
    pub(super) fn received(&self) -> [u8; MAX_REQUEST] {
        let mut bytes = [0; MAX_REQUEST];
        self.memory.copy_out(REQUEST, &mut bytes);
        bytes
    }

    /// Memory for `len` bytes of data.
    pub(super) fn data(&mut self, len: u64) -> IoBufs {
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(MAX_DATA as usize);
        self.part(DATA, len)
    }

    /// Memory for the extents of a search.
    pub(super) fn extents(&mut self) -> IoBufs {
        self.part(DATA, EXTENTS)
    }

    /// Memory with an answer, and the data that is there already.
    pub(super) fn answer(&mut self, encoded: &Encoded, data: u32) -> IoBufs {
        debug_assert!(encoded.bytes().len() <= MAX_ANSWER);
        self.memory.copy_in(ANSWER, encoded.bytes());
        self.part(ANSWER, encoded.bytes().len() + data as usize)
    }
}

/// All slots, by tag.
pub(super) struct Slots(Pool<FuseSlot>);

impl Slots {
    /// `None`: there is no memory.
    pub(super) fn new() -> Option<Self> {
        std::iter::repeat_with(FuseSlot::new).take(SLOTS).collect::<Option<_>>().map(Slots)
    }

    /// Takes a free slot; `None`: there is none.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.0.take()
    }

    /// Gives a slot back.
    pub(super) fn free(&mut self, tag: u32) {
        if let Some(slot) = self.get(tag)
            && slot.at != At::Free
        {
            slot.at = At::Free;
            self.0.give(tag);
        }
    }

    pub(super) fn get(&mut self, tag: u32) -> Option<&mut FuseSlot> {
        self.0.get_mut(tag)
    }

    /// The requests that the node has.
    pub(super) fn in_flight(&self) -> Vec<InFlight> {
        let of = |slot: &FuseSlot| {
            match slot.at {
                At::Node(_) | At::Seeking { .. } | At::Resizing | At::Describing => {}
                At::Free | At::Receiving => return None,
            }
            let (kind, offset, len) = counted(&slot.request);
            let (id, started_ns) = (slot.unique, slot.started_ns);
            Some(InFlight { id, kind, lun: None, offset, len, started_ns })
        };
        self.0.iter().filter_map(of).collect()
    }
}
