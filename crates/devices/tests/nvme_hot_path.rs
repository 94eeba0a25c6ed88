//! What an NVMe command costs, counted: allocations, locks, system calls of the ring, messages.

use crate::nvme::rig;

use event_loop::counting::{allocations, locks_taken};
use rig::*;

/// Reads and writes `depth` at a time, `rounds` times, by shadow doorbells.
fn drive(rig: &mut Rig, depth: u64, rounds: u64) {
    for round in 0..rounds {
        let old = rig.tail(1);
        for n in 0..depth {
            let opcode = if n % 2 == 0 { READ } else { WRITE };
            rig.submit(1, io(opcode, (round * depth + n) % BLOCKS, 1));
        }
        rig.ring(1, old);
        for _ in 0..depth {
            while rig.reap(1).is_none() {
                rig.event_loop.run_once(true).unwrap();
            }
        }
    }
}

#[test]
fn steady_state_allocates_nothing_and_sends_one_message_per_batch() {
    for depth in [1, 32] {
        let mut rig = Rig::with(1_000_000_000, false, |_| {});
        rig.enable();
        rig.create(1);
        rig.use_shadows();
        drive(&mut rig, depth, 300);
        let stats = rig.controller().stats()[0].clone();
        let (enters, iterations) =
            (rig.event_loop.stats().enters.get(), rig.event_loop.stats().iterations.get());
        let before = (allocations(), locks_taken(), stats.batches.get(), rig.rings);
        rig.sent(1);
        drive(&mut rig, depth, 500);
        assert_eq!(allocations() - before.0, 0, "allocations in steady state");
        let batches = stats.batches.get() - before.2;
        let rings = rig.rings - before.3;
        // Of commands, and of entries that were taken from a full queue.
        assert!(rings <= 500 * depth.div_ceil(16), "{rings} rings");
        assert!(batches <= 500 + rings, "{batches} batches");
        assert_eq!(rig.sent(1), batches);
        let enters = rig.event_loop.stats().enters.get() - enters;
        let iterations = rig.event_loop.stats().iterations.get() - iterations;
        assert!(enters <= iterations, "{enters} enters in {iterations} iterations");
        // Who wakes a loop that sleeps takes the lock of the bell.
        let locks = locks_taken() - before.1;
        assert!(locks <= rings, "{locks} locks");
    }
}
