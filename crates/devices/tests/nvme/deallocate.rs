//! Dataset Management: many commands of many ranges.

use block::request::Op;

use crate::nvme::rig::*;

const RANGES: u64 = 256;
const COMMANDS: usize = ENTRIES as usize - 1;

/// Discards 256 ranges of 8 blocks.
fn deallocate() -> Command {
    command(9).nsid(1).prps(DATA, 0).dword(10, RANGES as u32 - 1).dword(11, 4)
}

/// Submits as many as the queue takes.
fn submit_all(rig: &mut Rig) {
    let range = |n: u64| [&[0; 4][..], &8u32.to_le_bytes(), &(8 * n).to_le_bytes()].concat();
    rig.put(DATA, &(0..RANGES).flat_map(range).collect::<Vec<u8>>());
    let old = rig.tail(1);
    for _ in 0..COMMANDS {
        rig.submit(1, deallocate());
    }
    rig.ring(1, old);
}

#[test]
fn ranges_are_discarded_in_bounded_parts() {
    let mut rig = Rig::ready(0);
    submit_all(&mut rig);
    let (mut answered, mut most, mut seen) = (0, 0, 0);
    while answered < COMMANDS {
        rig.event_loop.run_once(false).unwrap();
        let now = rig.disks[0].seen.borrow().len();
        (most, seen) = (most.max(now - seen), now);
        while let Some(completed) = rig.reap(1) {
            assert_eq!(completed.status, 0);
            answered += 1;
        }
    }
    let seen = rig.disks[0].seen.take();
    assert_eq!(seen.len(), COMMANDS * RANGES as usize);
    assert!(seen.iter().all(|(op, at, len)| (*op, at % 4096, *len) == (Op::Discard, 0, 4096)));
    // Half of the iteration's budget, at a unit each, and the free step of a turn.
    assert!(most <= 151, "{most} ranges in an iteration");
}

#[test]
fn few_ranges_are_in_flight_and_a_reset_leaves_the_others_out() {
    let mut rig = Rig::ready(0);
    rig.disks[0].is_held.set(true);
    submit_all(&mut rig);
    rig.turn();
    assert_eq!(rig.disks[0].held.borrow().len(), 64);
    // As some end, others begin.
    let ended: Vec<_> = rig.disks[0].held.borrow_mut().drain(..10).collect();
    ended.into_iter().for_each(|request| request.complete(Ok(())));
    rig.turn();
    assert_eq!((rig.disks[0].held.borrow().len(), rig.disks[0].seen.borrow().len()), (64, 74));
    // What lists say from now on does not count: they are those of a controller that is reset.
    rig.put(DATA, &[0xff; 4096]);
    rig.write(CC, 0);
    rig.turn();
    rig.disks[0].release();
    rig.wait("the end of the reset", |rig| rig.read(CSTS) & 1 == 0);
    rig.turn();
    assert_eq!(rig.disks[0].seen.borrow().len(), 74);
    rig.enable();
    rig.forget(1);
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
}

#[test]
fn a_range_beyond_the_end_refuses_the_command() {
    let mut rig = Rig::ready(0);
    let range =
        |blocks: u32, at: u64| [&[0; 4][..], &blocks.to_le_bytes(), &at.to_le_bytes()].concat();
    rig.put(DATA, &[range(8, 0), range(1, BLOCKS)].concat());
    assert_eq!(rig.status(1, deallocate().dword(10, 1)), 0x80);
    assert!(rig.disks[0].seen.borrow().is_empty());
    // An empty range is nothing.
    rig.put(DATA, &[range(0, 0), range(0, BLOCKS)].concat());
    rig.ok(1, deallocate().dword(10, 1));
    assert!(rig.disks[0].seen.borrow().is_empty());
}
