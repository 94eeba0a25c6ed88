//! What becomes of a request when its operations fail, stop early, or have to wait: over a simulated
//! ring.

use crate::common;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::*;
use block::request::Op;
use common::*;
use event_loop::ring::sim::{Faults, Sim, SimOp, Verdict};
use event_loop::{IoBufs, LoopConfig};
use nix::errno::Errno;
use nix::libc;

const LEN: usize = 65536;

/// A disk over a simulated ring, and a log of the operations it caused.
struct Disk {
    sim: Sim,
    rig: Rig,
    node: Arc<dyn BlockNode>,
    image: TempFile,
    log: Rc<RefCell<Vec<SimOp>>>,
}

impl Disk {
    fn new(name: &str, change: impl FnOnce(&mut BlockdevOptions)) -> Disk {
        Disk::sized(name, LEN, change)
    }

    fn sized(name: &str, len: usize, change: impl FnOnce(&mut BlockdevOptions)) -> Disk {
        // In memory, where O_DIRECT means blocks of 4096 bytes.
        let image = TempFile::new(&tmpfs(), name, len);
        let mut options = blockdev("disk", file(&image.0, Some(Aio::IoUring)));
        options.discard = Discard::Unmap;
        change(&mut options);
        let sim = Sim::new(1, Faults::default());
        let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
        let node = NodeRegistry::new().open(&options).unwrap();
        let rig = Rig::on(event_loop, node.clone());
        let disk = Disk { sim, rig, node, image, log: Rc::default() };
        disk.script(|_| Verdict::Good);
        disk
    }

    /// Decides about operations from here on, and forgets those logged.
    fn script(&self, verdict: impl Fn(&SimOp) -> Verdict + 'static) {
        self.log.borrow_mut().clear();
        let log = self.log.clone();
        self.sim.script(move |op| {
            log.borrow_mut().push(*op);
            verdict(op)
        });
    }

    fn log(&self) -> Vec<SimOp> {
        self.log.take()
    }
}

const WRITE: Op = Op::Write { fua: false };
const ZEROES: Op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };

fn is_write(op: &SimOp) -> bool {
    matches!(op, SimOp::Write { .. })
}

#[test]
fn errors_keep_their_errno() {
    let mut disk = Disk::new("errno", |_| {});
    for errno in [Errno::EIO, Errno::ENOSPC, Errno::EREMOTEIO] {
        disk.script(move |_| Verdict::Fail(errno as i32));
        assert_eq!(disk.rig.read(0, 4096, 0), Err(errno));
        assert_eq!(disk.rig.write(0, &[1; 4096], 0), Err(errno));
        assert_eq!(disk.rig.op(Op::Discard, 0, 4096), Err(errno));
        assert_eq!(disk.rig.op(ZEROES, 0, 4096), Err(errno));
    }
    disk.script(|_| Verdict::Good);
    assert_eq!(disk.rig.read(0, LEN, 0).unwrap(), pattern(LEN), "and do no harm");
}

#[test]
fn short_transfers_are_carried_on() {
    let mut disk = Disk::new("short", |_| {});
    disk.script(|_| Verdict::Short(1000));
    assert_eq!(disk.rig.read(512, 4096, 0).unwrap(), pattern(LEN)[512..4608]);
    let lens: Vec<u64> = disk
        .log()
        .iter()
        .map(|op| if let SimOp::Read { len, .. } = op { *len } else { 0 })
        .collect();
    assert_eq!(lens, [4096, 3096, 2096, 1096, 96]);
    disk.rig.write(512, &[5; 4096], 0).unwrap();
    let mut want = pattern(LEN);
    want[512..4608].fill(5);
    assert!(disk.image.contents() == want);
}

#[test]
fn a_write_that_gets_nowhere_fails() {
    let mut disk = Disk::new("stuck", |_| {});
    disk.script(|op| if is_write(op) { Verdict::Short(0) } else { Verdict::Good });
    assert_eq!(disk.rig.write(0, &[1; 4096], 0), Err(Errno::EIO));
}

#[test]
fn the_truncated_part_of_a_file_reads_as_zeroes() {
    for direct in [false, true] {
        let mut disk = Disk::new("lost", |o| o.cache.direct = direct);
        std::fs::File::options().write(true).open(&disk.image.0).unwrap().set_len(10_000).unwrap();
        let mut want = pattern(LEN);
        want[10_000..].fill(0);
        assert!(disk.rig.read(0, LEN, 0).unwrap() == want);
        assert!(disk.rig.read(512, LEN - 512, 8).unwrap() == want[512..]);
        assert!(disk.rig.read(32768, 512, 0).unwrap() == [0; 512]);
    }
}

#[test]
fn interrupted_operations_are_made_again() {
    let mut disk = Disk::new("again", |_| {});
    let left = std::cell::Cell::new(5);
    disk.script(move |_| match left.replace(left.get() - 1) {
        1.. => Verdict::Fail(if left.get() % 2 == 0 { libc::EINTR } else { libc::EAGAIN }),
        _ => Verdict::Good,
    });
    assert_eq!(disk.rig.read(0, 4096, 0).unwrap(), pattern(4096));
    assert_eq!(disk.log().len(), 6);
}

/// Of the page cache by flushes, whose errors mean one thing; else by RWF_DSYNC.
#[test]
fn durability_is_asked_for_where_it_was_promised() {
    let fua = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: true };
    let write = |dsync| SimOp::Write { offset: 0, len: 4096, dsync };
    let is_call = |op: &SimOp| matches!(op, SimOp::Fallocate { .. });
    for direct in [false, true] {
        let mut disk = Disk::new("durable", |o| o.cache.direct = direct);
        disk.rig.write(0, &[1; 4096], 0).unwrap();
        disk.rig.write_op(Op::Write { fua: true }, 0, &[1; 4096], 0).unwrap();
        let durable: &[_] = if direct { &[write(true)] } else { &[write(false), SimOp::Fsync] };
        assert_eq!(disk.log(), [&[write(false)], durable].concat());
        disk.rig.op(Op::Flush, 0, 0).unwrap();
        assert_eq!(disk.log(), [SimOp::Fsync]);
        disk.rig.op(fua, 0, 4096).unwrap();
        let log = disk.log();
        assert!(matches!(&log[..], [call, SimOp::Fsync] if is_call(call)), "{log:?}");
    }
    let mut disk = Disk::new("no-flush", |o| o.cache.no_flush = true);
    disk.rig.op(Op::Flush, 0, 0).unwrap();
    disk.rig.write_op(Op::Write { fua: true }, 0, &[1; 4096], 0).unwrap();
    disk.rig.op(fua, 0, 4096).unwrap();
    let log = disk.log();
    assert!(
        matches!(&log[..], [first, call] if *first == write(false) && is_call(call)),
        "{log:?}"
    );
}

/// The kernel reports a page that it could not write once. With O_DIRECT the page cache has what lies in
/// a block that is not whole.
#[test]
fn a_failed_flush_of_the_page_cache_is_not_forgotten() {
    const TAIL: usize = LEN + 512;
    // The size before, and after a resize.
    for (direct, before, after, is_lost) in [
        (false, LEN, LEN, true),
        (true, LEN, LEN, false),
        (true, TAIL, TAIL, true),
        (true, LEN, TAIL, true),
        (true, TAIL, LEN, true),
    ] {
        let mut disk = Disk::sized("flush", before, |o| o.cache.direct = direct);
        if after != before {
            let resized = disk.node.clone().resize(after as u64, &disk.rig.event_loop);
            disk.rig.event_loop.block_on(resized).unwrap().unwrap();
        }
        disk.script(|op| match op {
            SimOp::Fsync => Verdict::Fail(libc::EIO),
            _ => Verdict::Good,
        });
        assert_eq!(disk.rig.op(Op::Flush, 0, 0), Err(Errno::EIO));
        disk.script(|_| Verdict::Good);
        let second = disk.rig.op(Op::Flush, 0, 0);
        let expected = if is_lost { Err(Errno::EIO) } else { Ok(()) };
        assert_eq!(second, expected, "O_DIRECT: {direct}, {before} and then {after} bytes");
    }
}

/// A full disk takes no write, but whoever freed some space has lost nothing.
#[test]
fn a_durable_write_that_failed_is_no_failed_flush() {
    let mut disk = Disk::new("full", |_| {});
    disk.script(|op| if is_write(op) { Verdict::Fail(libc::ENOSPC) } else { Verdict::Good });
    let fua = Op::Write { fua: true };
    assert_eq!(disk.rig.write_op(fua, 0, &[1; 4096], 0), Err(Errno::ENOSPC));
    disk.script(|_| Verdict::Good);
    assert_eq!(disk.rig.op(Op::Flush, 0, 0), Ok(()));
    assert_eq!(disk.rig.write_op(fua, 0, &[1; 4096], 0), Ok(()));
}

/// Of several flushes of an open file at the same time, a durable write's among them, Linux reports an error to one.
/// Whichever that is, none of the others is a success.
#[test]
fn a_flush_beside_one_that_failed_is_no_success() {
    const LATER: u64 = 1_000_000_000;
    let is_sync = |op: &SimOp| matches!(op, SimOp::Fsync | SimOp::Write { dsync: true, .. });
    let submit = |disk: &mut Disk, is_flush| match is_flush {
        true => disk.rig.submit(Op::Flush, 0, 0, IoBufs::new()),
        false => disk.rig.submit(Op::Write { fua: true }, 4096, 4096, filled(&[1; 4096], 0)),
    };
    for (direct, len) in [(false, LEN), (true, LEN), (true, LEN + 512)] {
        let has_tail = len != LEN;
        for flushes in [[true, true], [true, false], [false, true], [false, false]] {
            // With O_DIRECT a durable write is none.
            if has_tail && flushes != [true, true] {
                continue;
            }
            for verdicts in [
                [Verdict::Fail(libc::EIO), Verdict::Delay(LATER)],
                [Verdict::FailLate(LATER, libc::EIO), Verdict::Good],
            ] {
                let mut disk = Disk::sized("flushes", len, |o| o.cache.direct = direct);
                let left = RefCell::new(verdicts.into_iter());
                disk.script(move |op| match is_sync(op) {
                    true => left.borrow_mut().next().unwrap_or(Verdict::Good),
                    false => Verdict::Good,
                });
                let tags = flushes.map(|is_flush| submit(&mut disk, is_flush));
                let failed = tags.map(|tag| disk.rig.wait(tag).0 == Err(Errno::EIO));
                let count = failed.iter().filter(|failed| **failed).count();
                let expected = if direct && !has_tail { 1 } else { 2 };
                assert_eq!(count, expected, "{flushes:?} {verdicts:?}");
            }
        }
    }
}

#[test]
fn discards_that_are_not_there_are_no_failure_and_tried_once() {
    let mut disk = Disk::new("discard", |_| {});
    disk.script(|_| Verdict::Fail(libc::EOPNOTSUPP));
    for _ in 0..3 {
        assert_eq!(disk.rig.op(Op::Discard, 0, 4096), Ok(()));
    }
    assert_eq!(disk.log().len(), 1);
    let mut disk = Disk::new("ignore", |o| o.discard = Discard::Ignore);
    assert_eq!(disk.rig.op(Op::Discard, 0, 4096), Ok(()));
    assert_eq!(disk.log().len(), 0);
    assert!(disk.image.contents() == pattern(LEN), "nothing was discarded");
}

#[test]
fn zeroes_are_written_where_there_is_no_call_for_them() {
    let mut disk = Disk::new("zeroes", |_| {});
    disk.script(|op| match op {
        SimOp::Fallocate { .. } => Verdict::Fail(libc::EOPNOTSUPP),
        _ => Verdict::Good,
    });
    let no_fallback = Op::WriteZeroes { may_unmap: true, no_fallback: true, fua: false };
    assert_eq!(disk.rig.op(no_fallback, 512, 4096), Err(Errno::EOPNOTSUPP));
    assert_eq!(disk.log().len(), 2, "a hole, a zeroed range");
    assert_eq!(disk.rig.op(ZEROES, 512, 4096), Ok(()));
    let log = disk.log();
    assert!(matches!(log[..], [SimOp::Write { .. }]), "{log:?}");
    let mut want = pattern(LEN);
    want[512..4608].fill(0);
    assert!(disk.image.contents() == want);
}

#[test]
fn space_is_given_back_only_where_both_sides_agree() {
    let modes = |unmap: bool, discard: Discard| {
        let mut disk = Disk::new("modes", |o| o.discard = discard);
        let op = Op::WriteZeroes { may_unmap: unmap, no_fallback: false, fua: false };
        disk.rig.op(op, 0, 4096).unwrap();
        match disk.log()[..] {
            [SimOp::Fallocate { mode, .. }] => mode & libc::FALLOC_FL_PUNCH_HOLE != 0,
            ref log => panic!("{log:?}"),
        }
    };
    assert!(modes(true, Discard::Unmap));
    assert!(!modes(false, Discard::Unmap));
    assert!(!modes(true, Discard::Ignore));
}

#[test]
fn written_zeroes_are_detected() {
    for (detect, mode) in [
        (DetectZeroes::On, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
        (DetectZeroes::Unmap, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
    ] {
        let mut disk = Disk::new("detect", |o| o.detect_zeroes = detect);
        disk.rig.write(0, &[0; 4096], 0).unwrap();
        let log = disk.log();
        assert!(
            matches!(log[..], [SimOp::Fallocate { mode: found, .. }] if found == mode),
            "{log:?}"
        );
        disk.rig.write(0, &[&[0; 4095][..], &[1]].concat(), 0).unwrap();
        let log = disk.log();
        assert!(matches!(log[..], [SimOp::Write { .. }]), "{log:?}");
    }
}

#[test]
fn a_write_to_a_block_waits_for_a_read_modify_write_of_it() {
    let mut disk = Disk::new("turns", |o| o.cache.direct = true);
    disk.script(|op| if is_write(op) { Verdict::Hold } else { Verdict::Good });
    let first = disk.rig.submit(WRITE, 0, 512, filled(&[1; 512], 0));
    let second = disk.rig.submit(WRITE, 512, 512, filled(&[2; 512], 0));
    let whole = disk.rig.submit(WRITE, 4096, 4096, filled(&[3; 4096], 0));
    let discard = disk.rig.submit(Op::Discard, 0, 8192, IoBufs::new());
    // Without waiting: what is held would be waited for, for ever.
    for _ in 0..100 {
        disk.sim.advance(1_000_000);
        disk.rig.event_loop.run_once(false).unwrap();
    }
    let log = disk.log.borrow().clone();
    assert!(
        matches!(
            log[..],
            [
                SimOp::Read { offset: 0, len: 4096 },
                SimOp::Write { offset: 4096, .. },
                SimOp::Write { offset: 0, len: 4096, .. }
            ] | [
                SimOp::Write { offset: 4096, .. },
                SimOp::Read { offset: 0, len: 4096 },
                SimOp::Write { offset: 0, len: 4096, .. }
            ]
        ),
        "the second and the discard wait: {log:?}"
    );
    disk.script(|_| Verdict::Good);
    assert_eq!(disk.sim.release(), 2);
    for tag in [first, second, whole, discard] {
        assert_eq!(disk.rig.wait(tag).0, Ok(()));
    }
    let mut want = pattern(LEN);
    want[..8192].fill(0);
    assert!(disk.image.contents() == want);
}

#[test]
fn turns_are_taken_across_loops() {
    let image = TempFile::new(&tmpfs(), "loops", LEN);
    let mut options = blockdev("disk", file(&image.0, Some(Aio::IoUring)));
    options.cache.direct = true;
    let node = NodeRegistry::new().open(&options).unwrap();
    // Each thread writes its own sectors of the same blocks.
    std::thread::scope(|scope| {
        for nth in 0..4u64 {
            let node = node.clone();
            scope.spawn(move || {
                let mut rig = Rig::new(node);
                for round in 1..=8u8 {
                    let tags: Vec<u32> = (0..LEN as u64 / 2048)
                        .map(|block| {
                            let data = filled(&[round * 4 + nth as u8; 512], 0);
                            rig.submit(WRITE, block * 2048 + nth * 512, 512, data)
                        })
                        .collect();
                    for tag in tags {
                        assert_eq!(rig.wait(tag).0, Ok(()));
                    }
                }
            });
        }
    });
    let found = image.contents();
    for (sector, bytes) in found.chunks(512).enumerate() {
        assert_eq!(bytes, [32 + (sector % 4) as u8; 512], "sector {sector}");
    }
}

#[test]
fn bounce_buffers_are_shared_when_there_are_not_enough() {
    let mut disk = Disk::new("bounce", |o| o.cache.direct = true);
    let tags: Vec<u32> =
        (0..100).map(|_| disk.rig.submit(Op::Read, 0, LEN as u64, memory(LEN, 8))).collect();
    for tag in tags {
        let (result, bufs) = disk.rig.wait(tag);
        assert_eq!(result, Ok(()));
        assert!(bytes(&bufs) == pattern(LEN));
    }
    assert_eq!(disk.sim.max_in_flight(), 32);
}
