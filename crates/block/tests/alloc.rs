//! Heap allocations per request in steady state: none.

use crate::common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::NodeRegistry;
use block::node::Channel;
use block::options::*;
use block::request::{Op, Request, RequestOwner};
use common::*;
use event_loop::counting;
use event_loop::{EventLoop, IoBufs, LoopConfig};
use nix::errno::Errno;

/// Sends each request anew as soon as it is answered, with the memory that came back.
struct Client {
    me: RefCell<Option<Rc<dyn RequestOwner>>>,
    channel: Rc<dyn Channel>,
    ops: Vec<Op>,
    offset: u64,
    left: Cell<u32>,
    in_flight: Cell<u32>,
    /// Answers wait here, so that null-co's do not recurse.
    back: RefCell<Vec<(u32, IoBufs)>>,
}

const LEN: u64 = 4096;

impl RequestOwner for Client {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        assert_eq!(result, Ok(()));
        assert_eq!(bufs.len() as u64, LEN);
        self.in_flight.set(self.in_flight.get() - 1);
        self.back.borrow_mut().push((tag, bufs));
    }
}

impl Client {
    fn run(&self, event_loop: &EventLoop, requests: u32) {
        let me = self.me.borrow().clone().unwrap();
        self.left.set(requests);
        loop {
            while self.left.get() > 0
                && let Some((tag, bufs)) = self.pop()
            {
                let left = self.left.get() - 1;
                self.left.set(left);
                self.in_flight.set(self.in_flight.get() + 1);
                let op = self.ops[left as usize % self.ops.len()];
                let offset = self.offset + u64::from(tag) * LEN;
                self.channel.submit(Request::new(op, offset, LEN, bufs, &me, tag));
            }
            if self.left.get() == 0 && self.in_flight.get() == 0 {
                return;
            }
            if self.in_flight.get() > 0 {
                event_loop.run_once(true).unwrap();
            }
        }
    }

    fn pop(&self) -> Option<(u32, IoBufs)> {
        self.back.borrow_mut().pop()
    }
}

/// Allocations on this thread during 20,000 requests, 32 at a time, after as many to warm up.
fn allocations(options: &BlockdevOptions, ops: &[Op], offset: u64, lead: usize) -> u64 {
    let node = NodeRegistry::new().open(options).unwrap();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let client = Rc::new(Client {
        me: RefCell::new(None),
        channel: node.open_channel(&event_loop).unwrap(),
        ops: ops.to_vec(),
        offset,
        left: Cell::new(0),
        in_flight: Cell::new(0),
        back: RefCell::new((0..32).map(|tag| (tag, memory(LEN as usize, lead))).collect()),
    });
    *client.me.borrow_mut() = Some(client.clone());
    client.run(&event_loop, 20_000);
    let before = counting::allocations();
    client.run(&event_loop, 20_000);
    let count = counting::allocations() - before;
    client.me.take();
    drop(client);
    event_loop.shut_down().unwrap();
    count
}

const READ_WRITE: [Op; 3] = [Op::Read, Op::Write { fua: false }, Op::Read];

#[test]
fn null() {
    let null = NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: false };
    assert_eq!(allocations(&blockdev("n", Driver::null_co(null)), &READ_WRITE, 0, 0), 0);
    assert_eq!(allocations(&blockdev("n", Driver::null_aio(null)), &READ_WRITE, 0, 0), 0);
    let slow = NullOptions { latency_ns: 1000, ..null };
    assert_eq!(allocations(&blockdev("n", Driver::null_co(slow)), &READ_WRITE, 0, 0), 0);
}

#[test]
fn file_over_io_uring() {
    let image = TempFile::new(&disk(), "alloc", 1 << 20);
    let mut options = blockdev("disk", file(&image.0, Some(Aio::IoUring)));
    assert_eq!(allocations(&options, &READ_WRITE, 0, 0), 0, "buffered");
    options.cache.direct = true;
    assert_eq!(allocations(&options, &READ_WRITE, 0, 0), 0, "direct");
    assert_eq!(allocations(&options, &READ_WRITE, 0, 8), 0, "bounced");
}

#[test]
fn file_over_linux_aio() {
    let image = TempFile::new(&disk(), "alloc-native", 1 << 20);
    let mut options = blockdev("disk", file(&image.0, Some(Aio::Native)));
    options.cache.direct = true;
    assert_eq!(allocations(&options, &READ_WRITE, 0, 0), 0, "direct");
    assert_eq!(allocations(&options, &READ_WRITE, 0, 8), 0, "bounced");
}

#[test]
fn partition_of_a_file() {
    let image = TempFile::new(&disk(), "alloc-raw", 1 << 20);
    let raw = RawOptions {
        file: BlockdevRef::Inline(Box::new(blockdev("disk", file(&image.0, None)))),
        offset: 4096,
        size: None,
        keep_raw: false,
    };
    assert_eq!(allocations(&blockdev("part", Driver::from(raw)), &READ_WRITE, 0, 0), 0);
}

/// The counter counts: what the tests above rely on.
#[test]
fn an_allocation_is_counted() {
    let before = counting::allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(counting::allocations() - before, 1);
}

#[test]
fn nbd() {
    let server = common::nbd::NbdServer::nbdkit(&["memory", "1M"]);
    assert_eq!(allocations(&server.node(), &READ_WRITE, 0, 0), 0, "structured replies");
    let server = common::nbd::NbdServer::nbdkit(&["--no-sr", "memory", "1M"]);
    assert_eq!(allocations(&server.node(), &READ_WRITE, 0, 0), 0, "simple replies");
}
