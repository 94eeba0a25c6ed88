//! The control queue and the event queue.

use std::sync::Arc;

use block::NodeRegistry;
use block::job::OnError;
use block::options::*;
use block::policy::{ErrorPolicy, with_policy};
use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;

use crate::scsi::rig::{Disk, Rig, SIZE};

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn lun(number: u8) -> [u8; 8] {
    [1, 0, 0x40, number, 0, 0, 0, 0]
}

/// A task management request.
fn function(function: u32, lun: [u8; 8], id: u64) -> Vec<u8> {
    let mut request = vec![0, 0, 0, 0];
    request.extend(function.to_le_bytes());
    request.extend(lun);
    request.extend(id.to_le_bytes());
    request
}

/// A rig with three reads in flight: tasks 1 and 2 of LUN 0, one on each queue, and task 3 of LUN 1.
fn busy() -> (Rig, [u64; 3]) {
    let mut rig = Rig::new();
    rig.disks.iter().for_each(|disk| disk.holds.set(true));
    let slots = [(2, 0, 1), (3, 0, 2), (3, 1, 3)].map(|(queue, number, id)| {
        let slot = rig.add(queue, lun(number), id, &READ, &[], 512, u32::MAX);
        rig.publish(queue);
        slot
    });
    (rig, slots)
}

/// Runs a function that waits for tasks of the first disk. Asserts that its answer comes after their ends, and
/// returns the responses of the three.
fn end(kind: u32, address: [u8; 8], id: u64) -> [u8; 3] {
    let (mut rig, slots) = busy();
    let answer = rig.add_control(&function(kind, address, id), 1);
    assert!(rig.nothing_comes(0), "function {kind} is not done before its tasks are");
    // The function waits for its own tasks only.
    let disks = rig.disks.clone();
    disks[1].release();
    if kind != 4 {
        assert!(rig.nothing_comes(0), "the other disk's tasks do not matter");
    }
    disks[0].release();
    rig.reap(0);
    assert_eq!(rig.control_answer(answer, 1), [0], "FUNCTION COMPLETE");
    let shown = (0..2).filter(|_| rig.drivers[3].reap().is_some()).count();
    assert_eq!((shown, rig.drivers[2].reap().is_some()), (2, true), "and shown");
    slots.map(|slot| rig.reply(slot, 512, 0).response)
}

#[test]
fn tasks_end_before_the_function_that_ends_them() {
    const OK: u8 = 0;
    const ABORTED: u8 = 2;
    const RESET: u8 = 4;
    assert_eq!(end(0, lun(0), 2), [OK, ABORTED, OK], "ABORT TASK");
    assert_eq!(end(1, lun(0), 0), [ABORTED, ABORTED, OK], "ABORT TASK SET");
    assert_eq!(end(3, lun(0), 0), [ABORTED, ABORTED, OK], "CLEAR TASK SET");
    assert_eq!(end(5, lun(0), 0), [RESET, RESET, OK], "LOGICAL UNIT RESET");
    assert_eq!(end(4, lun(0), 0), [RESET, RESET, RESET], "I_T NEXUS RESET");
}

#[test]
fn tasks_not_yet_taken_are_ended_too() {
    let mut rig = Rig::new();
    let slot = rig.add(2, lun(0), 5, &READ, &[], 512, u32::MAX);
    let _ = rig.drivers[2].publish();
    assert_eq!(rig.control(&function(0, lun(0), 5), 1), [0]);
    assert!(rig.drivers[2].reap().is_some());
    assert_eq!(rig.reply(slot, 512, 0).response, 2);
    assert!(rig.disks[0].log.borrow().is_empty(), "it was not begun");
}

/// Writes of 124 KiB: a turn takes no more than 1 MiB of them.
#[test]
fn tasks_beyond_one_turn_are_ended_too() {
    const LONG: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 248, 0];
    let mut rig = Rig::new();
    let add = |rig: &mut Rig, number, id| {
        rig.add(2, lun(number), id, &LONG, &[1; 248 * 512], 0, u32::MAX)
    };
    let slots: Vec<u64> = (0..16).map(|id| add(&mut rig, 0, id)).collect();
    let other = add(&mut rig, 1, 16);
    let _ = rig.drivers[2].publish();
    assert_eq!(rig.control(&function(5, lun(0), 0), 1), [0], "LOGICAL UNIT RESET");
    let shown = std::iter::from_fn(|| rig.drivers[2].reap()).count();
    assert!(shown >= slots.len(), "the driver sees {shown} of their ends");
    for slot in slots {
        assert_eq!(rig.reply(slot, 0, 0).response, 4);
    }
    assert!(rig.disks[0].log.borrow().is_empty(), "none was begun");
    if shown == 16 {
        rig.reap(2);
    }
    assert_eq!(rig.reply(other, 0, 0).response, 0, "of the other logical unit");
    // Tasks submitted after the function are not ended.
    add(&mut rig, 0, 17);
    rig.publish(2);
    rig.reap(2);
}

/// A stopping queue leaves the other chains in the ring, and the function does not wait for them.
#[test]
fn a_function_ends_when_its_tasks_are_not_taken_any_more() {
    let mut rig = Rig::new();
    rig.disks[0].holds.set(true);
    let held = rig.add(2, lun(0), 1, &READ, &[], 512, u32::MAX);
    rig.publish(2);
    for id in 2..18 {
        rig.add(2, lun(0), id, &READ, &[], 124 << 10, u32::MAX);
    }
    let _ = rig.drivers[2].publish();
    let answer = rig.add_control(&function(5, lun(0), 0), 1);
    // The control queue is handled, the function begins, a first turn is taken.
    assert!(!rig.nothing_comes(2));
    let stopped = rig.stop(2);
    rig.disks[0].clone().release();
    assert!(!rig.nothing_comes(0), "the function is answered");
    assert_eq!(rig.control_answer(answer, 1), [0]);
    assert!(stopped.get() || !rig.nothing_comes(2));
    assert_eq!(rig.reply(held, 512, 0).response, 4);
}

#[test]
fn resets_are_reported() {
    let mut rig = Rig::new();
    assert_eq!(rig.control(&function(5, lun(0), 0), 1), [0]);
    assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x29, 3));
    assert_eq!(rig.command(0, &[0], &[], 0).status, 0);
    assert_eq!(rig.command(1, &[0], &[], 0).status, 0, "not of the other one");
    assert_eq!(rig.control(&function(4, lun(0), 0), 1), [0]);
    assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x29, 7));
    assert_eq!(rig.command(1, &[0], &[], 0).code(), (6, 0x29, 7));
}

#[test]
fn tasks_are_looked_for() {
    let (mut rig, _) = busy();
    assert_eq!(rig.control(&function(6, lun(0), 2), 1), [10], "QUERY TASK: SUCCEEDED");
    assert_eq!(rig.control(&function(6, lun(0), 3), 1), [0], "of the other one");
    assert_eq!(rig.control(&function(7, lun(1), 0), 1), [10], "QUERY TASK SET");
    rig.disks.clone().iter().for_each(|disk| disk.release());
    assert_eq!(rig.control(&function(7, lun(1), 0), 1), [0]);
    assert_eq!(rig.control(&function(0, lun(0), 99), 1), [0], "aborting nothing is complete");
}

#[test]
fn other_functions_and_addresses() {
    let mut rig = Rig::new();
    assert_eq!(rig.control(&function(2, lun(0), 0), 1), [0], "CLEAR ACA");
    assert_eq!(rig.control(&function(8, lun(0), 0), 1), [11], "FUNCTION REJECTED");
    assert_eq!(rig.control(&function(5, lun(2), 0), 1), [12], "INCORRECT LUN");
    assert_eq!(rig.control(&function(5, [1, 1, 0x40, 0, 0, 0, 0, 0], 0), 1), [3], "BAD TARGET");
    for kind in [1u32, 2] {
        let request = |lun: [u8; 8]| [&kind.to_le_bytes()[..], &lun, &[0xff; 4]].concat();
        assert_eq!(rig.control(&request(lun(0)), 5), [0, 0, 0, 0, 0], "no such events");
        assert_eq!(rig.control(&request(lun(2)), 5), [0, 0, 0, 0, 12]);
    }
    assert_eq!(rig.control(&[9, 0, 0, 0], 1), [9], "FAILURE");
}

#[test]
fn a_change_of_capacity_is_reported_by_an_event() {
    let mut rig = Rig::new();
    let add = |rig: &mut Rig| {
        let slot = rig.slot();
        rig.drivers[1].add(&[], &[queue::Segment { addr: slot, len: 16 }]).unwrap();
        rig.publish(1);
        slot
    };
    let slot = add(&mut rig);
    assert!(rig.nothing_comes(1), "buffers wait");
    rig.device.set_size(1, SIZE as u64 / 2);
    assert_eq!(rig.reap(1).1, 16);
    let event = |rig: &Rig, slot| rig.memory.read_array::<16>(slot).unwrap();
    let expected = [3, 0, 0, 0, 1, 0, 0x40, 1, 0, 0, 0, 0, 0x2a, 0x09, 0, 0];
    assert_eq!(event(&rig, slot), expected);
    // Without a buffer, the event stays pending.
    rig.device.set_size(1, SIZE as u64);
    assert!(rig.nothing_comes(1));
    let slot = add(&mut rig);
    assert_eq!(rig.reap(1).1, 16);
    assert_eq!(event(&rig, slot), expected);
    // A driver that did not ask for events gets none.
    rig.device.set_features(0);
    add(&mut rig);
    rig.device.set_size(1, SIZE as u64 / 2);
    assert!(rig.nothing_comes(1));
}

#[test]
fn queues_stop_when_their_tasks_are_done() {
    let (mut rig, _) = busy();
    rig.add_control(&function(5, lun(0), 0), 1);
    rig.event_loop.run_once(false).unwrap();
    let stopped: Vec<_> = (0..4).map(|queue| rig.stop(queue)).collect();
    assert!(rig.nothing_comes(0));
    let states = |list: &[std::rc::Rc<std::cell::Cell<bool>>]| -> Vec<bool> {
        list.iter().map(|stopped| stopped.get()).collect()
    };
    assert_eq!(states(&stopped), [false, true, false, false]);
    rig.disks.clone().iter().for_each(|disk| disk.release());
    rig.reap(0);
    assert_eq!(states(&stopped), [true; 4]);
}

/// A rig whose first write to the first logical unit fails. The error policy holds it and later requests.
fn stopping() -> (Rig, Arc<ErrorPolicy>) {
    let null = NullOptions { size: SIZE as u64, latency_ns: 0, read_zeroes: false };
    let null = BlockdevOptions::new(None, Driver::null_co(null));
    let mut options = BlkdebugOptions::new(BlockdevRef::Inline(Box::new(null)));
    options.inject_error = vec![InjectError {
        iotype: Some(IoType::Write),
        errno: Some(Errno::ENOSPC),
        count: 1,
        immediately: true,
        ..InjectError::new(Event::None)
    }];
    let node = BlockdevOptions::new(Some("node"), Driver::from(options));
    let node = NodeRegistry::new().open(&node).unwrap();
    let (policy, _) = ErrorPolicy::new(OnError::Report, OnError::Stop);
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let channel = with_policy(node, policy.clone()).open_channel(&event_loop).unwrap();
    let other = Disk::new();
    let channels = vec![channel, other.clone() as _];
    let mut rig = Rig::on(event_loop, channels, [other.clone(), other], |_| {});
    assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x29, 0), "POWER ON");
    (rig, policy)
}

/// A front end stops the queues in turn, the control queue first. The release of the task, or its failure, would
/// come later.
#[test]
fn the_control_queue_stops_while_a_task_is_held() {
    for (kind, response) in [(0, 2), (5, 4)] {
        let (mut rig, policy) = stopping();
        let held = rig.add(2, lun(0), 1, &WRITE, &[1; 512], 0, u32::MAX);
        rig.publish(2);
        assert!(policy.is_stopped() && rig.nothing_comes(2));
        let answer = rig.add_control(&function(kind, lun(0), 1), 1);
        let stopped = rig.stop(0);
        assert!(!rig.nothing_comes(2), "function {kind} ends what is held");
        assert_eq!(rig.reply(held, 0, 0).response, response);
        while !stopped.get() {
            rig.event_loop.run_once(true).unwrap();
        }
        assert_eq!(rig.control_answer(answer, 1), [0], "FUNCTION COMPLETE");
    }
}

#[test]
fn other_held_tasks_stay_held() {
    let (mut rig, policy) = stopping();
    let slots = [(2, 1), (2, 2), (3, 3)].map(|(queue, id)| {
        let slot = rig.add(queue, lun(0), id, &WRITE, &[1; 512], 0, u32::MAX);
        rig.publish(queue);
        slot
    });
    let answer = rig.add_control(&function(0, lun(0), 2), 1);
    assert!(!rig.nothing_comes(2), "ABORT TASK");
    rig.reap(0);
    assert_eq!(rig.control_answer(answer, 1), [0]);
    assert_eq!(rig.reply(slots[1], 0, 0).response, 2);
    assert!(rig.nothing_comes(2) && rig.nothing_comes(3));
    policy.resume(rig.event_loop.now_ns());
    assert_eq!((rig.reap(2).1, rig.reap(3).1), (108, 108));
    for slot in [slots[0], slots[2]] {
        let reply = rig.reply(slot, 0, 0);
        assert_eq!((reply.response, reply.status), (0, 0));
    }
}

#[test]
fn an_ended_write_same_writes_no_more() {
    // WRITE SAME (10) of all blocks, which takes many writes.
    const SAME: [u8; 10] = [0x41, 0, 0, 0, 0, 0, 0, 0x08, 0, 0];
    let mut rig = Rig::new();
    rig.disks[0].holds.set(true);
    let slot = rig.add(2, lun(0), 5, &SAME, &[1; 512], 0, u32::MAX);
    rig.publish(2);
    let answer = rig.add_control(&function(0, lun(0), 5), 1);
    assert!(rig.nothing_comes(0));
    rig.disks[0].clone().release();
    rig.reap(0);
    assert_eq!(rig.control_answer(answer, 1), [0]);
    assert!(rig.drivers[2].reap().is_some());
    assert_eq!(rig.reply(slot, 0, 0).response, 2);
    assert_eq!(rig.disks[0].log.borrow().len(), 1, "the part that was under way");
}
