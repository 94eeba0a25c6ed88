//! Memory of an I/O operation, and who keeps it alive (contract E8).
//!
//! An operation reads from or writes to a list of segments that somebody owns: a guest's memory, a
//! bounce buffer, a `Vec`. [`IoBufs`] carries both, so that whoever holds it may hand it to the
//! kernel: while an operation is in flight its `IoBufs` live in the loop's slot, and they come back
//! with the completion.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::rc::Rc;

use crate::registered::Place;

/// The memory of one I/O operation: a scatter-gather list and the owner that keeps it mapped.
///
/// The list keeps its capacity when it is cleared, so a preallocated request slot that gets its
/// `IoBufs` back with every completion allocates nothing in steady state.
#[derive(Default)]
pub struct IoBufs {
    iov: Vec<libc::iovec>,
    len: usize,
    owner: Option<Rc<dyn Any>>,
    /// The place in a ring's table that all segments lie in, if they do.
    place: Option<Place>,
}

impl IoBufs {
    /// No memory at all, as flush and discard have it. Does not allocate.
    pub const fn new() -> Self {
        IoBufs { iov: Vec::new(), len: 0, owner: None, place: None }
    }

    /// An empty list with room for `segments` segments.
    pub fn with_capacity(segments: usize) -> Self {
        IoBufs { iov: Vec::with_capacity(segments), ..IoBufs::new() }
    }

    /// Forgets segments and owner, keeps the list's capacity.
    pub fn clear(&mut self) {
        self.iov.clear();
        self.len = 0;
        self.owner = None;
        self.place = None;
    }

    /// Names the owner of all segments pushed from here on.
    ///
    /// # Panics
    ///
    /// In debug builds, when there are segments already: they may be somebody else's.
    pub fn set_owner(&mut self, owner: Rc<dyn Any>) {
        debug_assert!(self.iov.is_empty(), "an owner is named before its segments");
        self.owner = Some(owner);
    }

    /// The owner of the segments, if one was named.
    pub fn owner(&self) -> Option<&Rc<dyn Any>> {
        self.owner.as_ref()
    }

    /// Appends a segment, merging it with the last one where the two are adjacent.
    ///
    /// # Safety
    ///
    /// `base..base + len` must stay mapped, readable and (if the operation writes to memory)
    /// writable for as long as the owner lives, and no Rust reference to that memory may exist
    /// while the `IoBufs` does, unless the memory is only read through both.
    pub unsafe fn push(&mut self, base: *mut u8, len: usize) {
        // SAFETY: the caller's promise; no place is named.
        unsafe { self.push_registered(base, len, None) };
    }

    /// The same of memory that has a `place` in a ring's table: an operation on that ring, with all
    /// of its memory in one place, names it by that.
    ///
    /// # Safety
    ///
    /// As of [`push`](Self::push). The owner keeps the [`LoopMemory`](crate::LoopMemory) that the
    /// place is of, and `base..base + len` are the bytes that the place was asked for.
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

    /// Before a segment in this place is appended.
    #[inline]
    fn join_place(&mut self, place: Option<Place>) {
        if self.iov.is_empty() {
            self.place = place;
        } else if self.place != place {
            self.place = None;
        }
    }

    /// Bytes in all segments together.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The place in a ring's table that all of it lies in.
    #[inline]
    pub(crate) fn place(&self) -> Option<Place> {
        self.place
    }

    /// The segments, as system calls take them.
    pub fn iovecs(&self) -> &[libc::iovec] {
        &self.iov
    }

    /// Whether every segment's address and length is a multiple of `align`, a power of two (bytes),
    /// as `O_DIRECT` wants it (open(2)).
    pub fn is_aligned(&self, align: usize) -> bool {
        debug_assert!(align.is_power_of_two());
        let bits = self.iov.iter().fold(0, |bits, v| bits | v.iov_base as usize | v.iov_len);
        bits & (align - 1) == 0
    }

    /// Drops the first `n` bytes of the list: what a short transfer has done already.
    /// More than [`len`](Self::len) empties it.
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

    /// Copies the list's bytes from `offset` on out to `dst`; returns how many there were.
    pub fn copy_out(&self, offset: usize, dst: &mut [u8]) -> usize {
        let mut done = 0;
        self.for_each(offset, dst.len(), |base, len| {
            // SAFETY: `for_each` stays inside a segment, which is mapped as `push` was promised;
            // `dst[done..]` has at least `len` bytes left, and nobody holds a reference into the
            // segment, so the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(base, dst[done..].as_mut_ptr(), len) };
            done += len;
        });
        done
    }

    /// Copies `src` over the list's bytes from `offset` on; returns how many bytes fitted.
    pub fn copy_in(&mut self, offset: usize, src: &[u8]) -> usize {
        let mut done = 0;
        self.for_each(offset, src.len(), |base, len| {
            // SAFETY: as in `copy_out`, the other way round; the segment is writable, as `push`
            // was promised for operations that write to memory.
            unsafe { std::ptr::copy_nonoverlapping(src[done..].as_ptr(), base, len) };
            done += len;
        });
        done
    }

    /// Writes `len` zeroes from `offset` on, as reads past the end of an image give them.
    pub fn zero(&mut self, offset: usize, len: usize) {
        self.for_each(offset, len, |base, len| {
            // SAFETY: `for_each` stays inside a writable, mapped segment.
            unsafe { std::ptr::write_bytes(base, 0, len) };
        });
    }

    /// Whether some of the owner's memory was taken away ([`lost`](crate::lost)): what was copied out
    /// of it so far may be zeroes that nobody wrote. One load as long as nobody has lost any.
    #[inline]
    pub fn is_lost(&self) -> bool {
        crate::lost::losses() != 0 && self.owner.as_deref().is_some_and(crate::lost::has_lost)
    }

    /// Whether all bytes are zero, and were written so: what `detect-zeroes` asks of a write.
    pub fn is_zero(&self) -> bool {
        let mut zero = true;
        self.for_each(0, self.len, |base, len| {
            let mut chunk = [0; 512];
            let mut at = 0;
            while zero && at < len {
                let n = chunk.len().min(len - at);
                // SAFETY: `at + n <= len`, inside the segment; `chunk` is ours alone. The guest may
                // change the bytes meanwhile, hence the copy before they are looked at.
                unsafe { std::ptr::copy_nonoverlapping(base.add(at), chunk.as_mut_ptr(), n) };
                zero = chunk[..n].iter().all(|&b| b == 0);
                at += n;
            }
        });
        zero && !self.is_lost()
    }

    /// Makes this list a part of `whole`: its bytes from `offset` on, at most `len` of them and in at
    /// most `max_segments` segments. Both then share the memory and its owner. Returns how many
    /// bytes it is. Keeps the list's capacity.
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

    /// Whether all segments of both lists have one owner.
    #[inline]
    pub fn has_owner_of(&self, other: &IoBufs) -> bool {
        match (&self.owner, &other.owner) {
            (Some(a), Some(b)) => std::ptr::addr_eq(Rc::as_ptr(a), Rc::as_ptr(b)),
            _ => false,
        }
    }

    /// Appends all segments of `other`; both then share its memory. `false`, and nothing is appended,
    /// when this list has segments of another owner.
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

    /// Appends all segments of `other`, whoever owns them: this list then keeps both owners.
    pub fn append(&mut self, other: &IoBufs) {
        if other.is_empty() || self.append_shared(other) {
            return;
        }
        let owners = (self.owner.take(), other.owner.clone());
        self.owner = Some(Rc::new(owners));
        self.join_place(other.place);
        self.iov.extend_from_slice(&other.iov);
        self.len += other.len;
    }

    /// Appends a part of `whole`: its bytes from `offset` on, at most `len`. Returns how many there
    /// were. Of another owner's memory than what is in the list already, nothing is appended.
    pub fn append_part(&mut self, whole: &IoBufs, offset: usize, len: usize) -> usize {
        if self.iov.is_empty() {
            self.owner.clone_from(&whole.owner);
        } else if !self.has_owner_of(whole) {
            debug_assert!(false, "parts of different owners in one list");
            return 0;
        }
        let before = self.len;
        whole.for_each(offset, len, |base, len| {
            // SAFETY: the segment is of `whole`, whose owner keeps it, as it keeps this list's.
            unsafe { self.push(base, len) };
        });
        self.len - before
    }

    /// Copies `len` bytes of this list from `offset` on over `dst`'s from `dst_offset` on; returns
    /// how many there were in both.
    pub fn copy_to(&self, offset: usize, dst: &mut IoBufs, dst_offset: usize, len: usize) -> usize {
        let mut done = 0;
        self.for_each(offset, len, |src, len| {
            let at = done;
            dst.for_each(dst_offset + at, len, |base, len| {
                // SAFETY: `for_each` stays inside segments, mapped and (in `dst`) writable as `push`
                // was promised; `src + (done - at)` has `len` bytes left, since `dst` was asked for
                // no more than the segment's. A guest may have both lists share bytes, hence `copy`.
                unsafe { std::ptr::copy(src.add(done - at), base, len) };
                done += len;
            });
        });
        done
    }

    /// Calls `f` with each piece of the byte range `offset..offset + len`, cut to what is there.
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

/// A buffer of our own with the alignment `O_DIRECT` wants, zeroed at first.
///
/// While its [`IoBufs`] exist the memory belongs to the operation; [`IoBufs::copy_out`] and
/// [`IoBufs::copy_in`] reach its bytes.
pub struct AlignedBuf {
    base: *mut u8,
    layout: std::alloc::Layout,
}

/// From here on memory is worth not being touched before it is used, bytes. Miri takes its time for each.
const LARGE: usize = if cfg!(miri) { 1 << 13 } else { 1 << 20 };
/// What any allocation is aligned to, bytes.
const ALIGNED: usize = 16;

impl AlignedBuf {
    /// `IoBufs` over `len` fresh zeroed bytes aligned to `align`, a power of two.
    /// `None` when the memory cannot be had or `align` is no power of two.
    pub fn io_bufs(len: usize, align: usize) -> Option<IoBufs> {
        if len == 0 {
            return Some(IoBufs::new());
        }
        // Fresh pages are zero, and take up memory once they are used, but the allocator writes zeroes
        // where it is asked for more than its own alignment: of much memory, it is not.
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
        // Of bytes, and up to a power of two, there always is one, smaller than `align`.
        debug_assert!(lead < align);
        // SAFETY: the allocation is `lead + len` bytes or more, lives as long as the owner, and no
        // reference to it is ever made.
        unsafe { bufs.push(base.add(lead.min(size - len)), len) };
        Some(bufs)
    }
}

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
        // Written to while there are references to it.
        let memory = Rc::new([const { Cell::new(0) }; 64]);
        let base = memory.as_ptr().cast_mut().cast();
        let mut bufs = IoBufs::with_capacity(2);
        bufs.set_owner(memory.clone());
        // SAFETY: inside the array, which the owner keeps; the test looks at it through `bufs`.
        unsafe {
            bufs.push(base, 8);
            bufs.push(base.wrapping_add(32), 8);
        }
        (memory, bufs)
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
    fn a_part_shares_memory_and_is_cut_to_what_there_is() {
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
