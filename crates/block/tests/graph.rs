//! Edges get other nodes while requests are in flight.

use crate::common;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

use block::graph::{Edge, EdgeBusy, drain};
use block::node::{BlockNode, Channel, Geometry};
use block::options::{Aio, BlockdevOptions, Driver, NullOptions};
use block::request::{Op, Request};
use block::{NodeRegistry, submit};
use common::*;
use event_loop::{EventLoop, IoThread, IoThreadConfig, LoopConfig};
use fastrand::Rng;
use nix::errno::Errno;
use proptest::prelude::*;

/// Bytes that each task writes to, and of each request.
const REGION: usize = 64 << 10;
const BLOCK: usize = 4 << 10;
const THREADS: usize = 3;
const TASKS: usize = 4;
const SIZE: usize = THREADS * TASKS * REGION;

/// Shared by all tasks.
struct Load {
    stop: AtomicBool,
    requests: AtomicU64,
}

/// Writes and reads its region until `load.stop`, and checks each read. Returns the expected contents of the region.
async fn work(channel: Rc<dyn Channel>, base: usize, load: Arc<Load>) -> Vec<u8> {
    let mut model = pattern(SIZE)[base..base + REGION].to_vec();
    let mut random = Rng::with_seed(base as u64);
    while !load.stop.load(Ordering::Relaxed) {
        let at = random.usize(..REGION / BLOCK) * BLOCK;
        let offset = (base + at) as u64;
        let expected = &mut model[at..at + BLOCK];
        if random.usize(..2) == 0 {
            expected.fill(random.usize(..256) as u8);
            let op = Op::Write { fua: false };
            let (result, _) = submit(&channel, op, offset, BLOCK as u64, filled(expected, 0)).await;
            assert_eq!(result, Ok(()));
        } else {
            let (result, bufs) =
                submit(&channel, Op::Read, offset, BLOCK as u64, memory(BLOCK, 0)).await;
            assert_eq!(result, Ok(()));
            assert!(bytes(&bufs) == *expected, "what was written before is lost at {offset}");
        }
        load.requests.fetch_add(1, Ordering::Relaxed);
    }
    model
}

/// Opens edge `n % edges` on thread `n` and has tasks work through it. Their models come in any order.
fn start(
    threads: &[IoThread],
    edges: &[Arc<Edge>],
    load: &Arc<Load>,
) -> mpsc::Receiver<(usize, Vec<u8>)> {
    let (models, receiver) = mpsc::channel();
    for (n, thread) in threads.iter().enumerate() {
        let edge = edges[n % edges.len()].clone();
        let (models, load) = (models.clone(), load.clone());
        let begin = move |event_loop: &EventLoop| {
            let channel = edge.open_channel(event_loop).unwrap();
            for task in 0..TASKS {
                let base = (n * TASKS + task) * REGION;
                let (channel, load, models) = (channel.clone(), load.clone(), models.clone());
                event_loop.spawn(async move {
                    let model = work(channel, base, load).await;
                    models.send((base, model)).unwrap();
                });
            }
        };
        thread.handle().spawn(begin).unwrap();
    }
    receiver
}

fn threads() -> Vec<IoThread> {
    (0..THREADS).map(|_| IoThread::spawn(IoThreadConfig::default()).unwrap()).collect()
}

/// Waits until the tasks have done something.
fn let_run(load: &Load) {
    let before = load.requests.load(Ordering::Relaxed);
    while load.requests.load(Ordering::Relaxed) < before + 20 {
        std::thread::yield_now();
    }
}

fn finish(load: &Load, models: mpsc::Receiver<(usize, Vec<u8>)>) -> Vec<u8> {
    load.stop.store(true, Ordering::Relaxed);
    let mut all = vec![0; SIZE];
    for (base, model) in models {
        all[base..base + REGION].copy_from_slice(&model);
    }
    all
}

fn copy(from: &Path, to: &Path) {
    std::fs::write(to, std::fs::read(from).unwrap()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Whatever was written goes along, whatever is read has been written: a disk moves between three
    /// files, through one edge or several, while tasks on three loops use it.
    #[test]
    fn contents_move_with_the_edges(
        moves in prop::collection::vec((1usize..3, any::<bool>()), 1..20),
        edges in 1usize..=THREADS,
        engines in prop::collection::vec(prop_oneof![Just(None), Just(Some(Aio::Threads))], 3),
    ) {
        let images: Vec<_> =
            (0..3).map(|n| TempFile::new(&tmpfs(), &format!("graph-{n}"), SIZE)).collect();
        let mut nodes = NodeRegistry::new();
        let mut all = Vec::new();
        for (n, (image, aio)) in images.iter().zip(engines).enumerate() {
            drop(nodes.open(&blockdev(&format!("n{n}"), file(&image.0, aio))).unwrap());
            all.push(nodes.node(&format!("n{n}")).unwrap());
        }
        let used: Vec<_> = (0..edges).map(|_| Edge::new(all[0].clone())).collect();
        let threads = threads();
        let load = Arc::new(Load { stop: AtomicBool::new(false), requests: AtomicU64::new(0) });
        let models = start(&threads, &used, &load);
        let control = EventLoop::new(LoopConfig::default()).unwrap();
        let mut at = 0;
        for (step, move_it) in moves {
            let_run(&load);
            let to = (at + step) % 3;
            let (edges, node) = (used.clone(), all[to].clone());
            let (from_path, to_path) = (images[at].0.clone(), images[to].0.clone());
            control.block_on(async move {
                let drained = drain(edges).await.unwrap();
                if move_it {
                    copy(&from_path, &to_path);
                    drained.point_to(&node).await.unwrap();
                    // Nobody may write here any more.
                    std::fs::write(&from_path, vec![0xee; SIZE]).unwrap();
                }
            }).unwrap();
            if move_it {
                at = to;
            }
        }
        let_run(&load);
        let expected = finish(&load, models);
        prop_assert!(images[at].contents() == expected);
        drop(threads);
        for edge in used {
            let node = edge.node();
            prop_assert_eq!(node.name(), format!("n{at}"));
        }
    }
}

/// Holds its requests until the test releases them, and fails to open if the test says so.
#[derive(Default)]
struct Gate {
    opens: AtomicBool,
    /// Drains that have begun and not ended, over all channels.
    drains: Arc<AtomicU64>,
}

struct GateChannel(RefCell<VecDeque<Request>>, Arc<AtomicU64>);

impl Gate {
    fn open() -> Arc<Gate> {
        Arc::new(Gate { opens: AtomicBool::new(true), ..Gate::default() })
    }
}

impl BlockNode for Gate {
    fn name(&self) -> &str {
        "gate"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: 1 << 20,
            read_only: false,
            physical_block_size: 512,
            request_alignment: 1,
            discard: false,
            discard_granularity: 512,
            write_zeroes: false,
            write_cache: false,
        }
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        if event_loop.handle().name() == "no" || !self.opens.load(Ordering::Relaxed) {
            return Err(io::Error::from(Errno::ENODEV));
        }
        let channel = Rc::new(GateChannel(RefCell::default(), self.drains.clone()));
        let kept = Rc::downgrade(&channel);
        // Lets one go a millisecond.
        let timer = event_loop.clone();
        event_loop.spawn(async move {
            while let Some(channel) = kept.upgrade() {
                let request = channel.0.borrow_mut().pop_front();
                drop(channel);
                if let Some(request) = request {
                    request.complete(Ok(()));
                }
                timer.sleep_until(timer.now_ns() + 1_000_000).await;
            }
        });
        Ok(channel)
    }
}

impl Channel for GateChannel {
    fn submit(&self, request: Request) {
        self.0.borrow_mut().push_back(request);
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().len()
    }

    fn drain_begin(&self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn drain_end(&self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn a_loop_that_cannot_open_the_new_node_leaves_everything_as_it_was() {
    let image = TempFile::new(&tmpfs(), "graph-back", SIZE);
    let mut nodes = NodeRegistry::new();
    drop(nodes.open(&blockdev("n", file(&image.0, None))).unwrap());
    let edges = [Edge::new(nodes.node("n").unwrap())];
    let mut threads = threads();
    let config = LoopConfig { name: "no".into(), ..LoopConfig::default() };
    let config = IoThreadConfig { event_loop: config, ..IoThreadConfig::default() };
    threads[THREADS - 1] = IoThread::spawn(config).unwrap();
    let load = Arc::new(Load { stop: AtomicBool::new(false), requests: AtomicU64::new(0) });
    let models = start(&threads, &edges, &load);
    let_run(&load);
    let control = EventLoop::new(LoopConfig::default()).unwrap();
    let used = edges.to_vec();
    let failed = control.block_on(async move {
        let drained = drain(used).await.unwrap();
        let node: Arc<dyn BlockNode> = Gate::open();
        drained.point_to(&node).await
    });
    assert_eq!(failed.unwrap().unwrap_err().raw_os_error(), Some(Errno::ENODEV as i32));
    let_run(&load);
    let expected = finish(&load, models);
    assert!(image.contents() == expected);
    assert_eq!(edges[0].node().name(), "n");
}

/// One loop for both planes.
struct OneLoop {
    event_loop: EventLoop,
    edge: Arc<Edge>,
}

impl OneLoop {
    fn new() -> OneLoop {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        OneLoop { event_loop, edge: Edge::new(Gate::open()) }
    }

    fn channel(&self) -> Rc<dyn Channel> {
        self.edge.clone().open_channel(&self.event_loop).unwrap()
    }

    fn block_on<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> T {
        self.event_loop.block_on(future).unwrap()
    }
}

impl Drop for OneLoop {
    fn drop(&mut self) {
        self.event_loop.shut_down().unwrap();
    }
}

async fn flush(channel: Rc<dyn Channel>) -> Result<(), Errno> {
    submit(&channel, Op::Flush, 0, 0, event_loop::IoBufs::new()).await.0
}

#[test]
fn draining_waits_for_earlier_requests_and_holds_later_ones() {
    let all = OneLoop::new();
    let channel = all.channel();
    let before: Vec<_> = (0..5).map(|_| all.event_loop.spawn(flush(channel.clone()))).collect();
    let (edge, event_loop) = (all.edge.clone(), all.event_loop.clone());
    let late = channel.clone();
    all.block_on(async move {
        // So that they are under way.
        event_loop.sleep_until(event_loop.now_ns() + 1).await;
        let drained = drain(vec![edge.clone()]).await.unwrap();
        assert_eq!(late.in_flight(), 0);
        assert_eq!(drain(vec![edge.clone()]).await.err(), Some(EdgeBusy));
        // A channel that is opened now holds as well.
        let new = edge.open_channel(&event_loop).unwrap();
        let held = [event_loop.spawn(flush(late.clone())), event_loop.spawn(flush(new.clone()))];
        event_loop.sleep_until(event_loop.now_ns() + 20_000_000).await;
        assert_eq!((late.in_flight(), new.in_flight()), (1, 1));
        drop(drained);
        for flush in held {
            assert_eq!(flush.await.unwrap(), Ok(()));
        }
    });
    for flush in before {
        assert_eq!(all.block_on(flush).unwrap(), Ok(()));
    }
}

#[test]
fn a_drain_from_above_goes_along_to_another_node() {
    let all = OneLoop::new();
    let (edge, channel) = (all.edge.clone(), all.channel());
    all.block_on(async move {
        let [first, second] = [Gate::open(), Gate::open()];
        let drains = [&first, &second].map(|gate| gate.drains.clone());
        let counts = || drains.each_ref().map(|drains| drains.load(Ordering::Relaxed));
        let nodes: [Arc<dyn BlockNode>; 2] = [first, second];
        drain(vec![edge.clone()]).await.unwrap().point_to(&nodes[0]).await.unwrap();
        channel.drain_begin();
        channel.drain_begin();
        assert_eq!(counts(), [2, 0]);
        drain(vec![edge.clone()]).await.unwrap().point_to(&nodes[1]).await.unwrap();
        assert_eq!(counts(), [0, 2]);
        channel.drain_end();
        assert_eq!(counts(), [0, 1]);
        channel.drain_end();
        assert_eq!(counts(), [0, 0]);
    });
}

#[test]
fn a_dropped_channel_fails_its_held_requests_and_blocks_no_drain() {
    let all = OneLoop::new();
    let (edge, event_loop, channel) = (all.edge.clone(), all.event_loop.clone(), all.channel());
    all.block_on(async move {
        let drained = drain(vec![edge.clone()]).await.unwrap();
        let gone = edge.clone().open_channel(&event_loop).unwrap();
        let answer = Rc::<Answers>::default();
        let to: Rc<dyn block::request::RequestOwner> = answer.clone();
        gone.submit(Request::new(Op::Flush, 0, 0, event_loop::IoBufs::new(), &to, 7));
        drop(gone);
        assert_eq!(answer.0.borrow_mut().remove(&7).unwrap().0, Err(Errno::ECANCELED));
        let node: Arc<dyn BlockNode> = Gate::open();
        drained.point_to(&node).await.unwrap();
        drop(drained);
        assert_eq!(flush(channel).await, Ok(()));
    });
}

#[test]
fn a_stopped_loop_blocks_no_drain() {
    let control = EventLoop::new(LoopConfig::default()).unwrap();
    let edge = Edge::new(Gate::open());
    let thread = IoThread::spawn(IoThreadConfig::default()).unwrap();
    let (opened, is_open) = mpsc::channel();
    let used = edge.clone();
    thread
        .handle()
        .spawn(move |event_loop| {
            let channel = used.open_channel(event_loop).unwrap();
            // As one that is forgotten: it ends with its loop.
            event_loop.spawn(async move {
                std::future::pending::<()>().await;
                drop(channel);
            });
            opened.send(()).unwrap();
        })
        .unwrap();
    is_open.recv().unwrap();
    let drained = drain(vec![edge.clone()]);
    let node: Arc<dyn BlockNode> = Gate::open();
    control
        .block_on(async move {
            let drained = drained.await.unwrap();
            drop(thread);
            drained.point_to(&node).await.unwrap();
        })
        .unwrap();
}

/// Clients may have sent any number of requests meanwhile, and the loop has other users.
#[test]
fn held_requests_go_on_in_parts_and_in_order() {
    const LEN: usize = 256 << 10;
    const COUNT: u32 = 64;
    // As much as an iteration passes on.
    const PART: usize = (1 << 20) / LEN;
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let null = Driver::null_co(NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: false });
    let edge =
        Edge::new(NodeRegistry::new().open(&BlockdevOptions::new(Some("null"), null)).unwrap());
    let channel = edge.clone().open_channel(&event_loop).unwrap();
    let answers = Rc::<Answers>::default();
    let to: Rc<dyn block::request::RequestOwner> = answers.clone();
    let hold = || event_loop.block_on(drain(vec![edge.clone()])).unwrap().unwrap();
    let mut drained = hold();
    for tag in 0..COUNT {
        let bufs = memory(LEN, 0);
        channel.submit(Request::new(Op::Read, 0, LEN as u64, bufs, &to, tag));
    }
    let go_on = |until: usize| {
        let mut known = answers.0.borrow().len();
        while known < until {
            event_loop.run_once(true).unwrap();
            let now = answers.0.borrow().len();
            assert!(now - known <= PART, "{} requests in one iteration", now - known);
            known = now;
        }
    };
    drop(drained);
    go_on(2 * PART);
    // Held again, the others stay; new ones are behind them.
    drained = hold();
    let held = answers.0.borrow().len();
    assert!(held < COUNT as usize);
    channel.submit(Request::new(Op::Read, 0, LEN as u64, memory(LEN, 0), &to, COUNT));
    event_loop.run_once(false).unwrap();
    assert_eq!(answers.0.borrow().len(), held);
    let first = |answers: &Answers| answers.0.borrow().keys().copied().max();
    assert_eq!(first(&answers), Some(held as u32 - 1));
    drop(drained);
    go_on(COUNT as usize + 1);
    drop(channel);
    event_loop.shut_down().unwrap();
}
