//! Doorbells in a page that the driver has mapped: no register is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use devices::nvme::DoorbellMode;
use event_loop::PollParams;

use crate::nvme::rig::{CC, CSTS, DATA, ENTRIES, READ, Rig, WRITE, command, io};

/// A controller with mapped doorbells, whose driver maps them. Its loop does not poll of its own accord.
fn ready() -> Rig {
    let mut rig = Rig::with(0, true, |config| config.doorbells = DoorbellMode::Mapped);
    rig.map_doorbells();
    rig.enable();
    rig.create(1);
    rig
}

#[test]
fn commands_need_no_register() {
    let mut rig = ready();
    rig.put(DATA, &[7; 512]);
    for _ in 0..3 * ENTRIES {
        rig.ok(1, io(WRITE, 3, 1));
    }
    rig.ok(1, io(READ, 3, 1).prps(DATA + 4096, 0));
    assert_eq!(rig.bytes(DATA + 4096, 512), [7; 512]);
    assert_eq!(rig.rings, 0, "no register was written");
    // Shadow doorbells are not offered.
    rig.ok(0, command(0x06).prps(DATA, 0).dword(10, 1));
    assert_eq!(rig.bytes(DATA + 256, 2), [0, 0], "OACS");
    assert_eq!(rig.status(0, command(0x7c).prps(DATA, DATA + 4096)), 0x01);
}

/// A client may write a register by message all the same.
#[test]
fn a_register_is_a_doorbell_as_well() {
    let mut rig = ready();
    rig.ok(1, io(READ, 3, 1));
    let before = rig.tail(1);
    let cid = rig.submit(1, io(READ, 4, 1));
    rig.write(0x1008, (before + 1) % ENTRIES);
    assert_eq!(rig.completed(1).cid, cid);
    rig.ok(1, io(READ, 5, 1));
}

/// The loop is awake while the controller is enabled, and sleeps otherwise.
#[test]
fn the_loop_sleeps_when_the_controller_is_off() {
    let mut rig = ready();
    let sleeps = |rig: &Rig| rig.event_loop.handle().stats().sleeps.get();
    let before = sleeps(&rig);
    for _ in 0..50 {
        // With something to do it does not wait for anything.
        rig.event_loop.run_once(true).unwrap();
    }
    assert_eq!(sleeps(&rig), before, "it looks again");
    rig.write(CC, 0);
    rig.wait("the controller is off", |rig| rig.read(CSTS) == 0);
    rig.turn();
    let handle = rig.event_loop.handle().clone();
    let woken = Arc::new(AtomicBool::new(false));
    let sets = woken.clone();
    let waker = std::thread::spawn(move || {
        let begin = std::time::Instant::now();
        while handle.stats().sleeps.get() == before && begin.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        handle.spawn(move |_| sets.store(true, Ordering::Relaxed)).unwrap();
    });
    // The thread itself may end after the last event, which nothing would announce.
    while !woken.load(Ordering::Relaxed) {
        rig.event_loop.run_once(true).unwrap();
    }
    waker.join().unwrap();
    assert!(sleeps(&rig) > before, "nothing is to be polled");
}

/// Doorbells of an earlier life are not those of a new queue.
#[test]
fn a_reset_forgets_doorbells() {
    let mut rig = ready();
    for _ in 0..5 {
        rig.ok(1, io(READ, 3, 1));
    }
    for _ in 0..3 {
        rig.write(CC, 0);
        rig.wait("the controller is off", |rig| rig.read(CSTS) == 0);
        rig.enable();
        rig.create(1);
        rig.disks[0].seen.take();
        rig.ok(1, io(READ, 3, 1));
        assert_eq!(rig.disks[0].seen.take().len(), 1, "one command, not an earlier tail's");
    }
}

/// A value beyond the queue's end is an event, once.
#[test]
fn a_wrong_value_is_told_once() {
    let mut rig = ready();
    // A request for an event, and events of errors are always reported.
    let asked = rig.submit(0, command(0x0c));
    rig.ring(0, rig.tail(0));
    rig.turn();
    rig.set_mapped_doorbell(2, ENTRIES);
    rig.wait("an event", |rig| rig.peek(0).is_some());
    let told = rig.reap(0).unwrap();
    assert_eq!((told.cid, told.result & 0xffff), (asked, 0x0100), "an invalid doorbell value");
    rig.turn();
    assert!(rig.peek(0).is_none());
    // The queue continues with a right one.
    let cid = rig.submit(1, io(READ, 4, 1));
    rig.ring(1, 0);
    assert_eq!(rig.completed(1).cid, cid);
}

/// By threads of their own that would sleep.
#[test]
fn threads_find_commands_without_a_signal() {
    let mapped = |config: &mut devices::nvme::ControllerConfig| {
        config.num_queues = 4;
        config.doorbells = DoorbellMode::Mapped;
    };
    let mut rig = Rig::on_threads_with(PollParams::OFF, 2, mapped);
    rig.map_doorbells();
    rig.enable();
    (1..=4).for_each(|qid| rig.create(qid));
    for n in 0..200 {
        rig.ok(n % 4 + 1, io(READ, 3, 1));
    }
    assert_eq!(rig.rings, 0);
}

/// A doorbell that is written between the old controller's last look and the new one's first is found, also where it has
/// become 0 again.
#[test]
fn a_doorbell_rung_during_a_handover_is_found() {
    for qid in [0, 1] {
        let mut rig = ready();
        let command = || if qid == 0 { command(0x0a).dword(10, 6) } else { io(READ, 3, 1) };
        while rig.tail(qid) < ENTRIES - 1 {
            rig.ok(qid, command());
        }
        let controller = rig.controller.clone().unwrap();
        let state = rig.event_loop.block_on(controller.pause()).unwrap().unwrap();
        let cid = rig.submit(qid, command());
        rig.ring(qid, ENTRIES - 1);
        let mut next = Rig::with(0, true, |config| config.doorbells = DoorbellMode::Mapped);
        next.controller().set_doorbell_page(rig.controller().doorbell_page().unwrap());
        next.continue_driver_of(&rig);
        let restored = next.controller().check(&state).unwrap();
        next.controller().restore(restored);
        assert_eq!(next.completed(qid).cid, cid, "queue {qid}");
        next.ok(1, io(READ, 3, 1));
        drop(controller);
    }
}
