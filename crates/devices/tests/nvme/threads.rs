//! I/O queues on several loops: which loop has which, and what waits for all of them.

use event_loop::PollParams;

use crate::nvme::is_done;
use crate::nvme::rig::*;

/// The disk of namespace 1 before which a queue is: queues are on two workers in turn.
fn disk_of(qid: usize) -> usize {
    2 * ((qid - 1) % 2)
}

/// A controller that is ready, with 4 queues on two workers of the driver's loop.
fn ready() -> Rig {
    let mut rig = Rig::with_workers(2);
    rig.enable();
    (1..=4).for_each(|qid| rig.create(qid));
    rig
}

fn begin(rig: &mut Rig, qid: usize, command: Command) -> u16 {
    let old = rig.tail(qid);
    let cid = rig.submit(qid, command);
    rig.ring(qid, old);
    cid
}

/// Has the second worker hold a command of queue 4 back.
fn hold(rig: &mut Rig) -> u16 {
    rig.disks[2].is_held.set(true);
    let cid = begin(rig, 4, io(READ, 0, 1));
    rig.wait("it has begun", |rig| rig.disks[2].held.borrow().len() == 1);
    cid
}

#[test]
fn queues_are_on_workers_in_turn() {
    for has_shadows in [false, true] {
        let mut rig = ready();
        if has_shadows {
            rig.use_shadows();
        }
        for qid in 1..=4 {
            rig.ok(qid, io(READ, qid as u64, 1));
            let seen = rig.disks[disk_of(qid)].seen.take();
            assert_eq!(seen.iter().map(|(_, at, _)| at / 512).collect::<Vec<_>>(), [qid as u64]);
            assert_eq!(rig.controller().thread_of(qid - 1), (qid - 1) % 2);
            assert_eq!(rig.sent(qid), 1, "its own vector");
        }
        assert!(rig.disks.iter().all(|disk| disk.seen.borrow().is_empty()));
    }
}

/// A submission queue is where its completion queue is, whatever its number.
#[test]
fn a_submission_queue_follows_its_completion_queue() {
    let mut rig = ready();
    let delete = |rig: &mut Rig| rig.ok(0, command(0).dword(10, 2));
    delete(&mut rig);
    let submission = |cqid: u32| {
        let base = 3 << 16;
        command(0x01).prps(base, 0).dword(10, (ENTRIES - 1) << 16 | 2).dword(11, cqid << 16 | 1)
    };
    rig.forget(2);
    rig.ok(0, submission(1));
    let cid = begin(&mut rig, 2, io(READ, 9, 1));
    rig.wait("an answer in the other queue", |rig| rig.peek(1).is_some());
    assert_eq!(rig.reap(1).map(|completed| completed.cid), Some(cid));
    assert_eq!(rig.disks[0].seen.take().len(), 1);
    // A deletion waits for a command on that worker.
    rig.disks[0].is_held.set(true);
    begin(&mut rig, 2, io(READ, 9, 1));
    rig.wait("it has begun", |rig| rig.disks[0].held.borrow().len() == 1);
    begin(&mut rig, 0, command(0).dword(10, 2));
    rig.turn();
    assert_eq!(rig.peek(0), None);
    rig.disks[0].release();
    rig.wait("the queue is deleted", |rig| rig.reap(0).is_some());
}

#[test]
fn a_reset_waits_for_all_workers() {
    let mut rig = ready();
    hold(&mut rig);
    rig.write(CC, 0);
    rig.turn();
    assert_eq!(rig.read(CSTS), 1, "the command is not over");
    rig.disks[2].release();
    rig.wait("it is down", |rig| rig.read(CSTS) == 0);
    assert_eq!(rig.peek(4), None);
    rig.enable();
    for qid in 1..=4 {
        rig.create(qid);
        rig.ok(qid as usize, io(READ, 0, 1));
    }
}

#[test]
fn memory_goes_when_no_worker_uses_it() {
    let mut rig = ready();
    hold(&mut rig);
    let memory = rig.memory.memory().clone();
    let old = std::sync::Arc::downgrade(&memory);
    rig.set_memory(guest_memory::test_util::memfd_memory(&[(0, 4096)]).unwrap());
    rig.memory = guest_memory::MemoryView::new(std::sync::Arc::default());
    drop(memory);
    let mut settled = Box::pin(rig.controller().settle());
    assert!(!is_done(&mut rig, &mut settled), "a read is still in the old memory");
    rig.disks[2].release();
    assert!(is_done(&mut rig, &mut settled));
    // A slot of that command keeps its list of segments, and not what they are of.
    assert_eq!(old.strong_count(), 0, "no worker has it");
}

#[test]
fn in_flight_and_events_are_of_all_workers() {
    let mut rig = ready();
    hold(&mut rig);
    rig.disks[0].is_held.set(true);
    begin(&mut rig, 1, io(READ, 0, 1));
    rig.wait("it has begun", |rig| rig.disks[0].held.borrow().len() == 1);
    let in_flight = rig.event_loop.block_on(rig.controller().in_flight()).unwrap();
    let mut queues: Vec<_> = in_flight.iter().map(|(queue, _)| *queue).collect();
    queues.sort_unstable();
    assert_eq!(queues, [0, 3]);
    begin(&mut rig, 0, command(0x0c));
    rig.write(0x1000 + 8 * 4, ENTRIES);
    rig.wait("an event", |rig| rig.peek(0).is_some());
    assert_eq!(rig.reap(0).map(|completed| completed.result), Some(0x0001_0100));
}

/// A state of two workers is gone on with by three, one and four.
#[test]
fn a_state_is_of_all_workers() {
    for (has_shadows, workers) in [(false, 3), (true, 1), (true, 4)] {
        let mut rig = ready();
        if has_shadows {
            rig.use_shadows();
        }
        (1..=4).for_each(|qid| _ = rig.ok(qid, io(READ, 0, 1)));
        let cid = hold(&mut rig);
        let controller = rig.controller.clone().unwrap();
        let mut paused = Box::pin(controller.pause());
        // It is polled once to begin.
        assert!(!is_done(&mut rig, &mut paused));
        assert!(!is_done(&mut rig, &mut paused), "a command is under way");
        // Not taken any more.
        let waiting = begin(&mut rig, 1, io(READ, 0, 1));
        rig.disks[2].release();
        let state = rig.event_loop.block_on(paused).unwrap().unwrap();
        assert_eq!((rig.reap(4).map(|done| done.cid), rig.reap(1)), (Some(cid), None));
        let mut next = Rig::with_workers(workers);
        next.continue_driver_of(&rig);
        let restored = next.controller().check(&state).unwrap();
        next.controller().restore(restored);
        next.wait("an answer", |rig| rig.peek(1).is_some());
        assert_eq!(next.reap(1).map(|done| done.cid), Some(waiting));
        for qid in 1..=4 {
            next.ok(qid, io(READ, 0, 1));
            let disk = 2 * ((qid - 1) % workers);
            assert!(!next.disks[disk].seen.take().is_empty(), "queue {qid} is on its worker");
        }
    }
}

/// Two threads serve four queues while the driver resets the controller: no command is lost, none is answered twice.
#[test]
fn threads_serve_their_queues_through_resets() {
    for has_shadows in [false, true] {
        let mut rig = Rig::on_threads(PollParams::default(), 2);
        for life in 0..20 {
            rig.enable();
            (1..=4).for_each(|qid| rig.create(qid));
            if has_shadows {
                // As Linux does: the pages are those of the last life.
                rig.put(SHADOW, &[0; 8192]);
                rig.use_shadows();
            }
            for n in 0..100 {
                let cids = [1, 2, 3, 4].map(|qid| begin(&mut rig, qid, io(READ, n % BLOCKS, 1)));
                for (qid, cid) in (1..).zip(cids) {
                    rig.wait("an answer", |rig| rig.peek(qid).is_some());
                    let completed = rig.reap(qid).unwrap();
                    assert_eq!((completed.cid, completed.status), (cid, 0));
                }
            }
            // Commands are under way on both threads, and queues go in some lives one by one.
            let under_way = [1, 2, 3, 4].map(|qid| begin(&mut rig, qid, io(WRITE, 0, 1)));
            if life % 2 == 0 {
                for (qid, cid) in (1..).zip(under_way) {
                    rig.ok(0, command(0).dword(10, qid as u32));
                    assert!(rig.peek(qid).is_none_or(|completed| completed.cid == cid));
                    rig.ok(0, command(4).dword(10, qid as u32));
                }
            }
            rig.write(CC, 0);
            rig.wait("it is down", |rig| rig.read(CSTS) == 0);
        }
    }
}
