//! Counts what a thread costs beside its work, for tests of what a request costs.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static LOCKS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of the calling thread's allocations so far.
///
/// Reallocations count. Only if [`CountingAllocator`] is the global allocator.
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// Returns the number of locks that the calling thread has taken so far.
///
/// Counted are those of [`sync::lock`](crate::sync::lock).
pub fn locks_taken() -> u64 {
    LOCKS.get()
}

pub(crate) fn lock_taken() {
    LOCKS.set(LOCKS.get() + 1);
}

/// The system's allocator, counting each thread's calls.
#[derive(Debug)]
pub struct CountingAllocator;

// SAFETY: everything is passed on to the system's allocator; the counter itself allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}
