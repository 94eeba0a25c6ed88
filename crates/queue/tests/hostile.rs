//! What a driver must not do: each breaks its queue, with an error that says what it was.

use crate::common;

use common::{DATA, MEMORY, Pair, Setup, segment};
use queue::{Descriptor, QueueError};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

/// Offers descriptor 0 of `table`; what the device thinks of it. It must not touch the queue again.
fn offer(mut pair: Pair, table: &[Descriptor]) -> QueueError {
    for (i, desc) in table.iter().enumerate() {
        pair.driver.set_descriptor(i as u16, *desc);
    }
    pair.driver.offer(0);
    pair.driver.publish();
    let error = pair.pop().unwrap_err();
    assert!(pair.queue.is_broken() && !pair.queue.has_work() && !pair.queue.enable_kicks());
    assert!(matches!(pair.pop(), Err(QueueError::Broken)));
    assert!(!error.to_string().is_empty());
    error
}

/// The same by an indirect table.
fn offer_indirect(table: &[Descriptor]) -> QueueError {
    let pair = Setup::default().build();
    for (i, desc) in table.iter().enumerate() {
        pair.memory.write_bytes(DATA + i as u64 * 16, &desc.to_bytes()).unwrap();
    }
    offer(pair, &[desc(DATA, table.len() as u32 * 16, INDIRECT, 0)])
}

#[test]
fn loops() {
    let to_self = [desc(DATA, 1, NEXT, 0)];
    assert!(matches!(offer(Setup::default().build(), &to_self), QueueError::TooLong { head: 0 }));
    assert!(matches!(offer_indirect(&to_self), QueueError::TooLong { head: 0 }));
    let two = [desc(DATA, 1, NEXT, 1), desc(DATA, 1, NEXT, 0)];
    assert!(matches!(offer(Setup::default().build(), &two), QueueError::TooLong { .. }));
    assert!(matches!(offer_indirect(&two), QueueError::TooLong { .. }));
}

#[test]
fn too_many_segments() {
    let table: Vec<_> = (1..=1025).map(|i| desc(DATA, 1, NEXT, i)).collect();
    let pair = Setup { size: 2048, ..Setup::default() }.build();
    assert!(matches!(offer(pair, &table), QueueError::TooLong { .. }));
    assert!(matches!(offer_indirect(&table), QueueError::TooLong { .. }));
}

#[test]
fn index_beyond_the_table() {
    let mut pair = Setup::default().build();
    pair.driver.offer(8);
    pair.driver.publish();
    assert!(matches!(pair.pop(), Err(QueueError::Index { index: 8, table: 8 })));

    let table = [desc(DATA, 1, NEXT, 8), desc(DATA, 1, 0, 0)];
    let error = offer(Setup::default().build(), &table);
    assert!(matches!(error, QueueError::Index { index: 8, table: 8 }));
    assert!(matches!(offer_indirect(&table), QueueError::Index { index: 8, table: 2 }));
}

#[test]
fn buffers_that_overflow() {
    for (addr, len) in [(u64::MAX, 1), (u64::MAX - 1, 4096)] {
        let table = [desc(addr, len, 0, 0)];
        for error in [offer(Setup::default().build(), &table), offer_indirect(&table)] {
            assert!(
                matches!(error, QueueError::Buffer { addr: a, len: l } if (a, l) == (addr, len))
            );
        }
    }
}

#[test]
fn more_bytes_than_a_used_length_can_say() {
    let half = 1 << 31;
    let table = [desc(0, half, NEXT, 1), desc(0, half, WRITE, 0)];
    for error in [offer(Setup::default().build(), &table), offer_indirect(&table)] {
        assert!(matches!(error, QueueError::TooManyBytes { head: 0 }));
    }
}

#[test]
fn readable_after_writable() {
    let table = [desc(DATA, 1, WRITE | NEXT, 1), desc(DATA, 1, 0, 0)];
    for error in [offer(Setup::default().build(), &table), offer_indirect(&table)] {
        assert!(matches!(error, QueueError::ReadableAfterWritable { head: 0 }));
    }
}

#[test]
fn an_indirect_table_in_an_indirect_table() {
    let refers = desc(DATA, 16, INDIRECT, 0);
    assert!(matches!(offer_indirect(&[refers]), QueueError::Indirect { head: 0 }));
}

#[test]
fn indirect_tables_of_odd_length_or_outside_memory() {
    for len in [0, 1, 15, 17, 65536 * 16, u32::MAX] {
        let error = offer(Setup::default().build(), &[desc(DATA, len, INDIRECT, 0)]);
        assert!(
            matches!(error, QueueError::IndirectLength { len: l, .. } if l == len),
            "{error:?}"
        );
    }
    for addr in [MEMORY, MEMORY - 15, u64::MAX - 16] {
        let error = offer(Setup::default().build(), &[desc(addr, 16, INDIRECT, 0)]);
        assert!(matches!(error, QueueError::IndirectAccess { .. }), "{error:?}");
    }
    let error = offer(Setup::default().build(), &[desc(u64::MAX - 8, 16, INDIRECT, 0)]);
    assert!(matches!(error, QueueError::Buffer { .. }), "{error:?}");
}

#[test]
fn available_index_jumps() {
    for (jump, start) in [(9, 0), (9, u16::MAX - 3), (u16::MAX, 5)] {
        let mut pair = Setup { start, ..Setup::default() }.build();
        pair.driver.skip(jump);
        pair.driver.publish();
        let error = pair.pop().unwrap_err();
        let index = start.wrapping_add(jump);
        assert!(
            matches!(error, QueueError::AvailJump { index: i, next } if (i, next) == (index, start))
        );
    }
}

#[test]
fn more_chains_than_descriptors() {
    let mut pair = Setup::default().build();
    pair.driver.set_descriptor(0, desc(DATA, 1, 0, 0));
    for _ in 0..2 {
        for _ in 0..4 {
            pair.driver.offer(0);
        }
        pair.driver.publish();
        for _ in 0..4 {
            assert!(pair.pop().unwrap());
        }
    }
    pair.driver.offer(0);
    pair.driver.publish();
    assert!(matches!(pair.pop(), Err(QueueError::TooManyInFlight)));
    assert_eq!(pair.queue.in_flight(), 8);
}

#[test]
fn a_broken_queue_gives_back_what_it_has() {
    let mut pair = Setup::default().build();
    pair.driver.add(&[segment(DATA, 1)], &[]).unwrap();
    pair.driver.offer(99);
    pair.driver.publish();
    assert!(pair.pop().unwrap());
    let head = pair.chain.head();
    assert!(pair.pop().is_err());
    pair.queue.add_used(head, 0);
    assert!(pair.queue.publish());
    assert_eq!(pair.driver.reap().map(|u| u.head), Some(head));
}
