//! What runs beside what, and after what.

use block::request::Op;
use vcpu::ahci::{Command, reg};

use crate::ahci::rig::*;

fn offsets(rig: &Rig) -> Vec<u64> {
    rig.log().into_iter().map(|(_, offset, _)| offset / 512).collect()
}

#[test]
fn queued_commands_run_side_by_side_and_end_in_any_order() {
    let mut rig = Rig::new();
    rig.disk().hold.set(true);
    for slot in 0..32 {
        let command = Command::queued(slot, false, 512 * u64::from(slot), 512);
        rig.port().prepare(slot, &command, 512).unwrap();
    }
    rig.port().ring(u32::MAX);
    rig.turn();
    assert_eq!(offsets(&rig), (0..32).collect::<Vec<_>>(), "the lowest slot first");
    let mut left = u32::MAX;
    for n in [5, 0, 29, 11, 3] {
        let request = rig.disk().held.borrow_mut().remove(n).unwrap();
        left &= !(1 << (request.offset / 512));
        rig.disk().held.borrow_mut().push_front(request);
        rig.let_go(1);
        assert_eq!(rig.port().read(reg::PX_SACT), left);
    }
    // A slot that has ended is used again at once, while others are on their way.
    let free = (!left).trailing_zeros() as u8;
    rig.port().prepare(free, &Command::queued(free, false, 1 << 20, 512), 512).unwrap();
    rig.port().ring(1 << free);
    rig.turn();
    assert_eq!(offsets(&rig), [1 << 11]);
    rig.let_go(28);
    assert_eq!(rig.port().read(reg::PX_SACT), 0);
}

#[test]
fn non_queued_commands_run_alone_in_doorbell_order() {
    let mut rig = Rig::new();
    rig.disk().hold.set(true);
    for slot in 0..6 {
        let command = Command::dma(false, 512 * u64::from(slot), 512);
        rig.port().prepare(slot, &command, 512).unwrap();
    }
    for slots in [0b1_0010, 0b0_1001, 0b10_0100] {
        rig.port().ring(slots);
    }
    let mut order = Vec::new();
    let mut left = 0b11_1111;
    for _ in 0..6 {
        rig.turn();
        assert_eq!(rig.disk().held.borrow().len(), 1);
        let slot = offsets(&rig)[0];
        assert_eq!(rig.port().read(reg::PX_CMD) >> 8 & 0x1f, slot as u32, "PxCMD.CCS");
        assert_eq!(rig.port().read(reg::PX_TFD) & 0x80, 0x80);
        order.push(slot);
        rig.let_go(1);
        left &= !(1 << slot);
        assert_eq!(rig.port().read(reg::PX_CI), left);
    }
    assert_eq!(order, [1, 4, 0, 3, 2, 5]);
}

/// A driver must not mix them (SATA 3.x, 13.6.4); what it gets when it does is an order.
#[test]
fn queued_and_non_queued_commands_wait_for_each_other() {
    let mut rig = Rig::new();
    rig.disk().hold.set(true);
    for (slot, queued) in [(0, true), (1, true), (2, false), (3, true)] {
        let offset = 512 * u64::from(slot);
        let command = if queued {
            Command::queued(slot, false, offset, 512)
        } else {
            Command { lba: offset / 512, count: 1, ..command(0xc8) }
        };
        rig.port().prepare(slot, &command, 512).unwrap();
        rig.port().ring(1 << slot);
    }
    for expected in [&[0, 1][..], &[], &[2], &[3]] {
        rig.turn();
        assert_eq!(offsets(&rig), expected);
        rig.let_go(1);
    }
    assert_eq!((rig.port().read(reg::PX_CI), rig.port().read(reg::PX_SACT)), (0, 0));
}

#[test]
fn two_ports_are_two_disks() {
    let mut rig = Rig::with(2, false);
    rig.disks[0].hold.set(true);
    rig.write_memory(area(1).data(0), &[1; 512]);
    rig.ports[0].prepare(0, &Command::dma(false, 0, 512), 512).unwrap();
    rig.ports[0].ring(1);
    // The other port does not wait.
    rig.ports[1].run(&Command::dma(true, 0, 512), 512).unwrap();
    assert_eq!(rig.disks[1].bytes.borrow()[..512], [1; 512]);
    assert_eq!(rig.ports[0].read(reg::PX_CI), 1);
    rig.let_go(1);
    assert_eq!(rig.ports[0].data(0, 512).unwrap(), (0..512).map(pattern).collect::<Vec<_>>());
    // A reset of one does nothing to the other.
    rig.ports[0].prepare(0, &Command::dma(false, 0, 512), 512).unwrap();
    rig.ports[0].ring(1);
    rig.turn();
    rig.ports[1].stop_list().unwrap();
    rig.ports[1].comreset().unwrap();
    rig.let_go(1);
    assert_eq!(rig.ports[0].read(reg::PX_CI), 0);
}

#[test]
fn a_list_with_65535_entries_is_one_request() {
    let mut rig = Rig::new();
    long_list(&rig.memory, 0);
    rig.port().ring(1);
    rig.port().finish(1).unwrap();
    assert_eq!(rig.log(), [(Op::Read, 0, 255 * 512)]);
    for n in [0, 1, 1000, 255 * 256 - 1] {
        let got = rig.read_memory(LONG_DATA + n * 4, 2);
        assert_eq!(got, [pattern(n as usize * 2), pattern(n as usize * 2 + 1)]);
    }
}
