//! Deviations of drivers in the field: served, and reported once each.

use crate::common;

use std::cell::RefCell;
use std::rc::Rc;

use queue::{Descriptor, MAX_SEGMENTS, QueueError, Quirk};
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use common::{DATA, Pair, Setup};

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

/// Collects the queue's reports.
fn reports(pair: &Pair) -> Rc<RefCell<Vec<Quirk>>> {
    let reports = Rc::<RefCell<Vec<Quirk>>>::default();
    let told = reports.clone();
    pair.queue.on_quirk(Rc::new(move |quirk| told.borrow_mut().push(quirk)));
    reports
}

/// Offers `table` in the queue's table, twice, and returns the readable and writable buffers of the second chain.
fn pop(pair: &mut Pair, table: &[Descriptor]) -> [Vec<(u64, u32)>; 2] {
    for (index, &desc) in table.iter().enumerate() {
        pair.driver.set_descriptor(index as u16, desc);
    }
    for _ in 0..2 {
        pair.driver.offer(0);
        pair.driver.publish();
        assert!(pair.pop().unwrap());
        pair.queue.add_used(0, 0);
    }
    [pair.chain.readable(), pair.chain.writable()]
        .map(|part| part.iter().map(|segment| (segment.addr, segment.len)).collect())
}

/// Puts an indirect table to `DATA`.
fn indirect(pair: &Pair, table: &[Descriptor]) {
    for (index, desc) in table.iter().enumerate() {
        let addr = DATA + 16 * index as u64;
        pair.queue.memory().write_bytes(addr, &desc.to_bytes()).unwrap();
    }
}

#[test]
fn indirect_tables_without_negotiation_are_served() {
    let mut pair = Setup { indirect: false, ..Setup::default() }.build();
    let told = reports(&pair);
    indirect(&pair, &[desc(DATA + 64, 16, NEXT, 1), desc(DATA + 128, 1, WRITE, 0)]);
    let found = pop(&mut pair, &[desc(DATA, 32, INDIRECT, 0)]);
    assert_eq!(found, [vec![(DATA + 64, 16)], vec![(DATA + 128, 1)]]);
    assert_eq!(*told.borrow(), [Quirk::Indirect]);
}

#[test]
fn an_indirect_table_ends_the_chain_even_with_a_next_descriptor() {
    let mut pair = Setup::default().build();
    let told = reports(&pair);
    indirect(&pair, &[desc(DATA + 64, 16, NEXT, 1), desc(DATA + 128, 1, WRITE, 0)]);
    let table = [desc(DATA, 32, INDIRECT | NEXT, 1), desc(DATA + 256, 1, WRITE, 0)];
    assert_eq!(pop(&mut pair, &table), [vec![(DATA + 64, 16)], vec![(DATA + 128, 1)]]);
    assert_eq!(*told.borrow(), [Quirk::IndirectNext]);
}

#[test]
fn empty_buffers_are_skipped() {
    let mut pair = Setup::default().build();
    let told = reports(&pair);
    let table = [
        desc(DATA, 0, NEXT, 1),
        desc(DATA, 16, NEXT, 2),
        // Its address does not matter, not even its order.
        desc(u64::MAX, 0, WRITE | NEXT, 3),
        desc(DATA + 64, 7, NEXT, 4),
        desc(DATA + 128, 1, WRITE | NEXT, 5),
        desc(0, 0, WRITE, 0),
    ];
    let found = pop(&mut pair, &table);
    assert_eq!(found, [vec![(DATA, 16), (DATA + 64, 7)], vec![(DATA + 128, 1)]]);
    assert_eq!(pair.chain.buffers(), 6, "reading each one has a cost");
    assert_eq!(*told.borrow(), [Quirk::EmptyBuffer]);
}

#[test]
fn empty_buffers_are_limited() {
    let mut pair = Setup { size: 2048, ..Setup::default() }.build();
    for index in 0..2048 {
        pair.driver.set_descriptor(index, desc(DATA, 0, NEXT, (index + 1) % 2048));
    }
    // The last one that is accepted ends the chain.
    let last = MAX_SEGMENTS as u16 - 1;
    pair.driver.set_descriptor(last, desc(DATA, 0, 0, 0));
    pair.driver.offer(0);
    pair.driver.publish();
    assert!(pair.pop().unwrap());
    pair.driver.set_descriptor(last, desc(DATA, 0, NEXT, last + 1));
    pair.driver.offer(0);
    pair.driver.publish();
    assert!(matches!(pair.pop(), Err(QueueError::TooLong { head: 0 })));
}
