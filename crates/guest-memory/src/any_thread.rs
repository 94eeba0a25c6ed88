//! Access from a thread without a view, such as a vCPU's thread at a doorbell.

#![allow(unsafe_code)]

use crate::access;
use crate::error::AccessError;
use crate::memory::GuestMemory;

/// A piece of a range: its mapped address, and the bytes of the range that it has.
type Piece = (*mut u8, std::ops::Range<usize>);

/// Each call looks up the region, so I/O threads use a [`MemoryView`](crate::MemoryView) instead. For headers and
/// tables. Writes are not logged ([`DirtyLog`](crate::DirtyLog)).
impl GuestMemory {
    /// Copies guest memory from guest address `addr` on to `dst`.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory; `dst` is then partly written.
    pub fn read_bytes(&self, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        let mut done = 0;
        while done < dst.len() {
            let (host, range) = self.piece(addr, done, dst.len())?;
            done = range.end;
            // SAFETY: `piece` returns as many mapped bytes as the range has. Guest memory is never part
            // of a Rust object such as `dst`.
            unsafe { access::copy_from(host, &mut dst[range]) };
        }
        Ok(())
    }

    /// Copies `src` to guest memory from guest address `addr` on.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory; the bytes before that part are then written.
    pub fn write_bytes(&self, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        let mut done = 0;
        while done < src.len() {
            let (host, range) = self.piece(addr, done, src.len())?;
            done = range.end;
            // SAFETY: as in `read_bytes`, in the other direction.
            unsafe { access::copy_to(&src[range], host) };
        }
        Ok(())
    }

    /// The next piece of a range of `len` bytes, of which `done` are done.
    fn piece(&self, addr: u64, done: usize, len: usize) -> Result<Piece, AccessError> {
        let left = len - done;
        let end = AccessError { addr, len: len as u64 };
        let addr = addr.checked_add(done as u64).ok_or(end)?;
        let region = self.region_at(addr).ok_or(AccessError { addr, len: left as u64 })?;
        let offset = addr - region.guest_addr();
        let there = usize::try_from(region.size() - offset).unwrap_or(usize::MAX);
        let host = region.host().as_ptr().wrapping_add(offset as usize);
        Ok((host, done..done + left.min(there)))
    }
}
