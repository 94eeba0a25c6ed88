//! Nodes that keep to the limits of a throttle group: over simulated time, and by threads.

use crate::common;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::*;
use block::request::{Op, Request, RequestOwner};
use block::throttle::{Limit, ThrottleGroup, ThrottleLimits};
use common::*;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{EventLoop, IoBufs, IoThread, IoThreadConfig, LoopConfig, oneshot};
use nix::errno::Errno;

const MS: u64 = 1_000_000;

fn iops(average: u64) -> ThrottleLimits {
    let iops_total = Limit { average, ..Limit::default() };
    ThrottleLimits { iops_total, ..ThrottleLimits::default() }
}

/// Null disks, `names`, each at the pace of the same group.
fn nodes(limits: ThrottleLimits, names: &[&str]) -> (Arc<ThrottleGroup>, Vec<Arc<dyn BlockNode>>) {
    let group = ThrottleGroup::new(limits).unwrap();
    let mut registry = NodeRegistry::new();
    registry.add_throttle_group("group", group.clone());
    let open = |name: &&str| {
        let null = NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: false };
        let file = BlockdevRef::Inline(Box::new(BlockdevOptions {
            node_name: None,
            ..blockdev(name, Driver::null_co(null))
        }));
        let throttle = ThrottleOptions { throttle_group: "group".into(), file };
        registry.open(&blockdev(name, Driver::from(throttle))).unwrap()
    };
    (group, names.iter().map(open).collect())
}

/// A node on a loop whose time is simulated.
fn rig(limits: ThrottleLimits) -> (Sim, Arc<ThrottleGroup>, Rig) {
    let sim = Sim::new(1, Faults::default());
    let (group, mut nodes) = nodes(limits, &["node"]);
    let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
    (sim, group, Rig::on(event_loop, nodes.remove(0)))
}

fn read(rig: &mut Rig) -> u32 {
    rig.submit(Op::Read, 0, 512, memory(512, 0))
}

#[test]
fn requests_wait_for_their_turn_and_no_longer() {
    let (sim, group, mut rig) = rig(iops(1000));
    let began = sim.now_ns();
    let tags: Vec<_> = (0..500).map(|_| read(&mut rig)).collect();
    let at_once = tags.iter().filter(|tag| rig.answer(**tag).is_some()).count();
    assert_eq!(at_once, 101, "what 100 ms are worth, and the one that fills the bucket");
    assert_eq!(group.held_requests(), 500 - 101);
    for (n, tag) in (101..).zip(&tags[101..]) {
        assert_eq!(rig.wait(*tag).0, Ok(()));
        let waited = sim.now_ns() - began;
        assert!(waited.abs_diff((n - 100) * MS) <= MS / 10, "request {n} after {waited} ns");
    }
}

#[test]
fn limits_that_change_count_at_once() {
    let (sim, group, mut rig) = rig(iops(1));
    let tags: Vec<_> = (0..5).map(|_| read(&mut rig)).collect();
    assert!(rig.answer(tags[0]).is_some() && rig.answer(tags[1]).is_none());
    let before = sim.now_ns();
    group.set_limits(iops(1000)).unwrap();
    for tag in &tags[1..] {
        assert_eq!(rig.wait(*tag).0, Ok(()));
    }
    assert!(sim.now_ns() - before < 10 * MS);
    assert_eq!(group.limits(), iops(1000));
    // None at all, while something waits.
    group.set_limits(iops(1)).unwrap();
    rig.event_loop.run_once(false).unwrap();
    let tags: Vec<_> = (0..5).map(|_| read(&mut rig)).collect();
    group.set_limits(ThrottleLimits::default()).unwrap();
    for tag in &tags {
        assert!(rig.answer(*tag).is_some() || rig.wait(*tag).0.is_ok());
    }
    let senseless = ThrottleLimits { iops_size: 1, ..ThrottleLimits::default() };
    group.set_limits(senseless).unwrap_err();
    assert_eq!(group.limits(), ThrottleLimits::default());
}

#[test]
fn a_drain_releases_throttled_requests() {
    let (sim, _group, mut rig) = rig(iops(1));
    let tags: Vec<_> = (0..100).map(|_| read(&mut rig)).collect();
    let before = sim.now_ns();
    assert_eq!(rig.channel.in_flight(), 99);
    rig.channel.drain_begin();
    assert_eq!(rig.channel.in_flight(), 0);
    assert!(tags.iter().all(|tag| rig.answer(*tag).is_some()));
    let meanwhile = read(&mut rig);
    assert!(rig.answer(meanwhile).is_some());
    assert_eq!(sim.now_ns(), before);
    rig.channel.drain_end();
    // It was counted all the same.
    let after = read(&mut rig);
    assert!(rig.answer(after).is_none());
    assert_eq!(rig.wait(after).0, Ok(()));
    assert!(sim.now_ns() - before > 99_000 * MS);
}

#[test]
fn the_end_of_a_loop_answers_throttled_requests() {
    let (_sim, _group, mut rig) = rig(iops(1));
    let tags: Vec<_> = (0..10).map(|_| read(&mut rig)).collect();
    rig.event_loop.shut_down().unwrap();
    let ended = tags.iter().filter_map(|tag| rig.answer(*tag));
    let cancelled = ended.filter(|answer| answer.0 == Err(Errno::ECANCELED)).count();
    assert_eq!(cancelled, 9);
}

#[test]
fn writes_and_flushes_do_not_wait_for_reads_and_block_status_does() {
    let one = Limit { average: 1, ..Limit::default() };
    let (_sim, _group, mut rig) = rig(ThrottleLimits { iops_read: one, ..Default::default() });
    let reads: Vec<_> = (0..3).map(|_| read(&mut rig)).collect();
    assert!(rig.answer(reads[2]).is_none());
    for op in [Op::Flush, Op::Discard, Op::Write { fua: false }] {
        let len = if op == Op::Flush { 0 } else { 512 };
        let bufs = if len > 0 && op != Op::Discard { memory(512, 0) } else { IoBufs::new() };
        let tag = rig.submit(op, 0, len, bufs);
        assert_eq!(rig.answer(tag).unwrap().0, Ok(()), "{op:?}");
    }
    let tag = rig.submit(Op::BlockStatus, 0, 4096, memory(64, 0));
    assert!(rig.answer(tag).is_none());
    rig.channel.drain_begin();
    assert!(rig.answer(tag).is_some());
}

#[test]
fn requests_without_bytes_are_operations_of_no_bytes() {
    let one = |average| Limit { average, ..Limit::default() };
    let zeroes = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
    for (op, len, room) in
        [(Op::BlockStatus, 1 << 30, 64), (Op::Read, 0, 0), (Op::Flush, 0, 0), (zeroes, 0, 0)]
    {
        let limits =
            ThrottleLimits { iops_total: one(100), bps_total: one(1 << 20), ..Default::default() };
        let (sim, _group, mut rig) = rig(limits);
        let began = sim.now_ns();
        let memory = |room| if room == 0 { IoBufs::new() } else { memory(room, 0) };
        let tags: Vec<_> = (0..111).map(|_| rig.submit(op, 0, len, memory(room))).collect();
        for tag in tags {
            assert_eq!(rig.wait(tag).0, Ok(()), "{op:?}");
        }
        // 11 at once, then one each 10 ms: the bytes of the range do not count.
        let waited = sim.now_ns() - began;
        assert!(waited.abs_diff(1000 * MS) <= 10 * MS, "{op:?}: {waited} ns");
    }
}

/// An export that ends has released what its user sent, and the group's debt remains. It flushes at once all the same.
#[test]
fn the_flush_of_an_export_that_ends_does_not_wait() {
    let (sim, _group, mut rig) = rig(iops(1));
    let tags: Vec<_> = (0..100).map(|_| read(&mut rig)).collect();
    rig.channel.drain_begin();
    rig.channel.drain_end();
    assert!(tags.iter().all(|tag| rig.answer(*tag).is_some()));
    let flushed = rig.submit(Op::Flush, 0, 0, IoBufs::new());
    assert!(rig.answer(flushed).is_none(), "the user's flush waits");
    let (done, is_done) = (Rc::new(std::cell::Cell::new(None)), sim.now_ns());
    let of_export = done.clone();
    let channels = [rig.channel.clone()];
    block::flush::flush(channels.iter(), Box::new(move |result| of_export.set(Some(result))));
    assert_eq!((done.get(), sim.now_ns()), (Some(Ok(())), is_done));
    let after = rig.submit(Op::Flush, 0, 0, IoBufs::new());
    assert!(rig.answer(after).is_none(), "limits are in force again");
}

/// Requests that each sends.
const DEPTH: u32 = 8;

/// Sends each request anew as soon as it is answered, until so many were; then waits for the last.
struct Greedy {
    done: Arc<AtomicU64>,
    wanted: u64,
    in_flight: std::cell::Cell<u32>,
    me: std::cell::RefCell<Option<Rc<dyn RequestOwner>>>,
    channel: Rc<dyn block::node::Channel>,
    event_loop: EventLoop,
    finished: std::cell::Cell<Option<oneshot::Sender<()>>>,
}

impl RequestOwner for Greedy {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        assert_eq!(result, Ok(()));
        if self.done.fetch_add(1, Ordering::Relaxed) + 1 >= self.wanted {
            self.in_flight.update(|requests| requests - 1);
            if self.in_flight.get() == 0 {
                self.me.take();
                if let Some(finished) = self.finished.take() {
                    finished.send(());
                }
            }
            return;
        }
        // Not from within the answer: null-co answers at once.
        let (me, channel) = (self.me.borrow().clone(), self.channel.clone());
        let Some(me) = me else { return };
        self.event_loop.spawn(async move {
            channel.submit(Request::new(Op::Read, 0, 512, bufs, &me, tag));
        });
    }
}

#[test]
fn threads_keep_to_a_limit_together() {
    const RATE: u64 = 2000;
    const WANTED: u64 = 1000;
    let (_group, nodes) = nodes(iops(RATE), &["one", "other"]);
    let threads: Vec<_> =
        (0..4).map(|_| IoThread::spawn(IoThreadConfig::default()).unwrap()).collect();
    let done = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let mut ends = Vec::new();
    for (i, thread) in threads.iter().enumerate() {
        let (node, done) = (nodes[i % 2].clone(), done.clone());
        let (finished, end) = oneshot::channel();
        ends.push(end);
        thread
            .handle()
            .spawn(move |event_loop| {
                let client = Rc::new(Greedy {
                    done,
                    wanted: WANTED,
                    in_flight: std::cell::Cell::new(DEPTH),
                    me: std::cell::RefCell::default(),
                    channel: node.open_channel(event_loop).unwrap(),
                    event_loop: event_loop.clone(),
                    finished: std::cell::Cell::new(Some(finished)),
                });
                let me = client.clone() as Rc<dyn RequestOwner>;
                client.me.replace(Some(me.clone()));
                for tag in 0..DEPTH {
                    client.channel.submit(Request::new(Op::Read, 0, 512, memory(512, 0), &me, tag));
                }
            })
            .unwrap();
    }
    let waiting = EventLoop::new(LoopConfig::default()).unwrap();
    waiting
        .block_on(async {
            for end in ends {
                end.await.unwrap();
            }
        })
        .unwrap();
    // No less than it takes at that rate, after what may come at once. More is the machine's affair.
    let least = Duration::from_nanos((WANTED - RATE / 10 - 2) * 1_000_000_000 / RATE);
    assert!(began.elapsed() >= least, "{:?}, {least:?} at least", began.elapsed());
}
