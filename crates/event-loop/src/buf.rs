//! The memory of an I/O operation, with its owner (memory contract).
//!
//! An operation reads from or writes to a list of segments: a guest's memory, a bounce buffer, a `Vec`.
//! [`IoBufs`] carries the segments and an owner that keeps them mapped, so it can be handed to the kernel.
//! While an operation is in flight, its `IoBufs` is in the loop's slot. It comes back with the completion.

#![allow(unsafe_code)]

use std::fmt;
use std::rc::Rc;

use crate::registered::Place;

/// Keeps the memory of [`IoBufs`] mapped until it is dropped.
pub trait MemoryOwner: 'static {
    /// Returns whether another process took some of the memory away.
    ///
    /// A front end does so that shrinks the file of its guest's memory. Code that copies out of such memory
    /// asks afterwards.
    fn is_lost(&self) -> bool {
        false
    }
}

impl<T: 'static, const N: usize> MemoryOwner for [T; N] {}

/// The owners of two lists that became one.
struct Both(Option<Rc<dyn MemoryOwner>>, Option<Rc<dyn MemoryOwner>>);

impl MemoryOwner for Both {
    fn is_lost(&self) -> bool {
        [&self.0, &self.1].into_iter().flatten().any(|owner| owner.is_lost())
    }
}

/// The memory of one I/O operation: segments, and the owner that keeps them mapped.
///
/// The list keeps its capacity when cleared. So a preallocated request slot, which gets its `IoBufs` back
/// with every completion, allocates nothing in steady state.
#[derive(Default)]
pub struct IoBufs {
    iov: Vec<libc::iovec>,
    len: usize,
    owner: Option<Rc<dyn MemoryOwner>>,
    /// The ring's table entry that contains all segments, if one does.
    place: Option<Place>,
}

impl IoBufs {
    /// Returns an empty list, as for a flush or discard. Does not allocate.
    pub const fn new() -> Self {
        IoBufs { iov: Vec::new(), len: 0, owner: None, place: None }
    }

    /// Returns an empty list with room for `segments` segments.
    pub fn with_capacity(segments: usize) -> Self {
        IoBufs { iov: Vec::with_capacity(segments), ..IoBufs::new() }
    }

    /// Removes segments and owner, and keeps the list's capacity.
    pub fn clear(&mut self) {
        self.iov.clear();
        self.len = 0;
        self.owner = None;
        self.place = None;
    }

    /// Sets the owner of the segments pushed from here on.
    ///
    /// # Panics
    ///
    /// If the list has segments: their memory would no longer be kept alive.
    pub fn set_owner(&mut self, owner: Rc<dyn MemoryOwner>) {
        assert!(self.iov.is_empty(), "an owner is named before its segments");
        self.owner = Some(owner);
    }

    /// Returns the owner of the segments, if it was set.
    pub fn owner(&self) -> Option<&Rc<dyn MemoryOwner>> {
        self.owner.as_ref()
    }

    /// Appends a segment of `len` bytes from `base` on.
    ///
    /// A segment that is adjacent to the last one is merged with it.
    ///
    /// # Safety
    ///
    /// `base..base + len` must stay mapped, readable and (if the operation writes to memory) writable for as
    /// long as the owner lives. No Rust reference to that memory may exist while the `IoBufs` does, unless
    /// both only read the memory.
    pub unsafe fn push(&mut self, base: *mut u8, len: usize) {
        // SAFETY: the caller's promise; no table entry is named.
        unsafe { self.push_registered(base, len, None) };
    }

    /// Appends a segment of registered memory: `len` bytes from `base` on.
    ///
    /// `place` is the segment's entry in a ring's table. If one entry contains all segments of an operation
    /// on that ring, the operation uses the entry.
    ///
    /// # Safety
    ///
    /// As for [`push`](Self::push). The owner keeps the [`LoopMemory`](crate::LoopMemory) of the place alive,
    /// and the place was looked up for `base..base + len`.
    #[inline]
    pub unsafe fn push_registered(&mut self, base: *mut u8, len: usize, place: Option<Place>) {
        if len == 0 {
            return;
        }
        self.join_place(place);
        self.len += len;
        if let Some(last) = self.iov.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base
        {
            last.iov_len += len;
            return;
        }
        self.iov.push(libc::iovec { iov_base: base.cast(), iov_len: len });
    }

    /// Updates `place` before a segment in this entry is appended.
    #[inline]
    fn join_place(&mut self, place: Option<Place>) {
        if self.iov.is_empty() {
            self.place = place;
        } else if self.place != place {
            self.place = None;
        }
    }

    /// Returns the number of bytes in all segments.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the list has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ring's table entry that contains all segments.
    #[inline]
    pub(crate) fn place(&self) -> Option<Place> {
        self.place
    }

    /// Returns the segments, as system calls take them.
    pub fn iovecs(&self) -> &[libc::iovec] {
        &self.iov
    }

    /// Returns whether each segment begins and ends at a multiple of `align` bytes.
    ///
    /// `align` is a power of two, as `O_DIRECT` requires (open(2)).
    pub fn is_aligned(&self, align: usize) -> bool {
        debug_assert!(align.is_power_of_two());
        let bits = self.iov.iter().fold(0, |bits, v| bits | v.iov_base as usize | v.iov_len);
        bits & (align - 1) == 0
    }

    /// Drops the first `n` bytes of the list, as after a short transfer.
    ///
    /// Empties the list if `n` exceeds [`len`](Self::len).
    pub fn advance(&mut self, n: usize) {
        let mut left = n.min(self.len);
        self.len -= left;
        let mut whole = 0;
        for v in &mut self.iov {
            if left >= v.iov_len {
                left -= v.iov_len;
                whole += 1;
            } else {
                v.iov_base = v.iov_base.cast::<u8>().wrapping_add(left).cast();
                v.iov_len -= left;
                break;
            }
        }
        self.iov.drain(..whole);
    }

    /// Copies bytes from byte `offset` on to `dst`. Returns the number of bytes copied.
    pub fn copy_out(&self, offset: usize, dst: &mut [u8]) -> usize {
        let mut done = 0;
        self.for_each(offset, dst.len(), |base, len| {
            // SAFETY: `for_each` stays inside a segment, which is mapped by the promise of `push`.
            // `dst[done..]` has at least `len` bytes left. No reference into the segment exists, so the
            // two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(base, dst[done..].as_mut_ptr(), len) };
            done += len;
        });
        done
    }

    /// Copies `src` to byte `offset` and on. Returns the number of bytes copied.
    pub fn copy_in(&mut self, offset: usize, src: &[u8]) -> usize {
        let mut done = 0;
        self.for_each(offset, src.len(), |base, len| {
            // SAFETY: as in `copy_out`, in the other direction. The segment is writable by the promise of
            // `push` for operations that write to memory.
            unsafe { std::ptr::copy_nonoverlapping(src[done..].as_ptr(), base, len) };
            done += len;
        });
        done
    }

    /// Zeroes `len` bytes from byte `offset` on, as for a read past an image's end.
    ///
    /// Bytes beyond [`len`](Self::len) are ignored.
    pub fn zero(&mut self, offset: usize, len: usize) {
        self.for_each(offset, len, |base, len| {
            // SAFETY: `for_each` stays inside a writable, mapped segment.
            unsafe { std::ptr::write_bytes(base, 0, len) };
        });
    }

    /// Returns whether some of the owner's memory was taken away.
    ///
    /// Data copied out so far may then be zeroes: see [`MemoryOwner::is_lost`].
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.owner.as_deref().is_some_and(MemoryOwner::is_lost)
    }

    /// Returns whether all bytes are zero and none was lost, for `detect-zeroes`.
    pub fn is_zero(&self) -> bool {
        let mut zero = true;
        self.for_each(0, self.len, |base, len| {
            let mut chunk = [0; 512];
            let mut at = 0;
            while zero && at < len {
                let n = chunk.len().min(len - at);
                // SAFETY: `at + n <= len`, inside the segment, and `chunk` is exclusively ours. The guest
                // may change the bytes meanwhile, hence the copy before the comparison.
                unsafe { std::ptr::copy_nonoverlapping(base.add(at), chunk.as_mut_ptr(), n) };
                zero = chunk[..n].iter().all(|&b| b == 0);
                at += n;
            }
        });
        zero && !self.is_lost()
    }

    /// Makes this list a part of `whole`. Returns the number of bytes.
    ///
    /// The part is the bytes from `offset` on, at most `len` of them and at most `max_segments` segments.
    /// Both lists then share memory and owner. Keeps the list's capacity.
    pub fn set_part(
        &mut self,
        whole: &IoBufs,
        offset: usize,
        len: usize,
        max_segments: usize,
    ) -> usize {
        self.clear();
        self.owner.clone_from(&whole.owner);
        self.place = whole.place;
        whole.for_each(offset, len, |base, len| {
            if self.iov.len() < max_segments {
                self.iov.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                self.len += len;
            }
        });
        self.len
    }

    /// Returns whether all segments of both lists have the same owner.
    #[inline]
    pub fn has_owner_of(&self, other: &IoBufs) -> bool {
        match (&self.owner, &other.owner) {
            (Some(a), Some(b)) => std::ptr::addr_eq(Rc::as_ptr(a), Rc::as_ptr(b)),
            _ => false,
        }
    }

    /// Appends all segments of `other`; both then share the memory.
    ///
    /// Returns `false`, and appends nothing, if this list has segments of another owner.
    pub fn append_shared(&mut self, other: &IoBufs) -> bool {
        if self.iov.is_empty() {
            self.owner.clone_from(&other.owner);
        } else if !self.has_owner_of(other) {
            return false;
        }
        if !other.iov.is_empty() {
            self.join_place(other.place);
        }
        self.iov.extend_from_slice(&other.iov);
        self.len += other.len;
        true
    }

    /// Appends all segments of `other`. The list then keeps both owners.
    pub fn append(&mut self, other: &IoBufs) {
        if other.is_empty() || self.append_shared(other) {
            return;
        }
        self.owner = Some(Rc::new(Both(self.owner.take(), other.owner.clone())));
        self.join_place(other.place);
        self.iov.extend_from_slice(&other.iov);
        self.len += other.len;
    }

    /// Appends a part of `whole`: its bytes from `offset` on, at most `len`.
    ///
    /// Returns the number of bytes. Appends nothing if this list has segments of another owner.
    pub fn append_part(&mut self, whole: &IoBufs, offset: usize, len: usize) -> usize {
        if self.iov.is_empty() {
            self.owner.clone_from(&whole.owner);
        } else if !self.has_owner_of(whole) {
            debug_assert!(false, "parts of different owners in one list");
            return 0;
        }
        let before = self.len;
        whole.for_each(offset, len, |base, len| {
            // SAFETY: the segment belongs to `whole`, whose owner is also this list's.
            unsafe { self.push(base, len) };
        });
        self.len - before
    }

    /// Copies `len` bytes from `offset` on to `dst` from `dst_offset` on.
    ///
    /// Returns the number of bytes copied, which is limited by both lists.
    pub fn copy_to(&self, offset: usize, dst: &mut IoBufs, dst_offset: usize, len: usize) -> usize {
        let mut done = 0;
        self.for_each(offset, len, |src, len| {
            let at = done;
            dst.for_each(dst_offset + at, len, |base, len| {
                // SAFETY: `for_each` stays inside segments, mapped and (in `dst`) writable by the promise of
                // `push`. `src + (done - at)` has `len` bytes left, since `dst` was asked for no more than
                // the segment has. The lists may overlap, hence `copy`.
                unsafe { std::ptr::copy(src.add(done - at), base, len) };
                done += len;
            });
        });
        done
    }

    /// Calls `f` with each piece of the byte range `offset..offset + len`, cut at the end of the list.
    pub(crate) fn for_each(
        &self,
        mut offset: usize,
        len: usize,
        mut f: impl FnMut(*mut u8, usize),
    ) {
        let mut left = len.min(self.len.saturating_sub(offset));
        for v in &self.iov {
            if left == 0 {
                return;
            }
            if offset >= v.iov_len {
                offset -= v.iov_len;
                continue;
            }
            let n = left.min(v.iov_len - offset);
            f(v.iov_base.cast::<u8>().wrapping_add(offset), n);
            left -= n;
            offset = 0;
        }
    }
}

impl fmt::Debug for IoBufs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBufs({} bytes in {} segments)", self.len, self.iov.len())
    }
}

/// A zeroed buffer with the alignment that `O_DIRECT` requires.
///
/// The memory belongs to its [`IoBufs`]. Access it with [`IoBufs::copy_out`] and [`IoBufs::copy_in`].
#[derive(Debug)]
pub struct AlignedBuf {
    base: *mut u8,
    layout: std::alloc::Layout,
}

/// From this size on, bytes, a buffer is not touched before its use. Smaller for Miri, which is slow.
const LARGE: usize = if cfg!(miri) { 1 << 13 } else { 1 << 20 };
/// The alignment of every allocation, bytes.
const ALIGNED: usize = 16;

impl AlignedBuf {
    /// Returns `len` zeroed bytes aligned to `align` bytes, a power of two.
    ///
    /// Returns `None` if the allocation fails or `align` is not a power of two.
    pub fn io_bufs(len: usize, align: usize) -> Option<IoBufs> {
        if len == 0 {
            return Some(IoBufs::new());
        }
        // Fresh pages are zero and occupy memory only once touched. If a request exceeds the allocator's own
        // alignment, the allocator writes zeroes itself. So align large buffers here.
        let large = len >= LARGE;
        let (size, own) = if large { (len.checked_add(align)?, ALIGNED) } else { (len, align) };
        if !align.is_power_of_two() {
            return None;
        }
        let layout = std::alloc::Layout::from_size_align(size, own).ok()?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        if base.is_null() {
            return None;
        }
        let mut bufs = IoBufs::with_capacity(1);
        bufs.set_owner(Rc::new(AlignedBuf { base, layout }));
        let lead = if large { base.align_offset(align) } else { 0 };
        // `align_offset` of a byte pointer always succeeds, with less than `align`.
        debug_assert!(lead < align);
        // SAFETY: the allocation has `lead + len` bytes or more and lives as long as the owner. No
        // reference to it is ever made.
        unsafe { bufs.push(base.add(lead.min(size - len)), len) };
        Some(bufs)
    }
}

impl MemoryOwner for AlignedBuf {}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `io_bufs` with this very layout, freed once.
        unsafe { std::alloc::dealloc(self.base, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn two_segments() -> (Rc<[Cell<u8>; 64]>, IoBufs) {
        // Written through raw pointers while references to the array exist.
        let memory = Rc::new([const { Cell::new(0) }; 64]);
        let base = memory.as_ptr().cast_mut().cast();
        let mut bufs = IoBufs::with_capacity(2);
        bufs.set_owner(memory.clone());
        // SAFETY: inside the array, which the owner keeps; the test accesses it through `bufs`.
        unsafe {
            bufs.push(base, 8);
            bufs.push(base.wrapping_add(32), 8);
        }
        (memory, bufs)
    }

    #[test]
    fn a_list_of_several_owners_is_lost_with_each() {
        struct Lost([Cell<u8>; 8]);
        impl MemoryOwner for Lost {
            fn is_lost(&self) -> bool {
                true
            }
        }
        let memory = Rc::new(Lost([const { Cell::new(0) }; 8]));
        let base = memory.0.as_ptr().cast_mut().cast();
        let mut lost = IoBufs::new();
        lost.set_owner(memory);
        // SAFETY: inside the array, which the owner keeps; nothing accesses it.
        unsafe { lost.push(base, 8) };
        let mut appended = two_segments().1;
        assert!(!appended.is_lost() && lost.is_lost());
        appended.append(&lost);
        assert!(appended.is_lost());

        let (mut gather, mut list) = (crate::Gather::with_capacity(2), IoBufs::new());
        gather.begin(&mut list);
        gather.append(&mut list, &two_segments().1, 0, 8, 8);
        assert!(!list.is_lost());
        gather.append(&mut list, &lost, 0, 8, 8);
        assert!(list.is_lost());
    }

    #[test]
    fn adjacent_segments_are_one() {
        let (memory, mut bufs) = two_segments();
        // SAFETY: as above.
        unsafe { bufs.push(memory.as_ptr().cast_mut().cast::<u8>().wrapping_add(40), 4) };
        assert_eq!((bufs.iovecs().len(), bufs.len()), (2, 20));
    }

    #[test]
    fn advance_over_a_segment_boundary() {
        let (memory, mut bufs) = two_segments();
        bufs.advance(10);
        assert_eq!(bufs.len(), 6);
        assert_eq!(bufs.iovecs()[0].iov_base as usize, memory.as_ptr() as usize + 34);
        bufs.advance(100);
        assert!(bufs.is_empty() && bufs.iovecs().is_empty());
    }

    #[test]
    fn a_part_shares_memory_and_is_cut_to_the_list() {
        let (memory, bufs) = two_segments();
        let mut part = IoBufs::new();
        assert_eq!(part.set_part(&bufs, 6, 100, 10), 10);
        assert_eq!(part.iovecs()[0].iov_base as usize, memory.as_ptr() as usize + 6);
        assert_eq!((part.iovecs().len(), part.len()), (2, 10));
        assert_eq!(part.set_part(&bufs, 6, 100, 1), 2);
        assert_eq!(part.set_part(&bufs, 8, 3, 10), 3);
        assert_eq!(part.iovecs()[0].iov_base as usize, memory.as_ptr() as usize + 32);
        assert_eq!(part.set_part(&bufs, 16, 3, 10), 0);
    }

    #[test]
    fn a_list_has_a_place_while_all_of_it_lies_there() {
        let memory = Rc::new([0u8; 64]);
        let place = |index| Some(Place { ring: std::ptr::NonNull::dangling(), index });
        let list = |places: &[Option<Place>]| {
            let mut bufs = IoBufs::new();
            bufs.set_owner(memory.clone());
            for (i, place) in places.iter().enumerate() {
                let base = memory.as_ptr().cast_mut().wrapping_add(16 * i);
                // SAFETY: inside the array, which the owner keeps. There is no ring.
                unsafe { bufs.push_registered(base, 8, *place) };
            }
            bufs
        };
        let (one, two) = (place(1), place(2));
        assert_eq!(list(&[one]).place(), one);
        assert_eq!(list(&[one, one]).place(), one);
        for mixed in [[one, two, one], [None, one, one], [one, None, one]] {
            assert_eq!(list(&mixed).place(), None);
        }
        let whole = list(&[two, two]);
        let mut part = list(&[one]);
        part.set_part(&whole, 4, 100, 10);
        assert_eq!(part.place(), two);
        assert!(part.append_shared(&list(&[])) && part.place() == two);
        assert!(part.append_shared(&whole) && part.place() == two);
        assert!(part.append_shared(&list(&[one])) && part.place().is_none());
        part.clear();
        assert_eq!(part.place(), None);
        assert!(part.append_shared(&whole) && part.place() == two);
    }

    #[test]
    fn parts_are_appended_and_merged() {
        let (_memory, bufs) = two_segments();
        let mut list = IoBufs::new();
        assert_eq!(list.append_part(&bufs, 2, 3), 3);
        assert_eq!(list.append_part(&bufs, 5, 100), 11);
        assert_eq!((list.iovecs().len(), list.len()), (2, 14));
        assert_eq!(list.append_part(&bufs, 0, 1), 1);
        let mut out = [9; 15];
        assert_eq!((list.iovecs().len(), list.copy_out(0, &mut out)), (3, 15));
        assert!(list.owner().is_some());
    }

    #[test]
    fn lists_of_different_owners_keep_both() {
        let (memory, mut list) = two_segments();
        let (other, appended) = two_segments();
        list.append(&appended);
        drop(appended);
        assert_eq!((list.iovecs().len(), list.len()), (4, 32));
        assert_eq!((Rc::strong_count(&memory), Rc::strong_count(&other)), (2, 2));
        drop(list);
        assert_eq!((Rc::strong_count(&memory), Rc::strong_count(&other)), (1, 1));
    }

    #[test]
    fn copies_between_lists_with_different_segments() {
        let (_memory, mut bufs) = two_segments();
        let mut source = AlignedBuf::io_bufs(64, 64).unwrap();
        source.copy_in(0, &std::array::from_fn::<u8, 64, _>(|i| i as u8));
        assert_eq!(source.copy_to(10, &mut bufs, 4, 100), 12);
        let mut out = [0; 16];
        bufs.copy_out(0, &mut out);
        assert_eq!(out, [0, 0, 0, 0, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]);
        assert_eq!(bufs.copy_to(4, &mut source, 60, 8), 4);
        source.copy_out(60, &mut out[..4]);
        assert_eq!(out[..4], [10, 11, 12, 13]);
    }

    #[test]
    fn much_memory_is_aligned_and_zero() {
        for align in [1, 16, 512, 4096, LARGE / 16] {
            let mut bufs = AlignedBuf::io_bufs(LARGE, align).unwrap();
            assert!(bufs.is_aligned(align) && bufs.is_zero());
            assert_eq!(bufs.copy_in(LARGE - 1, &[1, 2]), 1);
        }
        assert!(AlignedBuf::io_bufs(LARGE, 3).is_none());
        assert!(AlignedBuf::io_bufs(usize::MAX, 4096).is_none());
    }

    #[test]
    fn owned_memory_copies_and_zeroes() {
        let mut bufs = AlignedBuf::io_bufs(4096, 4096).unwrap();
        assert!(bufs.is_aligned(4096) && bufs.is_zero());
        assert_eq!(bufs.copy_in(4094, &[1, 2, 3]), 2);
        assert!(!bufs.is_zero());
        let mut out = [9; 4];
        assert_eq!(bufs.copy_out(4093, &mut out), 3);
        assert_eq!(out, [0, 1, 2, 9]);
        bufs.zero(4095, 100);
        assert_eq!(bufs.copy_out(4093, &mut out), 3);
        assert_eq!(out, [0, 1, 0, 9]);
    }
}
