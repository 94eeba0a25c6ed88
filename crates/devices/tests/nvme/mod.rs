//! An NVMe controller before a small driver: each command, each wrong command, and its life.

mod deallocate;
mod hostile_lists;
mod mapped;
pub(crate) mod rig;
mod saved;
mod threads;

use std::sync::Arc;

use block::request::Op;
use event_loop::{PollParams, PollPolicy};
use guest_memory::test_util::USER_BASE;
use nix::errno::Errno;
use rig::*;
use stats::Kind;

const NONE: u32 = 0;

#[test]
fn a_controller_comes_up_and_goes_down() {
    let mut rig = Rig::new(0);
    assert_eq!((rig.read(CAP) & 0xffff, rig.read(0x08)), (1023, 0x0001_0400));
    rig.enable();
    rig.create(1);
    rig.write(CC, 0);
    rig.wait("it is down", |rig| rig.read(CSTS) == 0);
    // Pages of 8 KiB are not offered.
    rig.write(CC, ENABLE | 1 << 7);
    assert_eq!(rig.read(CSTS), 2, "a fatal status");
    rig.write(CC, 0);
    rig.wait("it is down", |rig| rig.read(CSTS) == 0);
    rig.enable();
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
}

#[test]
fn identify_says_what_there_is() {
    let mut rig = Rig::new(0);
    rig.enable();
    let identify = |cns: u32, nsid: u32| command(0x06).nsid(nsid).prps(DATA, 0).dword(10, cns);
    rig.ok(0, identify(1, 0));
    let page = rig.bytes(DATA, 4096);
    assert_eq!(&page[4..24], b"S1                  ");
    assert_eq!(&page[24..32], b"ringmill");
    assert_eq!((page[77], page[512], page[513], page[516], page[525]), (8, 0x66, 0x44, 2, 7));
    assert!(page[768..].starts_with(b"nqn.2014-08.org.nvmexpress:uuid:"));
    rig.ok(0, identify(0, 2));
    let page = rig.bytes(DATA, 4096);
    assert_eq!(page[..8], BLOCKS.to_le_bytes());
    assert_eq!((page[25], page[130]), (0, 9));
    // Granularity and alignment of writes, of deallocation, optimal size of writes: 8 blocks.
    assert_eq!(page[64..74], [7, 0].repeat(5));
    rig.ok(0, identify(2, 0));
    assert_eq!(rig.bytes(DATA, 12), [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    rig.ok(0, identify(3, 1));
    assert_eq!(rig.bytes(DATA, 2), [3, 16]);
    assert_eq!(rig.status(0, identify(0, 3)), 0x0b);
    assert_eq!(rig.status(0, identify(0x77, 1)), 0x02);
    let by_sgl = command(0x06).sgl(DATA, 4096, 0).dword(10, 1);
    assert_eq!(rig.status(0, by_sgl), 0x02, "admin data is told by PRPs");
}

#[test]
fn data_goes_to_a_namespace_and_back() {
    let mut rig = Rig::ready(0);
    let data: Vec<u8> = (0..64 << 10).map(|n: u32| (n % 251) as u8).collect();
    rig.put(DATA, &data);
    // A list of 15 pages, in reverse.
    let list = DATA - 4096;
    for (n, page) in (0..15).zip((1..16).rev()) {
        rig.put(list + 8 * n, &(DATA + 4096 * page).to_le_bytes());
    }
    rig.ok(1, io(WRITE, 8, 128).prps(DATA, list));
    let disk = rig.disks[0].data.borrow()[4096..4096 + (64 << 10)].to_vec();
    assert_eq!(disk[..4096], data[..4096]);
    assert_eq!(disk[4096..8192], data[15 * 4096..]);
    rig.ok(1, io(READ, 8, 128).sgl(DATA + (1 << 20), 64 << 10, 0));
    assert_eq!(rig.bytes(DATA + (1 << 20), 64 << 10), disk);
    assert!(rig.disks[1].seen.borrow().is_empty());
    rig.ok(1, io(READ, 8, 1).nsid(2));
    assert_eq!(rig.bytes(DATA, 512), [0; 512]);
    assert_eq!(rig.sent(1), 3, "a message for each");
    let stats = &rig.controller().stats()[0];
    assert_eq!((stats.done(Kind::Read), stats.done(Kind::Write)), (2, 1));
    assert_eq!((stats.taken.get(), stats.signals.get()), (3, 3));
}

#[test]
fn commands_become_requests_of_the_node() {
    let mut rig = Rig::ready(0);
    rig.ok(1, io(WRITE, 0, 1));
    rig.ok(1, io(WRITE, 1, 1).dword(12, 1 << 30));
    rig.ok(1, io(0x08, 8, 16).dword(12, 1 << 25 | 15));
    let range = |blocks: u32, first: u64| {
        [&[0; 4][..], &blocks.to_le_bytes(), &first.to_le_bytes()].concat()
    };
    rig.put(DATA, &[range(8, 16), range(0, 0), range(1, 40)].concat());
    rig.ok(1, command(0x09).nsid(1).prps(DATA, 0).dword(10, 2).dword(11, 4));
    rig.ok(1, command(FLUSH).nsid(1));
    let zeroes = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
    let expected = [
        (Op::Write { fua: false }, 0, 512),
        (Op::Write { fua: true }, 512, 512),
        (zeroes, 4096, 8192),
        (Op::Discard, 8192, 4096),
        (Op::Discard, 20480, 512),
        (Op::Flush, 0, 0),
    ];
    assert_eq!(rig.disks[0].seen.take(), expected);
    rig.ok(1, command(FLUSH).nsid(u32::MAX));
    assert_eq!([0, 1].map(|n: usize| rig.disks[n].seen.take()), [[(Op::Flush, 0, 0)]; 2]);
    // Without a cache, each write is durable before it is answered; what is in the cache goes first.
    rig.ok(0, command(0x09).dword(10, 6).dword(11, 0));
    rig.ok(1, io(WRITE, 0, 1));
    let expected = [(Op::Flush, 0, 0), (Op::Write { fua: true }, 0, 512)];
    assert_eq!(rig.disks[0].seen.take(), expected);
    assert_eq!(rig.ok(0, command(0x0a).dword(10, 6)), 0);
    assert_eq!(rig.ok(0, command(0x0a).dword(10, 0x106)), 1, "the default");
}

#[test]
fn compare_and_verify_read() {
    let mut rig = Rig::ready(0);
    rig.disks[0].data.borrow_mut()[..1024].fill(7);
    rig.put(DATA, &[7; 1024]);
    rig.ok(1, io(0x05, 0, 2));
    rig.put(DATA + 1000, &[8]);
    assert_eq!(rig.status(1, io(0x05, 0, 2)), 0x285);
    rig.ok(1, io(0x0c, 0, 1024));
    rig.disks[0].error.set(Some(Errno::EIO));
    assert_eq!(rig.status(1, io(0x0c, 0, 1024)), 0x281);
    assert_eq!(rig.status(1, io(0x05, 0, 2)), 0x281);
}

/// FUSES is 0. Of a pair that is fused all the same, neither command is carried out: a driver that fuses them relies on
/// nothing being between the two.
#[test]
fn fused_commands_are_refused() {
    let mut rig = Rig::ready(0);
    rig.ok(0, command(0x06).prps(DATA, 0).dword(10, 1));
    assert_eq!(rig.bytes(DATA + 522, 2), [0, 0], "FUSES");
    rig.put(DATA, &[0; 512]);
    rig.put(DATA + 4096, &[9; 512]);
    let fused = |opcode: u8, part: u32| io(opcode, 8, 1).dword(0, part << 8 | u32::from(opcode));
    let (compare, write) = (fused(0x05, 1), fused(WRITE, 2).prps(DATA + 4096, 0));
    let cids = [rig.submit(1, compare), rig.submit(1, write)];
    rig.ring(1, 0);
    for cid in cids {
        let done = rig.completed(1);
        assert_eq!((done.cid, done.status), (cid, 0x02));
    }
    assert_eq!(rig.status(1, fused(WRITE, 3)), 0x02, "a reserved value");
    assert_eq!(rig.status(1, fused(FLUSH, 2)), 0x02);
    assert_eq!(rig.status(1, fused(FLUSH, 1).nsid(u32::MAX)), 0x02, "of all namespaces");
    assert_eq!(rig.status(0, command(0x06).dword(0, 1 << 8 | 0x06).dword(10, 1)), 0x02);
    assert!(rig.disks[0].seen.borrow().is_empty(), "nothing was read or written");
    rig.ok(1, io(0x05, 8, 1));
    rig.ok(1, io(WRITE, 8, 1));
}

#[test]
fn wrong_commands_are_refused_and_logged() {
    let mut rig = Rig::ready(0);
    assert_eq!(rig.status(1, io(READ, 0, 1).nsid(3)), 0x0b);
    assert_eq!(rig.status(1, io(READ, BLOCKS, 1)), 0x80);
    assert_eq!(rig.status(1, io(READ, 0, 1).prps(1, 0)), 0x13);
    assert_eq!(rig.status(1, io(READ, 0, 1).prps(1 << 40, 0)), 0x04);
    assert_eq!(rig.status(1, io(READ, 0, 1).sgl(DATA, 511, 0)), 0x0f);
    assert_eq!(rig.status(1, io(0x11, 0, 1)), 0x01);
    assert_eq!(rig.status(0, command(0x80).nsid(1)), 0x01, "Format NVM");
    rig.disks[0].error.set(Some(Errno::EIO));
    assert_eq!(rig.status(1, io(WRITE, 9, 1)), 0x280);
    rig.disks[0].error.set(Some(Errno::ENOSPC));
    assert_eq!(rig.status(1, io(WRITE, 9, 1)), 0x81);
    let page = |number: u32, dwords: u32| {
        command(0x02).nsid(u32::MAX).prps(DATA, 0).dword(10, (dwords - 1) << 16 | number)
    };
    rig.ok(0, page(1, 32));
    let errors = rig.bytes(DATA, 128);
    assert_eq!((errors[0], errors[64], errors[64 + 16]), (9, 8, 9), "the latest first");
    rig.ok(0, page(2, 128));
    let health = rig.bytes(DATA, 512);
    assert_eq!((health[160], health[176]), (1, 9));
    assert_eq!(rig.status(0, page(0x70, 1)), 0x109);
    for number in [3, 4, 5] {
        rig.ok(0, page(number, 128));
    }
    assert_eq!(rig.controller().stats()[0].errors(), 8);
}

#[test]
fn queues_are_made_once_and_deleted_when_they_are_idle() {
    let mut rig = Rig::ready(0);
    let create = |opcode: u8, dword10: u32, dword11: u32| {
        command(opcode).prps(DATA, 0).dword(10, dword10).dword(11, dword11)
    };
    let cases = [
        (create(5, 0x3f_0001, 3), 0x101),
        (create(5, 0x3f_0000, 3), 0x101),
        (create(5, 0x3f_0004, 3), 0x101),
        (create(5, 2, 3), 0x102),
        (create(5, 0xffff_0002, 3), 0x102),
        (create(5, 0x3f_0002, 2), 0x02),
        (create(5, 0x3f_0002, 4 << 16 | 3), 0x108),
        (create(5, 0x3f_0002, 3).prps(DATA + 16, 0), 0x13),
        (create(5, 0x3ff_0002, 3).prps(u64::MAX - 4095, 0), 0x02),
        (create(1, 0x3f_0002, 2 << 16 | 1), 0x100),
        (create(1, 0x3f_0001, 1 << 16 | 1), 0x101),
        (command(4).dword(10, 1), 0x10c),
        (command(4).dword(10, 2), 0x101),
        (command(0).dword(10, 2), 0x101),
    ];
    for (n, (wrong, status)) in cases.into_iter().enumerate() {
        assert_eq!(rig.status(0, wrong), status, "case {n}");
    }
    // The deletion of a submission queue waits for its command, which is answered.
    rig.disks[0].is_held.set(true);
    let old = rig.tail(1);
    rig.submit(1, io(READ, 0, 1));
    rig.ring(1, old);
    rig.wait("it has begun", |rig| !rig.disks[0].held.borrow().is_empty());
    let old = rig.tail(0);
    rig.submit(0, command(0).dword(10, 1));
    rig.ring(0, old);
    rig.turn();
    assert_eq!((rig.peek(0), rig.peek(1)), (None, None));
    rig.disks[0].release();
    rig.wait("the queue is deleted", |rig| rig.reap(0).is_some());
    assert_eq!(rig.reap(1).map(|completed| completed.status), Some(0));
    rig.ok(0, command(4).dword(10, 1));
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
}

/// Submits requests for events.
fn ask_for_events(rig: &mut Rig, count: usize) {
    for _ in 0..count {
        let old = rig.tail(0);
        rig.submit(0, command(0x0c));
        rig.ring(0, old);
    }
}

#[test]
fn events_are_told() {
    let mut rig = Rig::ready(0);
    ask_for_events(&mut rig, 4);
    assert_eq!(rig.status(0, command(0x0c)), 0x105, "one too many");
    rig.write(0x1000 + 8 * 2, 1);
    assert_eq!(rig.reap(0).map(|completed| completed.result), Some(0x0001_0000));
    let read =
        |number: u32| command(0x02).nsid(u32::MAX).prps(DATA, 0).dword(10, 0xff << 16 | number);
    rig.ok(0, read(1));
    rig.write(0x1000 + 8, ENTRIES);
    rig.wait("an event", |rig| rig.peek(0).is_some());
    assert_eq!(rig.reap(0).map(|completed| completed.result), Some(0x0001_0100));
    rig.ok(1, io(READ, 0, 1));

    // Another size is told only if the driver wants it.
    rig.controller().set_geometry(0, &geometry(BLOCKS / 2));
    assert_eq!(rig.peek(0), None);
    rig.ok(0, command(0x09).dword(10, 0x0b).dword(11, 1 << 8));
    rig.controller().set_geometry(1, &geometry(BLOCKS * 2));
    rig.controller().set_geometry(1, &geometry(BLOCKS * 2));
    assert_eq!(rig.reap(0).map(|completed| completed.result), Some(0x0004_0002));
    rig.ok(0, read(4));
    assert_eq!(rig.bytes(DATA, 12), [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    rig.ok(0, read(4));
    assert_eq!(rig.bytes(DATA, 12), [0; 12]);
    assert_eq!(rig.status(1, io(READ, BLOCKS - 1, 1)), 0x80);
    assert_eq!(rig.peek(0), None);
}

#[test]
fn features_are_kept_until_a_reset() {
    let mut rig = Rig::ready(0);
    let queues = command(0x09).dword(10, 7).dword(11, 0x1f_001f);
    assert_eq!(rig.status(0, queues), 0x0c, "the queues are made");
    rig.ok(0, command(0x09).dword(10, 4).dword(11, 350));
    assert_eq!(rig.ok(0, command(0x0a).dword(10, 4)), 350);
    assert_eq!(rig.status(0, command(0x09).dword(10, 2).dword(11, 1)), 0x02);
    assert_eq!(rig.status(0, command(0x09).dword(10, 1 << 31 | 6)), 0x10d);
    assert_eq!(rig.status(0, command(0x0a).dword(10, 0x10)), 0x02, "thermal management");
    assert_eq!(rig.ok(0, command(0x08).dword(10, 1)), 1, "nothing is aborted");
    rig.write(CC, 0);
    rig.wait("it is down", |rig| rig.read(CSTS) == 0);
    rig.enable();
    assert_eq!(rig.ok(0, command(0x0a).dword(10, 4)), 343);
    assert_eq!(rig.ok(0, queues), 0x0002_0002);
}

/// What SPDK's compliance suite asks of features and of submission queues.
#[test]
fn the_rest_of_the_compliance_suite_holds() {
    let mut rig = Rig::ready(0);
    assert_eq!(rig.ok(0, command(0x0a).dword(10, 0x0f)), 0, "keep alive");
    assert_eq!(rig.status(0, command(0x09).dword(10, 0x0f).dword(11, 1000)), 0x02);
    rig.put(DATA, &[0xff; 513]);
    rig.ok(0, command(0x0a).dword(10, 0x16).prps(DATA, 0));
    assert_eq!(rig.bytes(DATA, 513), [&[0; 512][..], &[0xff]].concat(), "host behavior support");
    assert_eq!(rig.status(0, command(0x09).dword(10, 0x16).prps(DATA, 0)), 0x10e);
    let submission =
        |cqid: u32| command(1).prps(DATA, 0).dword(10, 7 << 16 | 2).dword(11, cqid << 16 | 1);
    assert_eq!(rig.status(0, submission(0)), 0x101, "the admin queue's");
    assert_eq!(rig.status(0, submission(4)), 0x101, "out of range");
    assert_eq!(rig.status(0, submission(2)), 0x100, "not made");
    rig.ok(0, submission(1));
}

/// The loop sleeps between commands: a command that nobody tells of would hang here.
#[test]
fn shadow_doorbells_wake_a_loop_that_sleeps() {
    let mut rig = Rig::ready(0);
    rig.use_shadows();
    for n in 0..3000 {
        let old = rig.tail(1);
        for _ in 0..=n % 3 {
            rig.submit(1, io(READ, n % BLOCKS, 1));
        }
        rig.ring(1, old);
        for _ in 0..=n % 3 {
            while rig.reap(1).is_none() {
                rig.event_loop.run_once(true).unwrap();
            }
        }
    }
}

/// Another thread serves the queue, and polls, or sleeps now and then: none of 20,000 commands is lost, and one that polls
/// needs few writes of registers.
#[test]
fn shadow_doorbells_lose_no_command_between_threads() {
    let fixed = |max_ns| PollParams { max_ns, ..PollParams::of(PollPolicy::Fixed) };
    let always = fixed(1_000_000_000);
    for poll in [PollParams::OFF, PollParams::default(), fixed(20_000), always] {
        let mut rig = Rig::on_threads(poll, 1);
        rig.enable();
        rig.create(1);
        rig.use_shadows();
        (0..100).for_each(|_| rig.spin(io(READ, 0, 1)));
        rig.rings = 0;
        for n in 0..20_000 {
            if n % 500 == 0 {
                // Long enough for the loop to fall asleep, in one of the cases.
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            rig.spin(io(READ, n % BLOCKS, 1));
        }
        assert!(poll != always || rig.rings < 100, "{} rings of a loop that polls", rig.rings);
    }
}

#[test]
fn a_full_completion_queue_holds_commands_back() {
    for has_shadows in [false, true] {
        let mut rig = Rig::ready(0);
        if has_shadows {
            rig.use_shadows();
        }
        let mut answered = 0;
        for _ in 0..2 {
            let old = rig.tail(1);
            (0..ENTRIES - 2).for_each(|_| _ = rig.submit(1, io(READ, 0, 1)));
            rig.ring(1, old);
            rig.turn();
        }
        assert_eq!(rig.controller().stats()[0].done(Kind::Read), u64::from(ENTRIES) - 1);
        while answered < 2 * (ENTRIES - 2) {
            while rig.reap(1).is_none() {
                rig.event_loop.run_once(true).unwrap();
            }
            answered += 1;
        }
        assert_eq!(rig.peek(1), None);
    }
}

/// Commands that wait in their queue are aborted: each is answered so when its turn comes. Those that were taken are not.
#[test]
fn abort_reaches_commands_that_wait() {
    for has_shadows in [false, true] {
        let mut rig = Rig::ready(0);
        if has_shadows {
            rig.use_shadows();
        }
        let abort = |cid: u16| command(0x08).dword(10, u32::from(cid) << 16 | 1);
        // So many that the completion queue is full, and some commands wait.
        let mut cids = Vec::new();
        for _ in 0..2 {
            let old = rig.tail(1);
            (0..ENTRIES - 2).for_each(|_| cids.push(rig.submit(1, io(READ, 0, 1))));
            rig.ring(1, old);
            rig.turn();
        }
        let (first, last) = (cids[0], cids[cids.len() - 1]);
        assert_eq!(rig.ok(0, abort(first)), 1, "it is answered already");
        assert_eq!(rig.ok(0, abort(last)), 0);
        assert_eq!(rig.ok(0, abort(last)), 0, "twice is once");
        assert_eq!(rig.ok(0, abort(u16::MAX)), 1, "there is no such command");
        // The state says so, too.
        let controller = rig.controller.clone().unwrap();
        let state = rig.event_loop.block_on(controller.pause()).unwrap().unwrap();
        let mut next = Rig::new(0);
        next.continue_driver_of(&rig);
        let restored = next.controller().check(&state).unwrap();
        next.controller().restore(restored);
        for cid in cids {
            next.wait("an answer", |rig| rig.peek(1).is_some());
            let completed = next.reap(1).unwrap();
            let expected = if cid == last { 0x07 } else { 0 };
            assert_eq!((completed.cid, completed.status), (cid, expected));
        }
        // The place in the queue is of other commands from now on.
        for _ in 0..2 * ENTRIES {
            next.ok(1, io(READ, 0, 1));
        }
    }
}

/// A command that the node has was begun, and is not aborted.
#[test]
fn abort_leaves_commands_that_were_begun() {
    let mut rig = Rig::ready(0);
    rig.disks[0].is_held.set(true);
    let old = rig.tail(1);
    let cid = rig.submit(1, io(READ, 0, 1));
    rig.ring(1, old);
    rig.wait("it has begun", |rig| !rig.disks[0].held.borrow().is_empty());
    assert_eq!(rig.ok(0, command(0x08).dword(10, u32::from(cid) << 16 | 1)), 1);
    assert_eq!(rig.ok(0, command(0x08).dword(10, u32::from(cid) << 16 | 2)), 1, "no such queue");
    rig.disks[0].release();
    rig.wait("an answer", |rig| rig.peek(1).is_some());
    assert_eq!(rig.reap(1).map(|completed| completed.status), Some(0));
}

#[test]
fn abort_answers_a_request_for_an_event() {
    let mut rig = Rig::ready(0);
    let old = rig.tail(0);
    let cid = rig.submit(0, command(0x0c));
    rig.ring(0, old);
    let old = rig.tail(0);
    let abort = rig.submit(0, command(0x08).dword(10, u32::from(cid) << 16));
    rig.ring(0, old);
    let mut answers = Vec::new();
    rig.wait("both answers", |rig| {
        answers.extend(rig.reap(0));
        answers.len() == 2
    });
    let told = |at: usize| (answers[at].cid, answers[at].status, answers[at].result);
    assert_eq!((told(0), told(1)), ((cid, 0x07, 0), (abort, 0, 0)));
    assert_eq!(rig.ok(0, command(0x08).dword(10, u32::from(cid) << 16)), 1, "it waits no more");
    rig.write(0x1000 + 8 * 2, 1);
    assert_eq!(rig.reap(0), None, "the event has nobody to be told to");
}

/// Whether what a controller was asked has been answered.
fn is_done(rig: &mut Rig, mut asked: impl Future + Unpin) -> bool {
    rig.turn();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    std::pin::Pin::new(&mut asked).poll(&mut context).is_ready()
}

#[test]
fn a_reset_waits_for_commands_and_answers_none() {
    let mut rig = Rig::ready(0);
    rig.disks[0].is_held.set(true);
    let old = rig.tail(1);
    (0..3).for_each(|_| _ = rig.submit(1, io(READ, 0, 1)));
    rig.ring(1, old);
    rig.wait("they have begun", |rig| rig.disks[0].held.borrow().len() == 3);
    let in_flight = rig.event_loop.block_on(rig.controller().in_flight()).unwrap();
    assert_eq!(in_flight.len(), 3);
    rig.write(CC, 0);
    rig.turn();
    assert_eq!(rig.read(CSTS), 1, "the commands are not over");
    // A driver that does not wait gets a controller that is ready when they are.
    rig.write(CC, ENABLE);
    let mut settled = Box::pin(rig.controller().settle());
    assert!(!is_done(&mut rig, &mut settled));
    rig.disks[0].release();
    assert!(is_done(&mut rig, &mut settled));
    assert_eq!((rig.read(CSTS), rig.peek(1)), (1, None));
    rig.enable();
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
    // From outside, too.
    rig.controller().reset();
    rig.wait("it is down", |rig| (rig.read(CSTS), rig.read(CC)) == (0, 0));
    rig.enable();
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
}

#[test]
fn a_shutdown_flushes() {
    let mut rig = Rig::ready(0);
    rig.write(CC, ENABLE | 1 << 14);
    assert_eq!(rig.read(CSTS) & 0xc, 4, "under way");
    rig.wait("it is complete", |rig| rig.read(CSTS) & 0xc == 8);
    assert_eq!(rig.disks[1].seen.take(), [(Op::Flush, 0, 0)]);
}

#[test]
fn memory_that_goes_is_not_touched_and_a_queue_without_is_fatal() {
    let mut rig = Rig::ready(0);
    rig.disks[0].is_held.set(true);
    let old = rig.tail(1);
    rig.submit(1, io(READ, 0, 1));
    rig.ring(1, old);
    rig.wait("it has begun", |rig| !rig.disks[0].held.borrow().is_empty());
    let memory = rig.memory.memory().clone();
    let small = guest_memory::test_util::memfd_memory(&[(0, 4096)]).unwrap();
    rig.set_memory(small);
    let mut settled = Box::pin(rig.controller().settle());
    assert!(!is_done(&mut rig, &mut settled), "a read is still in the old memory");
    rig.disks[0].release();
    assert!(is_done(&mut rig, &mut settled));
    rig.wait("a fatal status", |rig| rig.read(CSTS) == 3);
    rig.set_memory(memory);
    rig.write(CC, 0);
    rig.wait("it is down", |rig| rig.read(CSTS) == 0);
    rig.enable();
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
}

/// Else the loop would look for commands for ever.
#[test]
fn event_indices_that_cannot_be_written_are_fatal() {
    let mut rig = Rig::ready(0);
    rig.use_shadows();
    let memory = rig.memory.memory().clone();
    let less = memory.without_region(EVENTS, USER_BASE + EVENTS, MEMORY - EVENTS).unwrap();
    rig.set_memory(Arc::new(less));
    rig.ok(1, command(FLUSH).nsid(1));
    rig.wait("a fatal status", |rig| rig.read(CSTS) == 3);
    rig.set_memory(memory);
    rig.write(CC, 0);
    rig.wait("it is down", |rig| rig.read(CSTS) == 0);
    rig.enable();
    rig.create(1);
    rig.ok(1, io(READ, 0, 1));
}

#[test]
fn a_read_only_namespace_says_so() {
    let mut rig = Rig::with(0, true, |config| config.namespaces[0].writable = false);
    rig.enable();
    rig.create(1);
    assert_eq!(rig.status(1, io(WRITE, 0, 1)), 0x182);
    rig.ok(1, io(READ, 0, 1));
    rig.ok(0, command(0x06).nsid(1).prps(DATA, 0).dword(10, NONE));
    assert_eq!(rig.bytes(DATA + 99, 1), [1]);
}
