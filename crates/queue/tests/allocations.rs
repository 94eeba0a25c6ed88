//! Nothing is allocated from kick to signal.

use crate::common;

use common::{DATA, Pair, Setup, segment};
use event_loop::IoBufs;
use event_loop::counting::allocations;

#[test]
fn none_per_request() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1, "the counter counts");

    let mut pair = Setup { size: 64, event_idx: true, ..Setup::default() }.build();
    let mut bufs = IoBufs::with_capacity(4);
    let (r, w) = ([segment(DATA, 16)], [segment(DATA + 64, 512), segment(DATA + 8192, 513)]);
    let before = allocations();
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
    assert_eq!(allocations(), before);
}
