//! Memory that is registered with a loop's ring: the "fixed buffers" of io_uring_register(2).
//!
//! The kernel looks up and pins the pages once instead of for every operation. The costs: pinned pages stay
//! in memory, and count towards `RLIMIT_MEMLOCK` unless the process has `CAP_IPC_LOCK`. If a page of the
//! mapping is replaced, as by punching a hole in the file and writing again, operations still use the old
//! page.
//!
//! An operation names the memory by an index into the ring's table. The kernel looks the index up when the
//! operation is submitted, which may be later than [`submit`](EventLoop::submit) if the queue is full. So an
//! index must not be reused meanwhile. An index is released when its [`LoopMemory`] is dropped. The owner of
//! each [`IoBufs`](crate::IoBufs) that names the index keeps the `LoopMemory`
//! ([`IoBufs::push_registered`](crate::IoBufs::push_registered)), and the loop keeps the `IoBufs` in the
//! operation's slot from `submit` to the completion.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::io;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};

use crate::event_loop::{EventLoop, Inner};

/// Bytes registered per iteration, which bounds the delay of the loop: pinning 64 MiB of present, mapped
/// pages takes about 1.1 ms. The kernel's maximum is 1 GiB.
const PIECE: usize = 1 << PIECE_SHIFT;
const PIECE_SHIFT: u32 = 26;

/// Memory registered with one loop. Clones share it.
///
/// Dropping the last clone unregisters all of it at once. [`unregister`](Self::unregister) does so piece by
/// piece.
#[derive(Clone)]
pub struct LoopMemory(Rc<Registered>);

struct Registered {
    inner: Weak<Inner>,
    /// First index in the ring's table.
    first: u32,
    /// Number of indices from there on.
    taken: Cell<u32>,
    /// Keeps the memory mapped. Dropped last.
    _owner: Rc<dyn Any>,
}

/// Maps offsets in registered memory to indices of a ring's table.
///
/// Kept by address translations in place of a [`LoopMemory`].
#[derive(Debug, Clone, Copy)]
pub struct Places {
    ring: RingId,
    first: u16,
}

/// Identifies a ring by an address that is not reused while memory is registered with the ring. Never
/// dereferenced.
pub(crate) type RingId = NonNull<()>;

/// An index into a ring's table of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub(crate) ring: RingId,
    pub(crate) index: u16,
}

impl Places {
    /// Returns the place of `len` bytes from byte `offset` of the memory on.
    ///
    /// `None`: the bytes span two pieces.
    #[inline]
    pub fn at(self, offset: u64, len: usize) -> Option<Place> {
        let last = offset.wrapping_add(len as u64).wrapping_sub(1);
        // The ring's table has fewer than 2^16 indices.
        let index = self.first.wrapping_add((offset >> PIECE_SHIFT) as u16);
        (offset >> PIECE_SHIFT == last >> PIECE_SHIFT).then_some(Place { ring: self.ring, index })
    }
}

impl EventLoop {
    /// Registers `len` bytes from `base` on with this loop's ring.
    ///
    /// Operations name the memory by [`IoBufs::push_registered`](crate::IoBufs::push_registered). `owner`
    /// keeps it mapped, readable and writable.
    ///
    /// Registers 64 MiB per iteration. Pages that are not present or not mapped take far longer. Populate
    /// them on another thread before, with madvise(2) and `MADV_POPULATE_WRITE`. Dropping the future
    /// unregisters what was registered.
    ///
    /// # Errors
    ///
    /// Nothing is registered then, and operations work without.
    ///
    /// - [`Unsupported`](io::ErrorKind::Unsupported): the loop does not run on io_uring.
    /// - `EINVAL`: Linux before 5.19.
    /// - `ENOMEM`: more than `RLIMIT_MEMLOCK` lets this user pin, or no memory.
    /// - `EFAULT`: not mapped, or a file on a file system that must be notified of writes.
    /// - `ENOSPC`: all 16384 indices of 64 MiB are taken.
    pub fn register_memory(
        &self,
        owner: Rc<dyn Any>,
        base: NonNull<u8>,
        len: usize,
    ) -> impl Future<Output = io::Result<LoopMemory>> + use<> {
        let event_loop = self.clone();
        async move {
            let inner = &event_loop.0;
            let count = u32::try_from(len.div_ceil(PIECE)).unwrap_or(u32::MAX);
            let first = inner.ring.borrow_mut().reserve_buffers(count)?;
            let taken = Cell::new(count);
            let memory = Registered { inner: Rc::downgrade(inner), first, taken, _owner: owner };
            for piece in 0..count {
                if piece > 0 {
                    event_loop.next_iteration().await;
                }
                let at = piece as usize * PIECE;
                let segment = libc::iovec {
                    iov_base: base.as_ptr().wrapping_add(at).cast(),
                    iov_len: PIECE.min(len - at),
                };
                inner.ring.borrow_mut().register_buffer(first + piece, segment)?;
            }
            Ok(LoopMemory(Rc::new(memory)))
        }
    }

    async fn next_iteration(&self) {
        self.sleep_until(self.now_ns()).await;
    }

    pub(crate) fn ring_id(&self) -> RingId {
        NonNull::from(&*self.0).cast()
    }
}

impl LoopMemory {
    /// Returns the map from offsets to places.
    pub fn places(&self) -> Places {
        let ring = NonNull::new(self.0.inner.as_ptr().cast_mut().cast());
        Places { ring: ring.unwrap_or(NonNull::dangling()), first: self.0.first as u16 }
    }

    /// Unregisters the memory, 64 MiB per iteration, if no other clone exists.
    ///
    /// Operations in flight hold clones.
    pub async fn unregister(self) {
        let Ok(registered) = Rc::try_unwrap(self.0) else { return };
        while registered.release_last() {
            let Some(inner) = registered.inner.upgrade() else { return };
            EventLoop(inner).next_iteration().await;
        }
    }
}

impl Registered {
    /// Releases the last index. Returns `false` if none is left.
    fn release_last(&self) -> bool {
        let Some(left) = self.taken.get().checked_sub(1) else { return false };
        self.taken.set(left);
        // If the loop has ended, its ring is closed. None of its callbacks runs during the borrow.
        if let Some(inner) = self.inner.upgrade()
            && let Ok(mut ring) = inner.ring.try_borrow_mut()
        {
            ring.release_buffer(self.first + left);
        }
        left > 0
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        while self.release_last() {}
    }
}

impl fmt::Debug for LoopMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Registered { first, taken, .. } = &*self.0;
        write!(f, "LoopMemory({} places from {first} on)", taken.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_a_place_and_no_operation_has_two() {
        let places = Places { ring: NonNull::dangling(), first: 7 };
        let piece = PIECE as u64;
        let index = |offset, len| places.at(offset, len).map(|place| place.index);
        assert_eq!((index(0, 1), index(0, PIECE)), (Some(7), Some(7)));
        assert_eq!((index(piece - 1, 1), index(piece, 1)), (Some(7), Some(8)));
        assert_eq!((index(piece - 1, 2), index(0, PIECE + 1)), (None, None));
        assert_eq!(index(16 * piece + 5, PIECE - 5), Some(23));
        assert_eq!(index(u64::MAX, 2), None);
    }
}
