//! A thread's view: copies and segments, checked against a plain array.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_loop::{AlignedBuf, IoBufs};
use guest_memory::test_util::{memfd_memory, memfd_region};
use guest_memory::{AccessError, GuestMemory, MappedRegion, MemoryView, Source};
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// Two neighbours, a hole, a third.
const REGIONS: [(u64, u64); 3] = [(PAGE, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)];
const END: u64 = 6 * PAGE;

fn view() -> Rc<MemoryView> {
    MemoryView::new(memfd_memory(&REGIONS).unwrap())
}

/// Whether the byte at `addr` is memory.
fn is_memory(addr: u64) -> bool {
    REGIONS.iter().any(|&(start, size)| (start..start + size).contains(&addr))
}

#[test]
fn typed_reads_are_little_endian_at_any_alignment() {
    let view = view();
    let addr = 2 * PAGE - 3;
    view.write_bytes(addr, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(view.read_u8(addr + 7), Ok(8));
    assert_eq!(view.read_u16(addr + 2), Ok(0x0403));
    assert_eq!(view.read_u32(addr + 1), Ok(0x0504_0302));
    assert_eq!(view.read_u64(addr), Ok(0x0807_0605_0403_0201));
    view.write_u8(addr, 9).unwrap();
    assert_eq!(view.read_u8(addr), Ok(9));
}

#[test]
fn errors_name_addresses_outside_of_memory() {
    let view = view();
    let error = view.read_bytes(3 * PAGE - 8, &mut [0; 16]);
    assert_eq!(error, Err(AccessError { addr: 3 * PAGE, len: 8 }));
    assert_eq!(view.write_u8(0, 1), Err(AccessError { addr: 0, len: 1 }));
    let error = view.read_u64(u64::MAX - 3);
    assert_eq!(error, Err(AccessError { addr: u64::MAX - 3, len: 8 }));
    assert_eq!(view.read_bytes(0, &mut []), Ok(()), "nothing is everywhere");
}

#[test]
fn segments_span_regions_and_own_their_view() {
    let view = view();
    let mut bufs = IoBufs::with_capacity(4);
    view.push_iovecs(2 * PAGE - 10, 20, &mut bufs).unwrap();
    view.push_iovecs(4 * PAGE, 5, &mut bufs).unwrap();
    assert_eq!(bufs.len(), 25);
    assert!((2..=3).contains(&bufs.iovecs().len()), "neighbours may be neighbours here, too");
    assert_eq!(Rc::strong_count(&view), 2, "one owner for all");

    bufs.copy_in(8, b"span");
    assert_eq!(&view.read_array::<4>(2 * PAGE - 2).unwrap(), b"span");
    bufs.clear();
    assert_eq!(Rc::strong_count(&view), 1);
}

#[test]
#[should_panic(expected = "two owners")]
fn segments_of_two_owners_do_not_mix() {
    let mut bufs = AlignedBuf::io_bufs(16, 16).unwrap();
    let _ = view().push_iovecs(PAGE, 1, &mut bufs);
}

proptest! {
    #[test]
    fn copies_like_an_array(
        writes in prop::collection::vec((0..END, prop::collection::vec(any::<u8>(), 0..300)), 1..20),
        reads in prop::collection::vec((0..END, 0..600usize), 1..20),
    ) {
        let view = view();
        let mut model = vec![0; END as usize + 1024];
        for (addr, data) in &writes {
            let range = *addr..*addr + data.len() as u64;
            let ok = range.clone().all(is_memory);
            prop_assert_eq!(view.write_bytes(*addr, data).is_ok(), ok);
            // A failed write has written what comes before the hole.
            for (at, byte) in range.zip(data).take_while(|&(at, _)| is_memory(at)) {
                model[at as usize] = *byte;
            }
        }
        for &(addr, len) in &reads {
            let ok = (addr..addr + len as u64).all(is_memory);
            let mut copy = vec![0; len];
            prop_assert_eq!(view.read_bytes(addr, &mut copy).is_ok(), ok);
            let mut bufs = IoBufs::new();
            prop_assert_eq!(view.push_iovecs(addr, len, &mut bufs).is_ok(), ok);
            if ok {
                let expected = &model[addr as usize..addr as usize + len];
                prop_assert_eq!(&copy, expected);
                let mut copy = vec![0; len];
                prop_assert_eq!(bufs.copy_out(0, &mut copy), len);
                prop_assert_eq!(&copy, expected);
            }
        }
    }
}

#[test]
fn words_that_publish_are_aligned_and_in_memory() {
    let view = MemoryView::new(memfd_memory(&[(0x1000, 0x1000), (0x2000, 0x1000)]).unwrap());
    view.store_release(0x1ffc, 0x0403_0201).unwrap();
    assert_eq!(view.load_acquire(0x1ffc), Ok(0x0403_0201));
    let mut bytes = [0; 4];
    view.read_bytes(0x1ffc, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4], "little-endian");
    for addr in [0x1ffe, 0x1001, 0x3000, 0xffc, u64::MAX - 3] {
        assert!(view.load_acquire(addr).is_err(), "{addr:#x}");
        assert!(view.store_release(addr, 1).is_err(), "{addr:#x}");
    }
}

/// Finds memory at one address, and counts how often it is asked.
#[derive(Debug, Default)]
struct OneMore(AtomicUsize);

impl Source for OneMore {
    fn find(&self, addr: u64) -> Option<Arc<MappedRegion>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        // Whatever address was asked for.
        let region = memfd_region(END, PAGE).unwrap().map().unwrap();
        (addr != u64::MAX).then(|| Arc::new(region))
    }
}

#[test]
fn a_source_is_asked_once_for_memory_that_is_missing() {
    let source = Arc::new(OneMore::default());
    let asked = || source.0.load(Ordering::Relaxed);
    let memory = GuestMemory::clone(&memfd_memory(&REGIONS).unwrap());
    let view = MemoryView::new(Arc::new(memory.with_source(source.clone())));
    view.write_u8(PAGE, 1).unwrap();
    assert_eq!(asked(), 0);
    view.write_bytes(END, b"found").unwrap();
    for (start, _) in REGIONS.into_iter().chain(REGIONS) {
        // Other regions replace it among the remembered ones.
        view.read_u8(start).unwrap();
    }
    assert_eq!(&view.read_array::<5>(END).unwrap(), b"found");
    let mut bufs = IoBufs::with_capacity(1);
    view.push_iovecs(END + PAGE - 1, 1, &mut bufs).unwrap();
    assert_eq!(asked(), 1);
    // A region elsewhere is not taken for the address, and nothing is found for the last one.
    assert_eq!(view.read_u8(3 * PAGE), Err(AccessError { addr: 3 * PAGE, len: 1 }));
    assert_eq!(view.read_u8(u64::MAX), Err(AccessError { addr: u64::MAX, len: 1 }));
    assert_eq!(asked(), 3);
    drop(bufs);
}
