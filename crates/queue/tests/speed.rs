//! What a request costs in the queue, run by hand:
//! `cargo test --release -p ringmill-queue --test speed -- --ignored --nocapture`.

use crate::common;

use std::time::Instant;

use common::{DATA, Pair, Setup, segment};
use event_loop::IoBufs;
use guest_memory::test_util::{USER_BASE, memfd_memory};
use queue::{Inflight, Queue};

/// Times the device's part only: the driver fills the ring, then the clock runs.
fn device_ns(indirect: bool, event_idx: bool, access: bool, record: bool) -> f64 {
    const BATCH: u64 = 32;
    let mut pair = Setup { size: 128, event_idx, ..Setup::default() }.build();
    if record {
        let memory = memfd_memory(&[(0, Inflight::region_len(128) as u64)]).unwrap();
        let inflight = Inflight::new(&memory, USER_BASE, 128).unwrap();
        let (memory, config) = (pair.memory.clone(), pair.driver.config());
        pair.queue = Queue::with_inflight(memory, config, Some(inflight)).unwrap();
    }
    let mut bufs = IoBufs::with_capacity(4);
    let mut best = f64::MAX;
    for _ in 0..20 {
        let (mut spent, rounds) = (0, 2000);
        for _ in 0..rounds {
            for i in 0..BATCH {
                let (r, w) = (
                    [segment(DATA + i * 64, 16)],
                    [segment(0x80000 + i * 4096, 4096), segment(DATA + i * 64 + 32, 1)],
                );
                if indirect {
                    pair.driver.add_indirect(DATA + 0x10000 + i * 64, &r, &w).unwrap().unwrap();
                } else {
                    pair.driver.add(&r, &w).unwrap();
                }
            }
            pair.driver.publish();
            let Pair { queue, chain, memory, driver } = &mut pair;
            let start = Instant::now();
            while queue.pop(chain).unwrap() {
                if access {
                    let (header, _) = chain.readable().split_array::<16>(memory).unwrap();
                    std::hint::black_box(header);
                    let (data, status) = chain.writable().split_last().unwrap();
                    data.push_iovecs(memory, &mut bufs).unwrap();
                    std::hint::black_box(bufs.iovecs());
                    bufs.clear();
                    memory.write_u8(status, 0).unwrap();
                }
                queue.add_used(chain.head(), 4097);
            }
            std::hint::black_box(queue.publish());
            spent += start.elapsed().as_nanos();
            assert_eq!(std::iter::from_fn(|| driver.reap()).count() as u64, BATCH);
        }
        best = best.min(spent as f64 / (rounds * BATCH) as f64);
    }
    best
}

#[test]
#[ignore = "a measurement"]
fn nanoseconds_per_request() {
    println!("3 descriptors, batches of 32, publish once per batch; best of 20");
    for indirect in [false, true] {
        for event_idx in [false, true] {
            let bare = device_ns(indirect, event_idx, false, false);
            let all = device_ns(indirect, event_idx, true, false);
            let record = device_ns(indirect, event_idx, true, true);
            println!(
                "indirect {indirect:5}, EVENT_IDX {event_idx:5}: pop + add_used {bare:5.1} ns, \
                 with header, iovecs and status {all:5.1} ns, and with a record {record:5.1} ns"
            );
        }
    }
}
