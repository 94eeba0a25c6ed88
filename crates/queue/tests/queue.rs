//! Chains from the driver to the device and back.

use crate::common;

use std::rc::Rc;
use std::sync::Arc;

use common::{DATA, MEMORY, Pair, RINGS, Setup, readable, segment, writable};
use event_loop::IoBufs;
use guest_memory::test_util::{USER_BASE, memfd_memory, memfd_region};
use guest_memory::{AccessError, MemoryView};
use queue::driver::{Driver, Used};
use queue::{Queue, QueueConfig, QueueError, SegmentsError};

#[test]
fn chain_arrives_as_sent() {
    for indirect in [false, true] {
        let mut pair = Setup::default().build();
        let (r, w) = ([segment(DATA, 16), segment(DATA + 64, 512)], [segment(DATA + 4096, 1)]);
        let head = if indirect {
            pair.driver.add_indirect(DATA + 8192, &r, &w).unwrap()
        } else {
            pair.driver.add(&r, &w)
        };
        assert!(!pair.queue.has_work() && !pair.pop().unwrap(), "not published yet");
        assert!(pair.driver.publish());

        assert!(pair.queue.has_work() && pair.pop().unwrap());
        let Pair { queue, chain, driver, .. } = &mut pair;
        assert_eq!(Some(chain.head()), head);
        assert_eq!((readable(chain), writable(chain)), (r.to_vec(), w.to_vec()));
        assert_eq!((chain.readable_len(), chain.writable_len()), (528, 1));
        assert_eq!((queue.in_flight(), queue.next_avail(), queue.used_idx()), (1, 1, 0));
        assert!(!queue.has_work() && !queue.pop(chain).unwrap());

        queue.add_used(chain.head(), 1);
        assert_eq!(driver.reap(), None, "not published yet");
        assert!(queue.publish());
        assert_eq!((queue.in_flight(), queue.used_idx()), (0, 1));
        assert_eq!(driver.reap(), Some(Used { head: chain.head(), written: 1 }));
        assert_eq!(driver.free(), 8);
    }
}

#[test]
fn indirect_table_may_follow_direct_descriptors() {
    use queue::Descriptor;
    let mut pair = Setup::default().build();
    let [next, indirect, write] = [1, 4, 2];
    let table = DATA + 4096;
    pair.driver.set_descriptor(3, Descriptor { addr: DATA, len: 16, flags: next, next: 5 });
    // The write flag of a descriptor that refers to a table is ignored (2.7.5.3.2).
    let refers = Descriptor { addr: table, len: 16, flags: indirect | write, next: 0 };
    pair.driver.set_descriptor(5, refers);
    let status = Descriptor { addr: DATA + 64, len: 1, flags: write, next: 0 };
    pair.memory.write_bytes(table, &status.to_bytes()).unwrap();
    pair.driver.offer(3);
    pair.driver.publish();
    assert!(pair.pop().unwrap());
    assert_eq!(readable(&pair.chain), [segment(DATA, 16)]);
    assert_eq!(writable(&pair.chain), [segment(DATA + 64, 1)]);
}

#[test]
fn a_chain_may_be_as_long_as_the_queue_and_indirectly_longer() {
    let mut pair = Setup { size: 8, ..Setup::default() }.build();
    let r: Vec<_> = (0..8).map(|i| segment(DATA + i * 64, 32)).collect();
    pair.driver.add(&r, &[]).unwrap();
    pair.driver.publish();
    pair.complete();
    assert_eq!(readable(&pair.chain), r);
    let _ = pair.queue.publish();
    pair.driver.reap().unwrap();

    let r: Vec<_> = (0..queue::MAX_SEGMENTS as u64).map(|i| segment(DATA + i * 64, 32)).collect();
    pair.driver.add_indirect(DATA + 0x20000, &r, &[]).unwrap().unwrap();
    pair.driver.publish();
    assert!(pair.pop().unwrap());
    assert_eq!(readable(&pair.chain), r);
}

#[test]
fn indices_wrap_around() {
    let mut pair = Setup { start: u16::MAX - 10, ..Setup::default() }.build();
    for round in 0..40u32 {
        let heads: Vec<_> =
            (0..5).map(|i| pair.driver.add(&[segment(DATA + i, 1)], &[]).unwrap()).collect();
        pair.driver.publish();
        for (i, head) in heads.iter().enumerate() {
            assert!(pair.pop().unwrap());
            assert_eq!(pair.chain.head(), *head);
            assert_eq!(readable(&pair.chain), [segment(DATA + i as u64, 1)]);
        }
        assert!(!pair.pop().unwrap());
        for head in heads.iter().rev() {
            pair.queue.add_used(*head, round);
        }
        assert!(pair.queue.publish() && !pair.queue.publish(), "once for all");
        for head in heads.iter().rev() {
            assert_eq!(pair.driver.reap(), Some(Used { head: *head, written: round }));
        }
    }
    let index = (u16::MAX - 10).wrapping_add(200);
    assert_eq!((pair.queue.next_avail(), pair.queue.used_idx()), (index, index));
}

#[test]
fn the_largest_queue_and_the_smallest() {
    for size in [1, if cfg!(miri) { 64 } else { 32768 }] {
        let memory = MemoryView::new(memfd_memory(&[(0, 4 << 20)]).unwrap());
        let mut driver = Driver::new(&memory, 0, size, true).unwrap();
        let queue = Queue::new(Rc::clone(&memory), driver.config()).unwrap();
        let mut chain = queue::Chain::new();
        for _ in 0..2 {
            for i in 0..u64::from(size) {
                driver.add(&[segment(i, 1)], &[]).unwrap();
            }
            assert_eq!(driver.add(&[segment(0, 1)], &[]), None);
            driver.publish();
            for i in 0..u64::from(size) {
                assert!(queue.pop(&mut chain).unwrap());
                assert_eq!(readable(&chain), [segment(i, 1)]);
                queue.add_used(chain.head(), 0);
            }
            assert!(!queue.pop(&mut chain).unwrap());
            let _ = queue.publish();
            while driver.reap().is_some() {}
            assert_eq!(driver.free(), usize::from(size));
        }
    }
}

/// Every way to cut a request of 16 bytes header, 8 bytes data and, writable, 4 bytes data and a
/// status into segments gives the same request (VIRTIO_F_ANY_LAYOUT).
#[test]
fn any_layout_is_the_same_request() {
    let request: Vec<u8> = (1..=24).collect();
    let cuts = |len: u32, mask: u32| {
        let mut segments = vec![segment(DATA, 0)];
        for i in 0..len {
            if let Some(last) = segments.last_mut() {
                last.len += 1;
            }
            if mask >> i & 1 == 1 && i + 1 < len {
                // The next segment comes after a gap of 32 bytes.
                let addr = segments.last().map_or(0, |s| s.addr + u64::from(s.len) + 32);
                segments.push(segment(addr, 0));
            }
        }
        segments
    };
    let step = if cfg!(miri) { 4097 * 256 } else { 4097 };
    for mask in (0..1 << 23).step_by(step).chain([1 << 15, (1 << 23) - 1]) {
        let mut pair = Setup { size: 32, ..Setup::default() }.build();
        let r = cuts(24, mask);
        let mut sent = request.as_slice();
        for s in &r {
            let (piece, rest) = sent.split_at(s.len as usize);
            pair.memory.write_bytes(s.addr, piece).unwrap();
            sent = rest;
        }
        let w: Vec<_> = cuts(5, mask >> 8).iter().map(|s| segment(s.addr + 4096, s.len)).collect();
        pair.driver.add_indirect(0x80000, &r, &w).unwrap().unwrap();
        pair.driver.publish();
        assert!(pair.pop().unwrap());

        let (header, data) = pair.chain.readable().split_array::<16>(&pair.memory).unwrap();
        assert_eq!(header, request[..16]);
        let mut bufs = IoBufs::new();
        data.push_iovecs(&pair.memory, &mut bufs).unwrap();
        let mut copy = [0; 9];
        assert_eq!(bufs.copy_out(0, &mut copy), 8);
        assert_eq!(copy[..8], request[16..]);

        let (into, status) = pair.chain.writable().split_last().unwrap();
        assert_eq!(into.write(&pair.memory, &[7; 9]).unwrap(), 4);
        let last = w.last().unwrap();
        assert_eq!(status, last.addr + u64::from(last.len) - 1);
        assert_eq!(pair.memory.read_u8(status), Ok(0), "the status is not part of the data");
        pair.memory.write_u8(status, 9).unwrap();
        let mut written = [0; 5];
        assert_eq!(pair.chain.writable().read(&pair.memory, &mut written).unwrap(), 5);
        assert_eq!(written, [7, 7, 7, 7, 9]);
    }
}

#[test]
fn short_and_unmapped_buffers_fail_on_access() {
    let mut pair = Setup::default().build();
    pair.driver.add(&[segment(DATA, 15)], &[segment(MEMORY - 1, 2)]).unwrap();
    pair.driver.publish();
    assert!(pair.pop().unwrap());
    let header = pair.chain.readable().split_array::<16>(&pair.memory);
    assert_eq!(header.unwrap_err(), SegmentsError::Short { wanted: 16, len: 15 });
    let outside = AccessError { addr: MEMORY, len: 1 };
    assert_eq!(pair.chain.writable().write(&pair.memory, &[1; 2]), Err(outside));
    let bytes = pair.chain.writable().split_array::<2>(&pair.memory);
    assert_eq!(bytes.unwrap_err(), SegmentsError::Access(outside));
    let mut bufs = IoBufs::new();
    assert_eq!(pair.chain.writable().push_iovecs(&pair.memory, &mut bufs), Err(outside));
}

#[test]
fn rings_are_checked_at_set_up() {
    let pair = Setup::default().build();
    let good = pair.driver.config();
    let new = |config| Queue::new(Rc::clone(&pair.memory), config);
    for size in [0, 3, 32769] {
        let refused = new(QueueConfig { size, ..good });
        assert!(matches!(refused, Err(QueueError::Size(s)) if s == size), "{refused:?}");
    }
    let end = USER_BASE + MEMORY;
    for bad in [
        QueueConfig { desc: good.desc + 4, ..good },
        QueueConfig { avail: good.avail + 1, ..good },
        QueueConfig { used: good.used + 2, ..good },
        QueueConfig { desc: end - 16 * 8 + 16, ..good },
        QueueConfig { avail: end - 20, ..good },
        QueueConfig { used: end - 68, ..good },
        // A guest address is not a front end's address.
        QueueConfig { desc: RINGS, ..good },
        QueueConfig { used: u64::MAX - 3, ..good },
    ] {
        let refused = new(bad);
        assert!(matches!(refused, Err(QueueError::Ring(_))), "{bad:?}: {refused:?}");
    }
    assert!(new(QueueConfig { desc: end - 16 * 8, ..good }).is_ok());
    // Drivers owe 16 bytes; the accesses need 8.
    assert!(new(QueueConfig { desc: good.desc + 8, ..good }).is_ok());
    assert!(new(QueueConfig { avail: end - 22, ..good }).is_ok());
    assert!(new(QueueConfig { used: end - 72, ..good }).is_ok());
}

#[test]
fn queue_resumes_where_it_was() {
    let mut pair = Setup { event_idx: true, ..Setup::default() }.build();
    for _ in 0..3 {
        pair.offer(1);
        pair.complete();
    }
    let _ = pair.queue.publish();
    pair.offer(7);
    pair.queue.suppress_kicks();
    let config = QueueConfig { next_avail: pair.queue.next_avail(), ..*pair.queue.config() };
    assert_eq!(config.next_avail, 3);

    pair.queue = Queue::new(Rc::clone(&pair.memory), config).unwrap();
    assert_eq!(pair.queue.used_idx(), 3);
    pair.complete();
    assert_eq!(readable(&pair.chain), [segment(DATA, 7)]);
    assert!(pair.queue.publish(), "the first signal after a resume is given in any case");
    for _ in 0..4 {
        assert!(pair.driver.reap().is_some());
    }
}

#[test]
fn memory_is_replaced_while_requests_are_in_flight() {
    let rings = memfd_region(0, DATA).unwrap();
    let rings = Arc::new(rings.map().unwrap());
    let data = Arc::new(memfd_region(DATA, 4096).unwrap().map().unwrap());
    let gone = Arc::downgrade(&data);
    let before = guest_memory::GuestMemory::from_regions([rings, data]).unwrap();
    let after = before.without_region(DATA, USER_BASE + DATA, 4096).unwrap();

    let memory = MemoryView::new(Arc::new(before));
    let mut driver = Driver::new(&memory, RINGS, 8, false).unwrap();
    let queue = Queue::new(memory.clone(), driver.config()).unwrap();
    let mut chain = queue::Chain::new();
    driver.add(&[], &[segment(DATA, 512)]).unwrap();
    driver.add(&[], &[segment(DATA, 512)]).unwrap();
    driver.publish();
    assert!(queue.pop(&mut chain).unwrap());
    let mut bufs = IoBufs::new();
    chain.writable().push_iovecs(&queue.memory(), &mut bufs).unwrap();
    let head = chain.head();

    queue.replace_memory(MemoryView::new(Arc::new(after))).unwrap();
    drop((memory, driver));
    assert_eq!(bufs.copy_in(0, &[1; 512]), 512, "the request in flight keeps its memory");
    drop(bufs);
    assert!(gone.upgrade().is_none(), "and was the last to do so");
    queue.add_used(head, 512);
    assert!(queue.publish());

    assert!(queue.pop(&mut chain).unwrap());
    let refused = chain.writable().push_iovecs(&queue.memory(), &mut IoBufs::new());
    assert_eq!(refused, Err(AccessError { addr: DATA, len: 512 }));

    let nothing = MemoryView::new(memfd_memory(&[]).unwrap());
    assert!(matches!(queue.replace_memory(nothing), Err(QueueError::Ring(_))));
    assert!(queue.is_broken() && matches!(queue.pop(&mut chain), Err(QueueError::Broken)));
}
