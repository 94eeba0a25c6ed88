//! Slots with generations. Slots of operations in flight own memory and file until the completion (memory contract).

#![allow(unsafe_code)]

use std::rc::Rc;

use crate::buf::IoBufs;
use crate::op::{Engine, IoOp, IoTarget, LoopFile};
use crate::ring::{RingFile, RingOp};
use crate::slab::Pool;

/// An operation in flight.
pub(crate) struct InFlight {
    pub(crate) op: IoOp,
    pub(crate) engine: Engine,
    pub(crate) file: LoopFile,
    pub(crate) bufs: IoBufs,
    pub(crate) target: Rc<dyn IoTarget>,
    pub(crate) token: u32,
}

impl InFlight {
    /// The operation in the ring's terms. Its pointers are valid while this is in its slot. Segments and
    /// their description are on the heap, so the slot itself may move. `fixed` is the file's index in this
    /// ring's table, `buffer` the memory's.
    #[inline]
    pub(crate) fn ring_op(&self, fixed: Option<u32>, buffer: Option<u16>) -> Option<RingOp> {
        let file = match fixed {
            Some(index) => RingFile::Fixed(index),
            None => RingFile::Fd(self.file.raw_fd()),
        };
        let (write, offset, dsync) = match self.op {
            IoOp::Read { offset } => (false, offset, false),
            IoOp::Write { offset, dsync } => (true, offset, dsync),
            IoOp::Fsync { data_only } => return Some(RingOp::Fsync { file, data_only }),
            IoOp::Fallocate { mode, offset, len } => {
                return Some(RingOp::Fallocate { file, mode, offset, len });
            }
            IoOp::Poll { events } => {
                let fd = self.file.raw_fd();
                return Some(RingOp::PollAdd { fd, events, multishot: false });
            }
            IoOp::Call { .. } => return None,
            IoOp::Command { command, head } => {
                let first = self.bufs.iovecs().first();
                let address = first.map_or(std::ptr::null_mut(), |segment| segment.iov_base);
                return Some(RingOp::Command { file, code: command.code, head, address });
            }
        };
        let socket = self.file.0.is_socket;
        let rw_flags = if dsync { libc::RWF_DSYNC } else { 0 };
        Some(match self.bufs.iovecs() {
            [segment] => {
                let segment = *segment;
                RingOp::Rw { file, write, socket, segment, offset, rw_flags, buffer }
            }
            segments => RingOp::RwVectored {
                file,
                write,
                socket,
                segments: segments.as_ptr(),
                count: u32::try_from(segments.len()).unwrap_or(u32::MAX),
                offset,
                rw_flags,
                buffer,
            },
        })
    }
}

/// The table of slots. It grows when full and never shrinks, so it does not allocate in steady state.
pub(crate) struct Slots<T>(Pool<Slot<T>>);

struct Slot<T> {
    generation: u32,
    content: Option<T>,
}

/// A slot's number and generation, as encoded in `user_data`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Slots(Pool::default())
    }
}

impl<T> Slots<T> {
    pub(crate) fn with_capacity(slots: u32) -> Self {
        Slots(Pool::with_capacity(slots as usize))
    }

    #[inline(always)]
    pub(crate) fn insert(&mut self, content: T) -> (SlotId, &T) {
        let (index, slot) = self.0.take_or_add(|_| Slot { generation: 0, content: None });
        let id = SlotId { index, generation: slot.generation };
        (id, slot.content.insert(content))
    }

    pub(crate) fn get(&self, id: SlotId) -> Option<&T> {
        let slot = self.0.get(id.index)?;
        if slot.generation == id.generation { slot.content.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, id: SlotId) -> Option<&mut T> {
        let slot = self.0.get_mut(id.index)?;
        if slot.generation == id.generation { slot.content.as_mut() } else { None }
    }

    /// Takes a slot's content out. `None` if the slot has another content by now, or none.
    #[inline]
    pub(crate) fn remove(&mut self, id: SlotId) -> Option<T> {
        let slot = self.0.get_mut(id.index)?;
        if slot.generation != id.generation {
            return None;
        }
        let content = slot.content.take()?;
        slot.generation = slot.generation.wrapping_add(1) & GENERATION_MASK;
        self.0.give(id.index);
        Some(content)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.0.in_use()
    }

    pub(crate) fn ids(&self) -> Vec<SlotId> {
        self.ids_of(|_| true)
    }

    /// Ids of the slots for whose content `wanted` returns true.
    pub(crate) fn ids_of(&self, wanted: impl Fn(&T) -> bool) -> Vec<SlotId> {
        self.0
            .iter()
            .zip(0..)
            .filter(|(slot, _)| slot.content.as_ref().is_some_and(&wanted))
            .map(|(slot, index)| SlotId { index, generation: slot.generation })
            .collect()
    }
}

/// Bits of a generation that fit into `user_data`.
pub(crate) const GENERATION_MASK: u32 = (1 << 28) - 1;

/// The meaning of a completion, encoded in the 64 bits of `user_data`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UserData {
    /// An operation in a slot.
    Op(SlotId),
    /// A handler's poll.
    Poll(SlotId),
    /// The loop's own wake-up descriptor.
    Wake,
    /// A cancellation or removal, whose own result is ignored.
    Ignored,
}

impl UserData {
    #[inline]
    pub(crate) fn pack(self) -> u64 {
        let slot = |kind: u64, id: SlotId| {
            kind << 60 | u64::from(id.generation & GENERATION_MASK) << 32 | u64::from(id.index)
        };
        match self {
            UserData::Op(id) => slot(0, id),
            UserData::Poll(id) => slot(1, id),
            UserData::Wake => 2 << 60,
            UserData::Ignored => 3 << 60,
        }
    }

    #[inline]
    pub(crate) fn unpack(bits: u64) -> Self {
        let id = SlotId { index: bits as u32, generation: (bits >> 32) as u32 & GENERATION_MASK };
        match bits >> 60 {
            0 => UserData::Op(id),
            1 => UserData::Poll(id),
            2 => UserData::Wake,
            _ => UserData::Ignored,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_round_trips() {
        let id = SlotId { index: u32::MAX, generation: GENERATION_MASK };
        for data in [UserData::Op(id), UserData::Poll(id), UserData::Wake, UserData::Ignored] {
            assert_eq!(UserData::unpack(data.pack()), data);
        }
    }
}
