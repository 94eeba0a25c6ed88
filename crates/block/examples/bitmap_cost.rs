//! What a dirty bitmap adds to a write: nanoseconds per write to a `null-co` node, without and with bitmaps.

use std::hint::black_box;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use block::NodeRegistry;
use block::node::Channel;
use block::options::{BlockdevOptions, Driver, NullOptions};
use block::request::{Op, Request, RequestOwner};
use block::track::{DirtyBitmap, Storage};
use event_loop::{EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;

const SIZE: u64 = 4 << 30;
const WRITES: u64 = 200_000;
const ROUNDS: usize = 200;

struct Ignored;

impl RequestOwner for Ignored {
    fn complete(&self, _tag: u32, result: Result<(), Errno>, _bufs: IoBufs) {
        black_box(result).expect("null-co writes");
    }
}

/// Nanoseconds per write, the least of many short rounds: what else runs on the machine adds to the others. `block`: bytes of a write.
fn measure(channel: &Rc<dyn Channel>, block: u64) -> f64 {
    let completion: Rc<dyn RequestOwner> = Rc::new(Ignored);
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let mut state = 1u64;
        let begun = Instant::now();
        for _ in 0..WRITES {
            // A linear congruential generator, whose upper bits choose a block.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let offset = (state >> 33) % (SIZE / block) * block;
            let op = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
            channel.submit(Request::new(op, offset, block, IoBufs::new(), &completion, 0));
        }
        best = best.min(begun.elapsed().as_nanos() as f64 / WRITES as f64);
    }
    best
}

fn main() {
    let event_loop = EventLoop::new(LoopConfig::default()).expect("a loop");
    let null = NullOptions { size: SIZE, latency_ns: 0, read_zeroes: false };
    let mut nodes = NodeRegistry::new();
    let options = BlockdevOptions::new(Some("disk"), Driver::null_co(null));
    let node = nodes.open(&options).expect("a node");
    let bare =
        measure(&nodes.node("disk").expect("it").open_channel(&event_loop).expect("one"), 4096);
    println!("not watched           {bare:6.1} ns per write");
    let (nodes, tracking) = event_loop
        .block_on(async move {
            let tracking = nodes.track("disk").await.expect("it is watched");
            (nodes, tracking)
        })
        .expect("the loop turns");
    let mut before = None;
    for count in 0..=4 {
        if count > 0 {
            let name = format!("b{count}");
            let bitmap = DirtyBitmap::new(name, SIZE, 65536, true, Storage::Memory);
            tracking.add_bitmap(Arc::new(bitmap));
        }
        let tracked = nodes.node("disk").expect("it");
        let channel = tracked.open_channel(&event_loop).expect("a channel");
        let ns = measure(&channel, 4096);
        let more = before.map_or(ns - bare, |before: f64| ns - before);
        println!("watched, {count} bitmaps    {ns:6.1} ns per write, {more:+.1}");
        before = Some(ns);
    }
    drop(node);
}
