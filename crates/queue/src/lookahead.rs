//! Chains that come next are fetched into the cache while this one is worked on.
//!
//! What a driver has just written is in another CPU's cache, and each line of it takes some 100 ns to
//! come. A chain is found by following addresses: available entry, descriptor, indirect table,
//! header. So one chain alone waits for each in turn; here each of the next chains is one step
//! further than the one behind it, and all of them come at once.

use std::cell::Cell;
use std::ops::Range;

use guest_memory::MemoryView;
use virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT;

use crate::avail::AvailHalf;
use crate::ring::{Descriptor, Rings};

/// How many chains ahead the first descriptor is fetched.
const DESCRIPTOR: u16 = 8;
/// What it points to: an indirect table, or the first buffer.
const POINTED_TO: u16 = 4;
/// The first buffer of an indirect table.
const BUFFER: u16 = 2;

/// How far each step has come: entries of the available ring before these are done.
#[derive(Debug, Default)]
pub(crate) struct Lookahead {
    descriptor: Cell<u16>,
    pointed_to: Cell<u16>,
    buffer: Cell<u16>,
}

impl Lookahead {
    /// Called after each pop.
    #[inline]
    pub(crate) fn prefetch(&self, avail: &AvailHalf, rings: &Rings, memory: &MemoryView) {
        let filled = avail.next()..avail.seen();
        ahead(&self.descriptor, &filled, DESCRIPTOR, |entry| {
            rings.prefetch_descriptor(rings.avail_entry(entry));
        });
        ahead(&self.pointed_to, &filled, POINTED_TO, |entry| {
            let desc = rings.descriptor(rings.avail_entry(entry));
            // A header is often beside the status byte, which is written.
            memory.prefetch(desc.addr, !desc.has(VRING_DESC_F_INDIRECT));
        });
        ahead(&self.buffer, &filled, BUFFER, |entry| {
            let table = rings.descriptor(rings.avail_entry(entry));
            if table.has(VRING_DESC_F_INDIRECT)
                && let Ok(first) = memory.read_array(table.addr)
            {
                memory.prefetch(Descriptor::from_bytes(first).addr, true);
            }
        });
    }
}

/// Makes a step for each entry not done yet, up to `distance` behind the next one, as far as the driver
/// has `filled` the ring. What makes no sense there is found when it is popped.
#[inline]
fn ahead(done: &Cell<u16>, filled: &Range<u16>, distance: u16, mut step: impl FnMut(u16)) {
    let next = filled.start;
    let count = distance.min(filled.end.wrapping_sub(next));
    let end = next.wrapping_add(count);
    // What was popped in the meantime needs no step any more. At the queue's start, `done` may be
    // anywhere.
    let done_before = done.get().wrapping_sub(next);
    let mut entry = if done_before <= count { done.get() } else { next };
    while entry != end {
        step(entry);
        entry = entry.wrapping_add(1);
    }
    done.set(end);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entry_is_fetched_once_and_never_one_that_is_not_filled() {
        // A queue may begin at any entry, and its driver may have filled any number of them.
        for first in 0..=u16::MAX {
            for filled in [0, 1, 3, 5, 40] {
                let (done, end) = (Cell::new(0), first.wrapping_add(filled));
                let mut steps = Vec::new();
                for popped in 0..=filled {
                    let left = first.wrapping_add(popped)..end;
                    ahead(&done, &left, 4, |entry| {
                        steps.push(entry);
                        assert!(steps.len() <= filled.into(), "{first} and {filled}: {entry}");
                    });
                }
                let place = |entry: &u16| entry.wrapping_sub(first);
                assert!(steps.is_sorted_by(|a, b| place(a) < place(b)), "{first} and {filled}");
                assert!(steps.iter().all(|entry| place(entry) < filled), "{first} and {filled}");
            }
        }
    }
}
