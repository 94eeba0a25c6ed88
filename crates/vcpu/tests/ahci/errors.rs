//! Failed commands, and how the driver finds out which failed and why.

use nix::errno::Errno;
use vcpu::ahci::{Command, reg};

use crate::ahci::rig::*;

const READ_ERROR_LOG: Command =
    Command { command: 0x2f, features: 0, lba: 0x10, count: 1, device: 0x40, write: false };

#[test]
fn a_failed_command_stops_the_list_until_the_driver_has_recovered() {
    let mut rig = Rig::new();
    rig.disk().fail.set(Some(Errno::EIO));
    for slot in [0, 1, 2] {
        let command = Command::dma(slot == 1, 4096 * u64::from(slot), 4096);
        rig.port().prepare(slot, &command, 4096).unwrap();
    }
    rig.port().ring(0b111);
    rig.turn();
    assert_eq!(rig.log().len(), 1, "those after it are not begun");
    let port = rig.port();
    assert_eq!(port.read(reg::PX_CI), 0b111, "the failed one keeps its bit");
    assert_eq!(port.read(reg::PX_IS), reg::IS_TFES | reg::IS_DHRS);
    assert_eq!(port.read(reg::PX_TFD), UNC << 8 | 0x51);
    assert_eq!(port.read(reg::PX_CMD) >> 8 & 0x1f, 0, "PxCMD.CCS says which");
    assert_ne!(port.read(reg::PX_CMD) & reg::CMD_CR, 0);
    // A doorbell has no effect now.
    port.prepare(5, &Command::dma(false, 0, 512), 512).unwrap();
    port.ring(1 << 5);
    rig.turn();
    assert_eq!(rig.log().len(), 0);
    rig.port().recover().unwrap();
    assert_eq!(rig.port().read(reg::PX_CI), 0);
    rig.disk().fail.set(None);
    rig.port().run(&Command::dma(false, 0, 4096), 4096).unwrap();
}

#[test]
fn each_kind_of_request_has_its_error() {
    let mut rig = Rig::new();
    rig.disk().fail.set(Some(Errno::ENOSPC));
    let trim = Command { features: 1, count: 1, write: true, ..command(0x06) };
    rig.write_memory(area(0).data(0), &(1u64 << 48).to_le_bytes());
    for (command, bits) in [
        (Command::dma(false, 0, 512), UNC),
        (Command::dma(true, 0, 512), ABRT),
        (command(0xea), ABRT),
        (trim, ABRT),
    ] {
        let failure = rig.failure(&command, if command.command == 0xea { 0 } else { 512 });
        assert_eq!(error(&failure), bits, "{command:x?}");
    }
}

#[test]
fn a_failed_queued_command_is_named_by_the_log() {
    let mut rig = Rig::new();
    rig.disk().hold.set(true);
    for slot in 0..4 {
        let command = Command::queued(slot, false, 8192 * u64::from(slot), 4096);
        rig.port().prepare(slot, &command, 4096).unwrap();
    }
    rig.port().ring(0b1111);
    rig.turn();
    assert_eq!(rig.port().read(reg::PX_CI), 0, "queued commands give their bit back at once");
    assert_eq!(rig.port().read(reg::PX_SACT), 0b1111);
    // In one batch the first command succeeds and the second fails.
    rig.event_loop.section(|| {
        rig.disk().let_go();
        rig.disk().fail.set(Some(Errno::EIO));
        rig.disk().let_go();
        rig.disk().fail.set(None);
    });
    assert_eq!(rig.port().read(reg::PX_SACT), 0b1110);
    assert_eq!(rig.port().read(reg::PX_IS), reg::IS_TFES | reg::IS_SDBS);
    assert_eq!(rig.port().read(reg::PX_TFD), UNC << 8 | 0x51);
    let fis = rig.fis(SDB);
    assert_eq!((fis[0], fis[1], fis[2], fis[3]), (0xa1, 0x40, 0x51, UNC as u8));
    assert_eq!(fis[4..8], [0; 4], "none of them ended with this one");
    // The other commands are drained, and the list reports to run meanwhile.
    let cmd = rig.port().read(reg::PX_CMD);
    rig.port().write(reg::PX_CMD, cmd & !reg::CMD_ST);
    rig.let_go(1);
    assert_ne!(rig.port().read(reg::PX_CMD) & reg::CMD_CR, 0);
    rig.let_go(1);
    assert_eq!(rig.port().read(reg::PX_CMD) & reg::CMD_CR, 0);
    rig.disk().hold.set(false);
    rig.port().recover().unwrap();
    // Until the log is read, the drive refuses other commands.
    let failure = rig.failure(&Command::dma(false, 0, 512), 512);
    assert_eq!(error(&failure), ABRT);
    let failure = rig.failure(&Command::queued(0, false, 0, 512), 512);
    assert_eq!(error(&failure), ABRT);
    rig.port().run(&READ_ERROR_LOG, 512).unwrap();
    let page = rig.port().data(0, 512).unwrap();
    assert_eq!(page.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    assert_eq!((page[0], page[2], page[3]), (1, 0x51, UNC as u8), "not what was refused since");
    rig.port().run(&Command::queued(0, false, 0, 512), 512).unwrap();
}

#[test]
fn the_log_has_tag_and_lba() {
    let mut rig = Rig::new();
    rig.disk().fail.set(Some(Errno::EIO));
    rig.port().prepare(9, &Command::queued(9, false, 0x1234 * 512, 512), 512).unwrap();
    rig.port().ring(1 << 9);
    rig.turn();
    rig.port().recover().unwrap();
    rig.port().run(&READ_ERROR_LOG, 512).unwrap();
    let page = rig.port().data(0, 512).unwrap();
    assert_eq!((page[0], page[2], page[3]), (9, 0x51, UNC as u8));
    assert_eq!((page[4], page[5], page[6]), (0x34, 0x12, 0));
}

#[test]
fn a_queued_command_with_another_slots_tag_is_refused() {
    let mut rig = Rig::new();
    let failure = rig.failure(&Command::queued(3, false, 0, 512), 512);
    assert_eq!((error(&failure), failure.unfinished), (ABRT, 1));
}

#[test]
fn structures_that_are_not_memory() {
    let read = Command::dma(false, 0, 4096);
    for beyond in [MEMORY - 0x80, MEMORY, 1 << 40, !0x3ff] {
        // The command list.
        let mut rig = Rig::new();
        rig.port().prepare(31, &read, 4096).unwrap();
        let list = if beyond == MEMORY - 0x80 { MEMORY - 0x400 + 0x400 } else { beyond };
        rig.port().write(reg::PX_CLB, list as u32);
        rig.port().write(reg::PX_CLBU, (list >> 32) as u32);
        rig.port().ring(1 << 31);
        rig.turn();
        assert_eq!(rig.port().read(reg::PX_IS), reg::IS_HBFS, "the list at {list:#x}");
        assert_eq!(rig.port().read(reg::PX_CI), 1 << 31);
        rig.port().recover().unwrap();
        // The command table, or the PRD table behind it.
        let mut rig = Rig::new();
        rig.port().prepare(0, &read, 4096).unwrap();
        rig.write_memory(area(0).list() + 8, &beyond.to_le_bytes());
        if beyond < MEMORY {
            rig.write_memory(beyond, &read.fis());
        }
        rig.port().ring(1);
        rig.turn();
        assert_eq!(rig.port().read(reg::PX_IS), reg::IS_HBFS, "the table at {beyond:#x}");
        // The data.
        let mut rig = Rig::new();
        rig.port().prepare_prdt(0, &read, &[(FREE, 512), (beyond, 4096)]).unwrap();
        rig.port().ring(1);
        rig.turn();
        assert_eq!(rig.port().read(reg::PX_IS), reg::IS_HBFS, "data at {beyond:#x}");
        assert_eq!(rig.log(), []);
        rig.port().recover().unwrap();
        rig.port().run(&read, 4096).unwrap();
    }
    // Received FISes.
    let mut rig = Rig::new();
    rig.port().write(reg::PX_FB, MEMORY as u32);
    rig.port().prepare(0, &read, 4096).unwrap();
    rig.port().ring(1);
    rig.turn();
    assert_eq!(rig.port().read(reg::PX_IS), reg::IS_HBFS);
}

#[test]
fn an_unwritable_signature_does_not_prevent_the_list_start() {
    let mut rig = Rig::new();
    rig.port().stop_list().unwrap();
    let cmd = rig.port().read(reg::PX_CMD) & !reg::CMD_FRE;
    rig.port().write(reg::PX_CMD, cmd);
    rig.port().write(reg::PX_SCTL, 1);
    rig.port().write(reg::PX_SCTL, 0);
    rig.port().write(reg::PX_FB, MEMORY as u32);
    rig.port().write(reg::PX_CMD, cmd | reg::CMD_FRE);
    assert_eq!(rig.port().read(reg::PX_IS) & reg::IS_HBFS, reg::IS_HBFS);
    rig.port().write(reg::PX_FB, area(0).rfis() as u32);
    rig.port().write(reg::PX_IS, u32::MAX);
    rig.port().write(reg::PX_CMD, cmd | reg::CMD_FRE | reg::CMD_ST);
    rig.port().run(&Command::dma(false, 0, 4096), 4096).unwrap();
}

#[test]
fn frames_that_a_disk_does_not_take() {
    for (at, bytes) in [(area(0).table(0), [0x41]), (area(0).list(), [4]), (area(0).list(), [0])] {
        let mut rig = Rig::new();
        rig.port().prepare(0, &command(0xe1), 0).unwrap();
        rig.write_memory(at, &bytes);
        rig.port().ring(1);
        rig.turn();
        assert_eq!(rig.port().read(reg::PX_IS), reg::IS_IFS);
        rig.port().recover().unwrap();
        rig.port().run(&command(0xe1), 0).unwrap();
    }
}
