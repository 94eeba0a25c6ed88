//! Block status: the answer to [`Op::BlockStatus`](crate::request::Op::BlockStatus) in the request's
//! buffers.
//!
//! Each extent is a record of 16 bytes: length and state, 64-bit integers in the machine's byte order. The state
//! has the depth in its upper bytes. A node without backing images leaves zero there. A length of zero ends the
//! list, as does the end of the buffers.

use event_loop::IoBufs;

/// Bytes of an extent in the buffers.
pub const EXTENT_LEN: usize = 16;

/// A part of a disk with one state. Extents follow each other without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; not zero.
    pub len: u64,
    /// The state of all its bytes.
    pub state: ExtentState,
    /// The image of the chain that stores it: 1 is the node itself, 2 its backing image. 0: no image stores it.
    pub depth: u32,
}

impl Extent {
    /// Returns an extent of `len` bytes, not 0, that the node stores itself.
    pub const fn own(len: u64, state: ExtentState) -> Extent {
        Extent { len, state, depth: 1 }
    }

    /// Returns the extent as it is in the buffers.
    pub(crate) fn record(&self) -> [u8; EXTENT_LEN] {
        let state = number(self.state) | u64::from(self.depth ^ OWN) << DEPTH_AT;
        let mut record = [0; EXTENT_LEN];
        record[..8].copy_from_slice(&self.len.to_ne_bytes());
        record[8..].copy_from_slice(&state.to_ne_bytes());
        record
    }
}

/// The state of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentState {
    /// Data.
    Data,
    /// Not allocated; reads as zeroes.
    Hole,
    /// Allocated; reads as zeroes.
    Zeroes,
}

const DATA: u64 = 0;
const HOLE: u64 = 1;
const ZEROES: u64 = 2;
/// Mask of the state; the depth is above it.
const STATE: u64 = 0xff;
const DEPTH_AT: u32 = 8;
/// The depth that is stored as zero.
const OWN: u32 = 1;

/// Returns extent number `index` of an answer, from 0. `None`: there are fewer.
pub fn extent(bufs: &IoBufs, index: usize) -> Option<Extent> {
    let (mut len, mut state) = ([0; 8], [0; 8]);
    let at = index.checked_mul(EXTENT_LEN)?;
    bufs.copy_out(at, &mut len);
    if bufs.copy_out(at + 8, &mut state) < state.len() {
        return None;
    }
    let number = u64::from_ne_bytes(state);
    let state = match number & STATE {
        HOLE => ExtentState::Hole,
        ZEROES => ExtentState::Zeroes,
        _ => ExtentState::Data,
    };
    let depth = (number >> DEPTH_AT) as u32 ^ OWN;
    Some(Extent { len: u64::from_ne_bytes(len), state, depth }).filter(|extent| extent.len > 0)
}

/// Writes an answer of one extent.
pub fn write_one(bufs: &mut IoBufs, extent: Extent) {
    put(bufs, 0, extent);
    end_after(bufs, EXTENT_LEN);
}

/// Ends the list after this many bytes, [`EXTENT_LEN`] for each extent.
pub fn end_after(bufs: &mut IoBufs, bytes: usize) {
    bufs.zero(bytes, EXTENT_LEN);
}

/// Writes extent number `index` of an answer, from 0. Returns `false` if it does not fit.
///
/// [`end_after`] ends the list.
pub fn put(bufs: &mut IoBufs, index: usize, extent: Extent) -> bool {
    let Some(at) = index.checked_mul(EXTENT_LEN) else { return false };
    if at + EXTENT_LEN > bufs.len() {
        return false;
    }
    bufs.copy_in(at, &extent.record());
    true
}

fn number(state: ExtentState) -> u64 {
    match state {
        ExtentState::Data => DATA,
        ExtentState::Hole => HOLE,
        ExtentState::Zeroes => ZEROES,
    }
}

#[cfg(test)]
mod tests {
    use event_loop::AlignedBuf;

    use super::*;

    #[test]
    fn extents_are_read_as_they_were_written() {
        let mut bufs = AlignedBuf::io_bufs(4 * EXTENT_LEN, 16).unwrap();
        let written = [
            Extent::own(1, ExtentState::Hole),
            Extent { len: u64::MAX, state: ExtentState::Data, depth: 0 },
            Extent { len: 3, state: ExtentState::Zeroes, depth: 4_000_000_000 },
        ];
        for (index, extent) in written.into_iter().enumerate() {
            assert!(put(&mut bufs, index, extent));
        }
        end_after(&mut bufs, 3 * EXTENT_LEN);
        let read: Vec<_> = (0..4).map_while(|index| extent(&bufs, index)).collect();
        assert_eq!(read, written);
    }
}
