//! What is stored where: the answer to [`Op::BlockStatus`](crate::request::Op::BlockStatus), as it
//! lies in the request's buffers.
//!
//! Each extent is a record of 16 bytes: its length and its state, integers of 64 bits in the machine's
//! order, as [`IoOp::Extents`](event_loop::IoOp::Extents) leaves them there. A length of zero ends
//! the list, as does the end of the buffers.

use event_loop::IoBufs;

/// Bytes of an extent in the buffers.
pub const EXTENT_LEN: usize = 16;

/// A part of a disk that is the same all over. Extents follow each other without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes; not zero.
    pub len: u64,
    /// What is there.
    pub state: State,
}

/// What is stored in an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Anything.
    Data,
    /// Nothing; it reads as zeroes.
    Hole,
    /// Zeroes, which take up their space.
    Zeroes,
}

const DATA: u64 = 0;
const HOLE: u64 = 1;
const ZEROES: u64 = 2;

/// The extent number `index` of an answer; `None`: there are fewer.
pub fn extent(bufs: &IoBufs, index: usize) -> Option<Extent> {
    let (mut len, mut state) = ([0; 8], [0; 8]);
    let at = index.checked_mul(EXTENT_LEN)?;
    bufs.copy_out(at, &mut len);
    if bufs.copy_out(at + 8, &mut state) < state.len() {
        return None;
    }
    let state = match u64::from_ne_bytes(state) {
        HOLE => State::Hole,
        ZEROES => State::Zeroes,
        _ => State::Data,
    };
    Some(Extent { len: u64::from_ne_bytes(len), state }).filter(|extent| extent.len > 0)
}

/// An answer of one extent.
pub(crate) fn write_one(bufs: &mut IoBufs, extent: Extent) {
    put(bufs, 0, extent);
    end_after(bufs, EXTENT_LEN);
}

/// Ends the list after that many bytes.
pub(crate) fn end_after(bufs: &mut IoBufs, bytes: usize) {
    bufs.zero(bytes, EXTENT_LEN);
}

/// Writes the extent number `index` of an answer. `false`: there is no room.
pub(crate) fn put(bufs: &mut IoBufs, index: usize, extent: Extent) -> bool {
    let Some(at) = index.checked_mul(EXTENT_LEN) else { return false };
    if at + EXTENT_LEN > bufs.len() {
        return false;
    }
    bufs.copy_in(at, &extent.len.to_ne_bytes());
    bufs.copy_in(at + 8, &number(extent.state).to_ne_bytes());
    true
}

fn number(state: State) -> u64 {
    match state {
        State::Data => DATA,
        State::Hole => HOLE,
        State::Zeroes => ZEROES,
    }
}
