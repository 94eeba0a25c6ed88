//! Copies between our memory and the guest's, which changes under us.
//!
//! Volatile accesses: each byte is read, or written, exactly once and never re-read by a compiler
//! that thinks it knows the value. Meant for headers and tables, tens of bytes; data goes by
//! segments to the kernel.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

/// A word at any address: volatile accesses through it need no alignment.
#[repr(C, packed)]
#[derive(Clone, Copy)]
struct Unaligned(u64);

const WORD: usize = size_of::<Unaligned>();

/// Fetches the cache line at `host` into this CPU's caches: a hint.
///
/// The line is shared with other CPUs, or, `for_writing`, taken from them. Without such an instruction of the
/// architecture there is no effect. The address need not be mapped.
#[inline]
pub fn prefetch(host: *const u8, for_writing: bool) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch touches no memory that a program could see, and faults on no address
        // (Intel SDM, PREFETCHh, PREFETCHW; CPUs without PREFETCHW run it as a no-op).
        unsafe {
            if for_writing {
                _mm_prefetch::<_MM_HINT_ET0>(host.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T0>(host.cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (host, for_writing);
}

/// Reads a little-endian word that the guest publishes: what it wrote before is seen afterwards. `None`: the word is
/// not aligned to its size.
///
/// # Safety
///
/// `src` must be valid for reads of 4 bytes.
pub(crate) unsafe fn load_acquire(src: *mut u8) -> Option<u32> {
    let word: *mut AtomicU32 = src.cast();
    // SAFETY: the caller vouches for the bytes; the alignment was checked. The other side accesses them at the same
    // time, so they are only ever accessed as an atomic or volatile.
    word.is_aligned().then(|| u32::from_le(unsafe { &*word }.load(Ordering::Acquire)))
}

/// Writes a little-endian word that the guest waits for: it sees then what was written before. `None`: the word is not
/// aligned to its size.
///
/// # Safety
///
/// `dst` must be valid for writes of 4 bytes.
pub(crate) unsafe fn store_release(dst: *mut u8, value: u32) -> Option<()> {
    let word: *mut AtomicU32 = dst.cast();
    // SAFETY: as in `load_acquire`.
    word.is_aligned().then(|| unsafe { &*word }.store(value.to_le(), Ordering::Release))
}

/// Copies from guest memory.
///
/// # Safety
///
/// `src` must be valid for reads of `dst.len()` bytes, and not overlap `dst`.
pub(crate) unsafe fn copy_from(src: *const u8, dst: &mut [u8]) {
    let mut at = 0;
    let mut words = dst.chunks_exact_mut(WORD);
    for word in &mut words {
        // SAFETY: `at + WORD <= dst.len()`, so the read is inside what the caller vouches for;
        // `Unaligned` has alignment 1.
        let value = unsafe { src.add(at).cast::<Unaligned>().read_volatile() };
        word.copy_from_slice(&{ value.0 }.to_ne_bytes());
        at += WORD;
    }
    for byte in words.into_remainder() {
        // SAFETY: `at < dst.len()`.
        *byte = unsafe { src.add(at).read_volatile() };
        at += 1;
    }
}

/// Copies to guest memory.
///
/// # Safety
///
/// `dst` must be valid for writes of `src.len()` bytes, and not overlap `src`.
pub(crate) unsafe fn copy_to(src: &[u8], dst: *mut u8) {
    let mut at = 0;
    let (words, rest) = src.as_chunks::<WORD>();
    for word in words {
        let value = Unaligned(u64::from_ne_bytes(*word));
        // SAFETY: `at + WORD <= src.len()`, so the write is inside what the caller vouches for;
        // `Unaligned` has alignment 1.
        unsafe { dst.add(at).cast::<Unaligned>().write_volatile(value) };
        at += WORD;
    }
    for &byte in rest {
        // SAFETY: `at < src.len()`.
        unsafe { dst.add(at).write_volatile(byte) };
        at += 1;
    }
}
