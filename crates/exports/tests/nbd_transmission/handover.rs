//! Clients are paused and handed over to another server.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, ErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use block::node::{BlockNode, Channel, Geometry, Watcher};
use block::options::*;
use block::request::{Op, Request};
use event_loop::EventLoop;
use event_loop::ring::setup::RingChoice;
use exports::nbd::SavedClient;

use crate::nbd_transmission::rig::*;

/// How long anything may take that happens at all.
const PATIENCE: Duration = Duration::from_secs(60);

impl Rig {
    fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Rc<Cell<Option<T>>> {
        let done = Rc::new(Cell::new(None));
        let to = done.clone();
        self.event_loop.spawn(async move { to.set(Some(future.await)) });
        done
    }

    fn pause(&self) -> Vec<SavedClient> {
        let paused = self.spawn(self.export.pause(true));
        let begun = Instant::now();
        loop {
            if let Some(saved) = paused.take() {
                return saved.expect("a pause");
            }
            assert!(begun.elapsed() < PATIENCE, "requests are still under way");
            self.turn();
        }
    }

    fn turn_often(&self) {
        (0..100).for_each(|_| self.turn());
    }
}

fn null_of(size: u64) -> Arc<dyn BlockNode> {
    blockdev(Driver::null_co(NullOptions { size, latency_ns: 0, read_zeroes: false }), false)
}

/// Holds back whatever comes, for ever, unless it is drained.
#[derive(Default)]
struct HoldsBack {
    held: AtomicU32,
    drains: AtomicU32,
}

struct HoldsBackChannel(Arc<HoldsBack>, RefCell<Vec<Request>>);

impl BlockNode for HoldsBack {
    fn name(&self) -> &str {
        "disk"
    }

    fn geometry(&self) -> Geometry {
        null().geometry()
    }

    fn watch(&self, _watcher: Watcher) {}

    fn open_channel(self: Arc<Self>, _event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        Ok(Rc::new(HoldsBackChannel(self, RefCell::default())))
    }
}

impl Channel for HoldsBackChannel {
    fn submit(&self, request: Request) {
        if matches!(request.op, Op::Flush) || self.0.drains.load(Ordering::Relaxed) > 0 {
            return request.complete(Ok(()));
        }
        self.1.borrow_mut().push(request);
        self.0.held.fetch_add(1, Ordering::Relaxed);
    }

    fn in_flight(&self) -> usize {
        self.1.borrow().len()
    }

    fn drain_begin(&self) {
        self.0.drains.fetch_add(1, Ordering::Relaxed);
        self.1.take().into_iter().for_each(|request| request.complete(Ok(())));
    }

    fn drain_end(&self) {
        self.0.drains.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn requests_that_are_held_back_are_let_go() {
    let node = Arc::new(HoldsBack::default());
    let mut rig = Rig::new("held-back", RingChoice::default(), node.clone());
    let take_two = |rig: &mut Rig| {
        node.held.store(0, Ordering::Relaxed);
        rig.send(&[request(READ, 1, 0, 512), request(READ, 2, 512, 512)].concat());
        while node.held.load(Ordering::Relaxed) < 2 {
            rig.turn();
        }
    };
    for _ in 0..2 {
        take_two(&mut rig);
        // Also twice without going on in between.
        assert_eq!(rig.pause().len(), 1);
        assert_eq!(rig.pause().len(), 1);
        assert_eq!(node.drains.load(Ordering::Relaxed), 1);
        rig.export.resume();
        for cookie in [1, 2] {
            rig.takes_reply(cookie);
            rig.take(&mut [0; 512]);
        }
        let begun = Instant::now();
        while node.drains.load(Ordering::Relaxed) > 0 {
            assert!(begun.elapsed() < PATIENCE, "it is still drained");
            rig.turn();
        }
    }
}

#[test]
fn a_connection_with_too_many_bytes_to_hand_over_loses_nothing() {
    const LEN: usize = 32 << 20;
    let mut rig = Rig::new("too-much", RingChoice::default(), null());
    let mut clients = Vec::new();
    for _ in 0..3 {
        rig.send(&request(READ, 1, 0, LEN as u32));
        rig.takes_reply(1);
        let another = rig.connect();
        clients.push(another);
    }
    // All but the third: the last has asked for nothing.
    assert_eq!(rig.pause().len(), 3);
    rig.export.resume();
    for client in clients {
        rig.client = client;
        rig.take(&mut vec![0; LEN]);
        rig.send(&request(READ, 2, 0, 512));
        rig.takes_reply(2);
        rig.take(&mut [0; 512]);
    }
}

/// Reads until the server has closed the connection or `is_over`. Returns the number of bytes.
fn rest(rig: &mut Rig, is_over: impl Fn() -> bool) -> usize {
    let (mut bytes, mut part) = (0, vec![0; 1 << 20]);
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < PATIENCE, "nothing more comes");
        // Checked before the read, so that bytes sent before the end are still read.
        let over = is_over();
        match rig.client.read(&mut part) {
            Ok(0) => return bytes,
            Ok(count) => bytes += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock && over => return bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => rig.turn(),
            Err(error) => panic!("receiving: {error}"),
        }
    }
}

#[test]
fn a_disconnecting_client_gets_its_replies() {
    const DISCONNECT: u8 = 2;
    const LEN: usize = 1 << 20;
    let mut rig = Rig::new("good-bye", RingChoice::default(), null());
    let mut message = Vec::new();
    for cookie in 0..4 {
        message.extend(request(READ, cookie, 0, LEN as u32));
    }
    message.extend(request(DISCONNECT, 0, 0, 0));
    rig.send(&message);
    rig.takes_reply(0);
    rig.turn_often();
    assert_eq!(rig.pause().len(), 0, "it is not to be handed over");
    let parted = Rc::new(Cell::new(false));
    let (part, tell) = (rig.export.disconnect_clients(), parted.clone());
    rig.event_loop.spawn(async move {
        part.await;
        tell.set(true);
    });
    assert_eq!(rest(&mut rig, || parted.get()), 4 * LEN + 3 * 16);
}

/// The image has grown meanwhile, so that it would be allowed now.
#[test]
fn a_write_that_was_refused_stays_refused() {
    const SIZE: u64 = 1 << 20;
    const NO_SPC: u8 = 28;
    const INVAL: u8 = 22;
    for (case, offset, flags, error) in [("beyond", SIZE, 0, NO_SPC), ("flags", 0, 4, INVAL)] {
        let mut before = Rig::new(&format!("{case}-1"), RingChoice::default(), null_of(SIZE));
        let mut after = Rig::new(&format!("{case}-2"), RingChoice::default(), null_of(4 * SIZE));
        let mut write = request(WRITE, 2, offset, 4096);
        write[5] = flags;
        before.send(&[&request(READ, 1, 0, 512)[..], &write, &[1; 1000]].concat());
        before.takes_reply(1);
        before.take(&mut [0; 512]);
        let saved = before.pause();
        assert_eq!(saved.len(), 1);
        after.export.begin(saved);
        std::mem::swap(&mut before.client, &mut after.client);
        after.send(&[1; 3096]);
        let mut reply = [0; 16];
        after.take(&mut reply);
        let mut expected = done(2);
        expected[7] = error;
        assert_eq!(reply, expected, "{case}");
        after.send(&request(READ, 3, 0, 512));
        after.takes_reply(3);
    }
}

#[test]
fn clients_that_connect_during_a_handover_are_served_by_the_next_process() {
    let rig = Rig::new("backlog", RingChoice::default(), null());
    let _client = UnixStream::connect_addr(&rig.address).unwrap();
    let (socket, _) = rig.server.hand_over().unwrap().remove(0);
    rig.turn_often();
    let listener = UnixListener::from(socket);
    listener.accept().expect("the client is still to be accepted");
}
