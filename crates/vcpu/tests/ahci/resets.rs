//! Resets of every kind, in every state: commands in flight are drained, and never reported.

use std::cell::Cell;
use std::rc::Rc;

use vcpu::ahci::{Command, reg};

use crate::ahci::rig::*;

/// The state of the port at the reset.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PortState {
    Idle,
    /// Commands were announced, and the loop has not taken them.
    Announced,
    /// A non-queued command is at the disk, others wait.
    Busy,
    /// Queued commands are at the disk.
    Queued,
    /// A command has failed.
    Failed,
    /// A queued command has failed while others are at the disk.
    FailedQueued,
}

pub(crate) const STATES: [PortState; 6] = [
    PortState::Idle,
    PortState::Announced,
    PortState::Busy,
    PortState::Queued,
    PortState::Failed,
    PortState::FailedQueued,
];

pub(crate) fn enter(rig: &mut Rig, state: PortState) {
    rig.disk().hold.set(true);
    let queued = matches!(state, PortState::Queued | PortState::FailedQueued);
    for slot in 0..8 {
        let offset = 65536 * u64::from(slot);
        let command = if queued {
            Command::queued(slot, false, offset, 4096)
        } else {
            Command::dma(false, offset, 4096)
        };
        rig.port().prepare(slot, &command, 4096).unwrap();
    }
    match state {
        PortState::Idle => {}
        PortState::Announced => rig.port().ring(0xff),
        PortState::Busy | PortState::Queued => {
            rig.port().ring(0xff);
            rig.turn();
        }
        PortState::Failed | PortState::FailedQueued => {
            rig.port().ring(0xff);
            rig.turn();
            rig.disk().fail.set(Some(nix::errno::Errno::EIO));
            rig.let_go(1);
            rig.disk().fail.set(None);
        }
    }
}

/// Number of requests that the disk holds.
fn held(rig: &Rig) -> usize {
    rig.disk().held.borrow().len()
}

/// Checks that the port is as new: no command, no error, and a command runs.
pub(crate) fn works(rig: &mut Rig, state: PortState) {
    rig.disk().hold.set(false);
    rig.log();
    assert_eq!((rig.port().read(reg::PX_CI), rig.port().read(reg::PX_SACT)), (0, 0), "{state:?}");
    assert_eq!(rig.port().read(reg::PX_TFD) & 0x88, 0, "{state:?}: busy");
    if state == PortState::FailedQueued {
        // Needed after some resets, and harmless after a reset of the drive.
        rig.port().run(&Command { lba: 0x10, count: 1, ..command(0x2f) }, 512).unwrap();
    }
    rig.port().run(&Command::dma(false, 1024, 4096), 4096).unwrap();
    assert_eq!(rig.port().data(0, 1).unwrap(), [pattern(1024)]);
    rig.port().run(&Command::queued(0, false, 512, 4096), 4096).unwrap();
    assert_eq!(rig.log().len(), 2, "{state:?}");
}

/// Releases all requests in turn; `ready` must become true with the last one.
fn drain(rig: &mut Rig, state: PortState, ready: impl Fn(&mut Rig) -> bool) {
    let before = rig.read_memory(area(0).rfis(), 256);
    while held(rig) > 0 {
        assert!(!ready(rig), "{state:?}: ready with {} requests in flight", held(rig));
        // Success or failure: the result is not reported.
        rig.disk().fail.set(held(rig).is_multiple_of(2).then_some(nix::errno::Errno::EIO));
        rig.let_go(1);
    }
    rig.disk().fail.set(None);
    assert!(ready(rig), "{state:?}");
    let after = rig.read_memory(area(0).rfis(), 256);
    // Except the signature.
    assert_eq!(before[..0x40], after[..0x40], "{state:?}");
    assert_eq!(before[0x58..], after[0x58..], "{state:?}");
}

#[test]
fn the_list_is_stopped() {
    for state in STATES {
        let mut rig = Rig::new();
        enter(&mut rig, state);
        let cmd = rig.port().read(reg::PX_CMD);
        rig.port().write(reg::PX_CMD, cmd & !reg::CMD_ST);
        assert_eq!((rig.port().read(reg::PX_CI), rig.port().read(reg::PX_SACT)), (0, 0));
        rig.port().write(reg::PX_IS, u32::MAX);
        rig.turn();
        let requests = match state {
            PortState::Busy => 1,
            PortState::Queued => 8,
            PortState::FailedQueued => 7,
            _ => 0,
        };
        assert_eq!(held(&rig), requests, "{state:?}: what was not begun never is");
        drain(&mut rig, state, |rig| rig.port().read(reg::PX_CMD) & reg::CMD_CR == 0);
        assert_eq!(rig.port().read(reg::PX_IS), 0, "{state:?}");
        rig.port().recover().unwrap();
        works(&mut rig, state);
    }
}

#[test]
fn the_list_is_started_too_early() {
    for state in STATES {
        let mut rig = Rig::new();
        enter(&mut rig, state);
        let cmd = rig.port().read(reg::PX_CMD);
        rig.port().write(reg::PX_CMD, cmd & !reg::CMD_ST);
        rig.port().write(reg::PX_CMD, cmd | reg::CMD_ST);
        rig.port().write(reg::PX_IS, u32::MAX);
        rig.turn();
        let old = held(&rig);
        let read = match state {
            PortState::FailedQueued => Command { lba: 0x10, count: 1, ..command(0x2f) },
            // The same slot again, with a command that does not wait for others of its kind.
            PortState::Queued => Command::queued(0, false, 0, 4096),
            _ => Command::dma(false, 0, 4096),
        };
        rig.port().prepare(0, &read, 4096).unwrap();
        rig.port().ring(1);
        rig.turn();
        if old > 0 {
            assert_eq!(held(&rig), old, "{state:?}: nothing begins beside what is drained");
        }
        rig.disk().hold.set(false);
        let all = held(&rig);
        rig.let_go(all);
        rig.port().finish(1).unwrap();
    }
}

#[test]
fn comreset() {
    for state in STATES {
        for stop_first in [true, false] {
            let mut rig = Rig::new();
            enter(&mut rig, state);
            let cmd = rig.port().read(reg::PX_CMD);
            if stop_first {
                rig.port().write(reg::PX_CMD, cmd & !reg::CMD_ST);
            }
            rig.port().write(reg::PX_SCTL, 0x301);
            assert_eq!(rig.port().read(reg::PX_SSTS), 0);
            assert_eq!(rig.port().read(reg::PX_TFD) & 0xff, 0x7f);
            assert_eq!(rig.port().read(reg::PX_SIG), u32::MAX);
            rig.port().write(reg::PX_SCTL, 0x300);
            rig.turn();
            drain(&mut rig, state, |rig| rig.port().read(reg::PX_SSTS) == 0x133);
            assert_eq!(rig.port().read(reg::PX_TFD), 0x150, "{state:?}");
            assert_eq!(rig.port().read(reg::PX_SIG), 0x101);
            assert_eq!(rig.fis(D2H)[..16], [0x34, 0, 0x50, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
            rig.port().stop_list().unwrap();
            rig.port().recover().unwrap();
            works(
                &mut rig,
                if state == PortState::FailedQueued { PortState::Failed } else { state },
            );
        }
    }
}

#[test]
fn comreset_that_lasts_longer_than_the_drain() {
    let mut rig = Rig::new();
    enter(&mut rig, PortState::Queued);
    rig.port().write(reg::PX_SCTL, 0x301);
    rig.let_go(8);
    assert_eq!(rig.port().read(reg::PX_SSTS), 0);
    rig.port().write(reg::PX_SCTL, 0x310);
    assert_eq!(rig.port().read(reg::PX_SSTS), 0x113, "the speed limit");
    rig.port().write(reg::PX_SCTL, 0x304);
    assert_eq!(rig.port().read(reg::PX_SSTS), 4, "offline");
    rig.port().write(reg::PX_SCTL, 0x300);
    assert_eq!(rig.port().read(reg::PX_SSTS), 0x133);
}

/// Commands that a driver announces before the link is up are not lost.
#[test]
fn commands_wait_for_the_link() {
    let mut rig = Rig::new();
    rig.port().prepare(0, &Command::dma(false, 0, 512), 512).unwrap();
    rig.port().write(reg::PX_SCTL, 1);
    rig.port().ring(1);
    rig.turn();
    assert_eq!(rig.port().read(reg::PX_CI), 1);
    rig.port().write(reg::PX_SCTL, 0);
    rig.turn();
    assert_eq!(rig.port().read(reg::PX_CI), 0);
}

#[test]
fn reset_of_the_controller() {
    for state in STATES {
        let mut rig = Rig::with(2, false);
        enter(&mut rig, state);
        rig.port().write_generic(reg::GHC, reg::GHC_AE | reg::GHC_HR);
        assert!(!rig.controller.line.is_up());
        rig.turn();
        drain(&mut rig, state, |rig| rig.port().read_generic(reg::GHC) == reg::GHC_AE);
        let port = &rig.ports[0];
        assert_eq!(port.read(reg::PX_CLB), area(0).list() as u32, "kept");
        assert_eq!(port.read(reg::PX_FB), area(0).rfis() as u32);
        assert_eq!((port.read(reg::PX_IE), port.read(reg::PX_CMD)), (0, 6));
        assert_eq!((port.read(reg::PX_SSTS), port.read(reg::PX_SIG)), (0x133, 0x101));
        assert_eq!((port.read_generic(reg::IS), rig.ports[1].read(reg::PX_SSTS)), (0, 0x133));
        rig.ports[0].write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
        rig.ports[0].start().unwrap();
        works(&mut rig, if state == PortState::FailedQueued { PortState::Failed } else { state });
    }
}

#[test]
fn software_reset() {
    let mut rig = Rig::new();
    // Linux's driver sends the reset as two frames with the control register.
    let control = |srst: u8| {
        let mut fis = command(0).fis();
        (fis[1], fis[15]) = (0, srst);
        fis
    };
    for (srst, status) in [(4, 0x80), (0, 0x50)] {
        rig.port().prepare(0, &command(0), 0).unwrap();
        rig.write_memory(area(0).table(0), &control(srst));
        rig.port().ring(1);
        rig.port().finish(1).unwrap();
        assert_eq!(rig.port().read(reg::PX_TFD) & 0xff, status);
    }
    assert_eq!(rig.port().read(reg::PX_SIG), 0x101);
    assert_eq!(rig.fis(D2H)[..4], [0x34, 0, 0x50, 1]);
    works(&mut rig, PortState::Idle);
}

#[test]
fn a_busy_drive_is_overridden() {
    let mut rig = Rig::new();
    enter(&mut rig, PortState::Busy);
    assert_eq!(rig.port().read(reg::PX_TFD) & 0x80, 0x80);
    let cmd = rig.port().read(reg::PX_CMD);
    rig.port().write(reg::PX_CMD, cmd & !reg::CMD_ST | reg::CMD_CLO);
    assert_eq!(rig.port().read(reg::PX_TFD) & 0x88, 0);
    assert_eq!(rig.port().read(reg::PX_CMD) & reg::CMD_CLO, 0);
}

#[test]
fn fis_reception_follows_its_enable_bit() {
    let mut rig = Rig::new();
    rig.port().stop_list().unwrap();
    rig.port().write(reg::PX_CMD, 0);
    assert_eq!(rig.port().read(reg::PX_CMD) & reg::CMD_FR, 0);
    rig.write_memory(area(0).rfis(), &[0; 256]);
    rig.port().write(reg::PX_SCTL, 1);
    rig.port().write(reg::PX_SCTL, 0);
    assert_eq!(rig.fis(D2H), [0; 20]);
    rig.port().write(reg::PX_CMD, reg::CMD_FRE);
    assert_ne!(rig.port().read(reg::PX_CMD) & reg::CMD_FR, 0);
    assert_eq!(rig.fis(D2H)[0], 0x34, "the signature waited for it");
}

#[test]
fn a_stopped_list_takes_no_doorbells() {
    let mut rig = Rig::new();
    rig.port().stop_list().unwrap();
    rig.port().prepare(0, &Command::dma(false, 0, 512), 512).unwrap();
    rig.port().write(reg::PX_SACT, 7);
    rig.port().write(reg::PX_CI, 7);
    assert_eq!((rig.port().read(reg::PX_SACT), rig.port().read(reg::PX_CI)), (0, 0));
    rig.turn();
    assert_eq!(rig.log(), []);
}

#[test]
fn a_drive_is_taken_away() {
    for state in STATES {
        let mut rig = Rig::new();
        enter(&mut rig, state);
        rig.port().write(reg::PX_SERR, u32::MAX);
        let gone = Rc::new(Cell::new(0));
        let told = gone.clone();
        rig.drives[0].detach(move || told.set(told.get() + 1));
        assert_eq!(rig.port().read(reg::PX_SSTS), 0);
        assert_eq!(
            rig.port().read(reg::PX_IS) & reg::IS_PRCS,
            reg::IS_PRCS,
            "the change is reported"
        );
        rig.turn();
        while held(&rig) > 0 {
            assert_eq!(gone.get(), 0, "{state:?}");
            rig.let_go(1);
        }
        assert_eq!(gone.get(), 1, "{state:?}");
        rig.port().write(reg::PX_CI, 0xff00);
        rig.turn();
        assert_eq!(held(&rig), 0);
    }
}
