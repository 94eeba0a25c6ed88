//! The state of a controller in the hands of another: nothing is lost and nothing repeated. A malformed state is refused, or
//! gives a controller that a driver can use.

use std::cell::Cell;
use std::rc::Rc;

use devices::ahci::{Drive, DriveConfig};
use proptest::prelude::*;
use proptest::sample::Index;
use vcpu::ahci::{Command, Controller, reg};

use crate::ahci::resets::{PortState, STATES, enter, works};
use crate::ahci::rig::*;

/// Pauses all drives. Returns whether they are paused.
fn pause(rig: &Rig) -> Rc<Cell<usize>> {
    let paused = Rc::new(Cell::new(0));
    for drive in &rig.drives {
        let paused = paused.clone();
        drive.pause(move || paused.set(paused.get() + 1));
    }
    paused
}

/// A new controller with the same disks, on the same loop and memory.
fn another(rig: &Rig) -> (Controller, Vec<Rc<Drive>>) {
    let controller = Controller::new(rig.disks.len(), rig.memory.clone()).unwrap();
    let attach = |(port, disk): (usize, &Rc<Disk>)| {
        let config = DriveConfig {
            geometry: geometry(false),
            writable: true,
            write_cache: true,
            serial: format!("serial-{port}"),
            model: "a model".into(),
        };
        Drive::attach(&rig.event_loop, &controller.ahci, port, disk.clone(), config).unwrap()
    };
    let drives = rig.disks.iter().enumerate().map(attach).collect();
    (controller, drives)
}

/// Lets the driver continue with this controller.
fn go_on(rig: &mut Rig, (controller, drives): (Controller, Vec<Rc<Drive>>)) {
    rig.ports.iter_mut().for_each(|port| port.continue_on(&controller));
    for drive in std::mem::replace(&mut rig.drives, drives) {
        drive.detach(|| {});
    }
    rig.controller = controller;
}

/// Has another controller take the state over.
fn take_over(rig: &mut Rig) {
    let paused = pause(rig);
    assert_eq!(paused.get(), rig.drives.len(), "nothing is in flight");
    let state = rig.controller.ahci.save();
    let next = another(rig);
    let restored = next.0.ahci.check(&state).unwrap();
    next.0.ahci.restore(&restored);
    assert_eq!(next.0.ahci.save(), state, "nothing is lost");
    go_on(rig, next);
}

#[test]
fn each_state_is_gone_on_with() {
    for state in STATES {
        let mut rig = Rig::new();
        enter(&mut rig, state);
        let held = rig.disk().held.borrow().len();
        let paused = pause(&rig);
        assert_eq!(paused.get() == 1, held == 0, "{state:?}: the commands under way have ended");
        rig.disk().hold.set(false);
        rig.let_go(held);
        assert_eq!((paused.get(), rig.disk().held.borrow().len()), (1, 0), "{state:?}");
        take_over(&mut rig);
        match state {
            PortState::Idle => {}
            PortState::Announced | PortState::Busy | PortState::Queued => {
                rig.port().finish(0xff).unwrap();
                let offset = if state == PortState::Queued { 7 * 65536 } else { 65536 };
                let slot = if state == PortState::Queued { 7 } else { 1 };
                assert_eq!(rig.port().data(slot, 1).unwrap(), [pattern(offset)]);
                assert_eq!(rig.log().len(), 8, "{state:?}: each is carried out once");
            }
            PortState::Failed | PortState::FailedQueued => {
                assert_ne!(rig.port().read(reg::PX_IS) & 1 << 30, 0, "the error is told");
                rig.port().recover().unwrap();
            }
        }
        works(&mut rig, state);
    }
}

/// Registers that a driver has written, the write cache and a link that is held down.
#[test]
fn settings_and_several_ports_are_gone_on_with() {
    let mut rig = Rig::with(3, false);
    rig.ports[1].run(&Command { features: 0x82, ..command(0xef) }, 0).unwrap();
    rig.ports[2].write(reg::PX_SCTL, 0x301);
    take_over(&mut rig);
    rig.disks.iter().for_each(|disk| drop(disk.log.take()));
    for port in [0, 1] {
        rig.ports[port].run(&Command::dma(true, 0, 4096), 4096).unwrap();
    }
    let has_fua = |disk: usize| {
        let log = rig.disks[disk].log.take();
        matches!(log[..], [(block::request::Op::Write { fua: true }, 0, 4096)])
    };
    assert_eq!([0, 1].map(has_fua), [false, true], "the write cache of port 1 is off");
    assert_eq!(rig.ports[2].read(reg::PX_SSTS), 0, "the link is down");
    rig.ports[2].start().unwrap();
    rig.ports[2].run(&Command::dma(false, 1024, 4096), 4096).unwrap();
}

/// Interrupts that the driver has not handled are still raised.
#[test]
fn the_interrupt_stays() {
    let mut rig = Rig::new();
    rig.port().prepare(0, &Command::dma(false, 0, 4096), 4096).unwrap();
    rig.port().ring(1);
    rig.turn();
    assert!(rig.controller.line.is_up());
    take_over(&mut rig);
    assert!(rig.controller.line.is_up());
    assert_eq!(rig.port().handle_interrupt().unwrap(), 1);
    assert!(!rig.controller.line.is_up());
    rig.port().run(&Command::dma(false, 0, 4096), 4096).unwrap();
}

#[test]
fn a_paused_drive_goes_on() {
    let mut rig = Rig::new();
    let paused = pause(&rig);
    rig.port().prepare(0, &Command::dma(false, 0, 4096), 4096).unwrap();
    rig.port().ring(1);
    rig.turn();
    assert_eq!((paused.get(), rig.log().len()), (1, 0), "nothing begins");
    rig.drives[0].resume();
    rig.port().finish(1).unwrap();
}

/// A change of a state.
#[derive(Debug, Clone)]
enum Change {
    Word { at: Index, value: u64 },
    Add { at: Index, value: i8 },
    Flip { bit: Index },
    Remove { at: Index },
    Repeat { at: Index },
    Cut { len: Index },
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<Index>;
    let word = prop_oneof![
        0..34u64,
        (0..64u32).prop_map(|bit| 1 << bit),
        (0..MEMORY).prop_map(|at| at & !0x3ff),
        any::<u32>().prop_map(u64::from),
        any::<u64>(),
    ];
    prop_oneof![
        4 => (index(), word).prop_map(|(at, value)| Change::Word { at, value }),
        3 => (index(), any::<i8>()).prop_map(|(at, value)| Change::Add { at, value }),
        3 => index().prop_map(|bit| Change::Flip { bit }),
        1 => index().prop_map(|at| Change::Remove { at }),
        1 => index().prop_map(|at| Change::Repeat { at }),
        1 => index().prop_map(|len| Change::Cut { len }),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let words = bytes.len() / 8;
    if words == 0 {
        return;
    }
    let word =
        |bytes: &[u8], at: usize| -> [u8; 8] { bytes[8 * at..8 * at + 8].try_into().unwrap() };
    match change {
        Change::Word { at, value } => {
            let at = 8 * at.index(words);
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        Change::Add { at, value } => {
            let at = at.index(words);
            let value = u64::from_le_bytes(word(bytes, at)).wrapping_add_signed((*value).into());
            bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_le_bytes());
        }
        Change::Flip { bit } => {
            let bit = bit.index(8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        Change::Remove { at } => {
            let at = 8 * at.index(words);
            bytes.drain(at..at + 8);
        }
        Change::Repeat { at } => {
            let at = at.index(words);
            let word = word(bytes, at);
            bytes.splice(8 * at..8 * at, word);
        }
        Change::Cut { len } => bytes.truncate(len.index(bytes.len())),
    }
}

fn malformed(state: PortState, changes: &[Change], writes: &[(u64, u32)]) {
    let mut rig = Rig::new();
    enter(&mut rig, state);
    let paused = pause(&rig);
    rig.disk().hold.set(false);
    let held = rig.disk().held.borrow().len();
    rig.let_go(held);
    assert_eq!(paused.get(), 1);
    let mut bytes = rig.controller.ahci.save();
    changes.iter().for_each(|change| apply(&mut bytes, change));
    let next = another(&rig);
    match next.0.ahci.check(&bytes) {
        Ok(restored) => {
            next.0.ahci.restore(&restored);
            assert_eq!(next.0.ahci.save(), bytes, "a state has one form");
        }
        Err(error) => assert!(!changes.is_empty(), "{error}"),
    }
    go_on(&mut rig, next);
    rig.turn();
    for (register, value) in writes {
        rig.port().write(*register, *value);
    }
    rig.turn();
    // What was accepted can be handed over once more.
    take_over(&mut rig);
    rig.turn();
    // The driver's own reset.
    rig.port().write_generic(reg::GHC, reg::GHC_AE | 1);
    rig.turn();
    assert_eq!(rig.port().read_generic(reg::GHC) & 1, 0, "the reset has ended");
    rig.port().write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
    rig.port().start().unwrap();
    // Commands of the changed state may have written to the disk.
    rig.port().run(&Command::dma(false, 1024, 4096), 4096).unwrap();
    rig.port().run(&Command::queued(0, true, 512, 4096), 4096).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 3, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_malformed_state_is_refused_or_sound(
        state in prop::sample::select(&STATES[..]),
        changes in prop::collection::vec(change(), 0..4),
        writes in prop::collection::vec(((0..16u64).prop_map(|at| 4 * at), any::<u32>()), 0..6),
    ) {
        malformed(state, &changes, &writes);
    }
}
