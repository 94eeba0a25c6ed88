//! What a read or write of virtio-scsi costs, counted.

use crate::scsi::rig;

use event_loop::counting::{allocations, locks_taken};
use rig::Rig;

#[test]
fn steady_state_allocates_nothing_and_takes_no_locks() {
    const ROUNDS: u32 = 50;
    const DEPTH: u32 = 14;
    let mut rig = Rig::new();
    rig.disks[0].log.borrow_mut().reserve((ROUNDS * DEPTH) as usize);
    let mut counted = (0, 0);
    for round in 0..ROUNDS {
        for n in 0..DEPTH {
            let lun = [1, 0, 0x40, 0, 0, 0, 0, 0];
            let (out, inward): (&[u8], u32) =
                if n % 2 == 0 { (&[], 4096) } else { (&[7; 4096], 0) };
            let cdb = [if n % 2 == 0 { 0x28 } else { 0x2a }, 0, 0, 0, 0, n as u8 * 8, 0, 0, 8, 0];
            rig.add(2, lun, n.into(), &cdb, out, inward, u32::MAX);
        }
        let before = (allocations(), locks_taken());
        // The disk answers at once: this is all of the way.
        rig.publish(2);
        if round > ROUNDS / 2 {
            counted.0 += allocations() - before.0;
            counted.1 += locks_taken() - before.1;
        }
        (0..DEPTH).for_each(|_| assert!(rig.reap(2).1 >= 108));
    }
    assert_eq!(counted, (0, 0), "allocations, locks");
    assert_eq!(rig.disks[0].log.borrow().len(), (ROUNDS * DEPTH) as usize);
}
