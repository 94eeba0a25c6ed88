//! Nothing is allocated from kick to signal.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{DATA, Pair, Setup, segment};
use event_loop::IoBufs;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: passes everything on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: likewise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: likewise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn none_per_request() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get(), before + 1, "the counter counts");

    let mut pair = Setup { size: 64, event_idx: true, ..Setup::default() }.build();
    let mut bufs = IoBufs::with_capacity(4);
    let (r, w) = ([segment(DATA, 16)], [segment(DATA + 64, 512), segment(DATA + 8192, 513)]);
    let before = ALLOCATIONS.get();
    for round in 0..1000 {
        for i in 0..16 {
            if i % 2 == 0 {
                pair.driver.add(&r, &w).unwrap();
            } else {
                pair.driver.add_indirect(DATA + 0x10000 + i * 256, &r, &w).unwrap().unwrap();
            }
        }
        pair.driver.publish();
        let Pair { queue, chain, memory, driver } = &mut pair;
        queue.suppress_kicks();
        while queue.pop(chain).unwrap() {
            let (header, _) = chain.readable().split_array::<16>(memory).unwrap();
            assert_eq!(header, [0; 16]);
            let (data, status) = chain.writable().split_last().unwrap();
            data.push_iovecs(&queue.memory(), &mut bufs).unwrap();
            assert_eq!(bufs.len(), 1024);
            bufs.clear();
            memory.write_u8(status, 1).unwrap();
            queue.add_used(chain.head(), 1025);
        }
        let _ = queue.enable_kicks();
        let _ = queue.publish();
        let reaped = std::iter::from_fn(|| driver.reap()).count();
        assert_eq!(reaped, 16, "round {round}");
    }
    assert_eq!(ALLOCATIONS.get(), before);
}
