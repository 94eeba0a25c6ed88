//! Requests that continue each other are one operation, and are answered as if they were not.

use crate::common;

use std::cell::RefCell;
use std::rc::Rc;

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::*;
use event_loop::ring::sim::{Faults, Sim, SimOp, Verdict};
use event_loop::{IoBufs, LoopConfig};
use nix::errno::Errno;
use nix::libc;

const LEN: usize = 1 << 20;
const BLOCK: usize = 4096;

struct Disk {
    rig: Rig,
    image: TempFile,
    log: Rc<RefCell<Vec<SimOp>>>,
    arena: Arena,
}

impl Disk {
    fn new(name: &str, verdict: impl Fn(&SimOp) -> Verdict + 'static) -> Disk {
        let image = TempFile::new(&tmpfs(), name, LEN);
        let options = blockdev("disk", file(&image.0, Some(Aio::IoUring)));
        let sim = Sim::new(1, Faults::default());
        let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
        let log = Rc::<RefCell<Vec<SimOp>>>::default();
        let to = log.clone();
        sim.script(move |op| {
            to.borrow_mut().push(*op);
            verdict(op)
        });
        let rig = Rig::on(event_loop, NodeRegistry::new().open(&options).unwrap());
        Disk { rig, image, log, arena: Arena::new(4 * LEN) }
    }

    /// Submits in one section, waits for all answers; they are all good.
    fn all(&mut self, requests: Vec<(Op, usize, IoBufs)>) -> Vec<IoBufs> {
        let event_loop = self.rig.event_loop.clone();
        let tags: Vec<u32> = event_loop.section(|| {
            let submit = |(op, offset, bufs): (Op, usize, IoBufs)| {
                let len = bufs.len() as u64;
                self.rig.submit(op, offset as u64, len, bufs)
            };
            requests.into_iter().map(submit).collect()
        });
        let answer = |tag| {
            let (result, bufs) = self.rig.wait(tag);
            assert_eq!(result, Ok(()));
            bufs
        };
        tags.into_iter().map(answer).collect()
    }

    /// Offset and length of each read and write since the last time.
    fn transfers(&self) -> Vec<(u64, u64)> {
        let range = |op: &SimOp| match *op {
            SimOp::Read { offset, len } | SimOp::Write { offset, len, .. } => Some((offset, len)),
            // Of a durable write.
            SimOp::Fsync => None,
            _ => panic!("{op:?}"),
        };
        self.log.take().iter().filter_map(range).collect()
    }
}

const WRITE: Op = Op::Write { fua: false };
const FUA: Op = Op::Write { fua: true };

#[test]
fn requests_that_continue_each_other_are_one_operation() {
    let mut disk = Disk::new("merge-one", |_| Verdict::Good);
    let blocks = [8, 1, 3, 4];
    let mut at = BLOCK;
    let mut reads = Vec::new();
    for blocks in blocks {
        // A page between them, so that it takes several segments.
        reads.push((Op::Read, at, disk.arena.take(blocks * BLOCK, 0)));
        disk.arena.take(1, 0);
        at += blocks * BLOCK;
    }
    let answers = disk.all(reads);
    assert_eq!(disk.transfers(), [(BLOCK as u64, 16 * BLOCK as u64)]);
    let read: Vec<u8> = answers.iter().flat_map(bytes).collect();
    assert!(read == pattern(LEN)[BLOCK..17 * BLOCK]);
    let writes =
        (0..4).map(|n| (WRITE, n * BLOCK, disk.arena.filled(&[n as u8 + 1; BLOCK], 0))).collect();
    let answers = disk.all(writes);
    assert_eq!(disk.transfers(), [(0, 4 * BLOCK as u64)]);
    assert!(answers.iter().all(|bufs| bufs.len() == BLOCK), "each gets its own memory back");
    let want: Vec<u8> = (1..=4).flat_map(|n| [n; BLOCK]).collect();
    assert!(disk.image.contents()[..4 * BLOCK] == want);
}

#[test]
fn nonadjacent_requests_are_not_merged() {
    let mut disk = Disk::new("merge-not", |_| Verdict::Good);
    let block = |disk: &mut Disk| disk.arena.filled(&[9; BLOCK], 0);
    let (a, b, c, d, e) =
        (block(&mut disk), block(&mut disk), block(&mut disk), block(&mut disk), memory(BLOCK, 0));
    // Another direction, durability, a gap, backwards, another owner's memory.
    let requests = vec![
        (Op::Read, 0, a),
        (WRITE, BLOCK, b),
        (FUA, 2 * BLOCK, c),
        (WRITE, 4 * BLOCK, d),
        (WRITE, 5 * BLOCK, e),
    ];
    disk.all(requests);
    let block = BLOCK as u64;
    let alone = [0, 1, 2, 4, 5].map(|n| (n * block, block));
    let mut transfers = disk.transfers();
    // A durable one waits for no other.
    transfers.sort_unstable();
    assert_eq!(transfers, alone);
    let backwards =
        (0..3).rev().map(|n| (Op::Read, n * BLOCK, disk.arena.take(BLOCK, 0))).collect();
    disk.all(backwards);
    assert_eq!(disk.transfers().len(), 3);
    // Outside a section there is nothing to wait for.
    let bufs = disk.arena.take(BLOCK, 0);
    let first = disk.rig.submit(Op::Read, 0, block, bufs);
    let bufs = disk.arena.take(BLOCK, 0);
    let second = disk.rig.submit(Op::Read, block, block, bufs);
    assert_eq!((disk.rig.wait(first).0, disk.rig.wait(second).0), (Ok(()), Ok(())));
    assert_eq!(disk.transfers(), [(0, block), (block, block)]);
}

#[test]
fn an_operation_has_its_limits() {
    let mut disk = Disk::new("merge-limit", |_| Verdict::Good);
    let reads =
        (0..LEN / BLOCK).map(|n| (Op::Read, n * BLOCK, disk.arena.take(BLOCK, 0))).collect();
    let answers = disk.all(reads);
    let quarter = LEN as u64 / 4;
    assert_eq!(disk.transfers(), [0, 1, 2, 3].map(|n| (n * quarter, quarter)));
    assert!(answers.iter().flat_map(bytes).eq(pattern(LEN)));
}

#[test]
fn after_a_short_operation_each_request_continues_separately() {
    for verdict in [
        Verdict::Fail(libc::EIO),
        Verdict::Fail(libc::EAGAIN),
        Verdict::Short(0),
        Verdict::Short(5000),
        Verdict::Short(8192),
    ] {
        for op in [Op::Read, WRITE] {
            let large = move |op: &SimOp| match *op {
                SimOp::Read { len, .. } | SimOp::Write { len, .. } => len > BLOCK as u64,
                _ => false,
            };
            let mut disk =
                Disk::new("merge-alone", move |op| if large(op) { verdict } else { Verdict::Good });
            let requests =
                (0..3).map(|n| (op, n * BLOCK, disk.arena.filled(&[5; BLOCK], 0))).collect();
            let answers = disk.all(requests);
            let block = BLOCK as u64;
            let alone = [0, 1, 2].map(|n| (n * block, block));
            assert_eq!(disk.transfers()[1..], alone, "{verdict:?}");
            let want = if op == Op::Read { pattern(3 * BLOCK) } else { vec![5; 3 * BLOCK] };
            assert!(answers.iter().flat_map(bytes).eq(want.iter().copied()), "{verdict:?}");
            assert!(disk.image.contents()[..3 * BLOCK] == want, "{verdict:?}");
        }
    }
}

#[test]
fn only_the_request_that_is_to_blame_fails() {
    let bad = |op: &SimOp| match *op {
        SimOp::Read { offset, len } => (offset..offset + len).contains(&(BLOCK as u64)),
        _ => false,
    };
    let mut disk =
        Disk::new(
            "merge-bad",
            move |op| if bad(op) { Verdict::Fail(libc::EIO) } else { Verdict::Good },
        );
    let bufs: Vec<_> = (0..3).map(|_| disk.arena.take(BLOCK, 0)).collect();
    let event_loop = disk.rig.event_loop.clone();
    let tags: Vec<u32> = event_loop.section(|| {
        let submit = |(n, bufs)| disk.rig.submit(Op::Read, (n * BLOCK) as u64, BLOCK as u64, bufs);
        bufs.into_iter().enumerate().map(submit).collect()
    });
    let results: Vec<_> = tags.into_iter().map(|tag| disk.rig.wait(tag).0).collect();
    assert_eq!(results, [Ok(()), Err(Errno::EIO), Ok(())]);
}

/// Dropping the channel, or ending the loop, does not wait for requests that are gathered or in flight.
#[test]
fn all_are_answered_when_the_channel_or_the_loop_goes() {
    let three = |disk: &mut Disk, then: fn(&mut Disk)| -> Vec<u32> {
        let bufs: Vec<_> = (0..3).map(|_| disk.arena.take(BLOCK, 0)).collect();
        let event_loop = disk.rig.event_loop.clone();
        event_loop.section(|| {
            let read = |(n, bufs)| disk.rig.submit(Op::Read, (n * BLOCK) as u64, 4096, bufs);
            let tags = bufs.into_iter().enumerate().map(read).collect();
            then(disk);
            tags
        })
    };
    let mut disk = Disk::new("merge-gone", |_| Verdict::Good);
    let tags = three(&mut disk, |disk| {
        let another = Disk::new("merge-other", |_| Verdict::Good).rig.channel;
        disk.rig.channel = another;
    });
    assert!(tags.into_iter().all(|tag| disk.rig.wait(tag).0 == Ok(())));
    assert_eq!(disk.transfers(), [(0, 3 * BLOCK as u64)]);

    let mut disk = Disk::new("merge-stop", |_| Verdict::Hold);
    let tags = three(&mut disk, |_| ());
    disk.rig.event_loop.run_once(false).unwrap();
    disk.rig.event_loop.shut_down().unwrap();
    for tag in tags {
        assert_eq!(disk.rig.answer(tag).map(|answer| answer.0), Some(Err(Errno::ECANCELED)));
    }
}
