//! The NBD server on a loop of the test's own: data over every ring and engine, what a request costs,
//! counted, what is left after a power cut, and how clients are handed over.

mod attaching;
mod durability;
mod handover;
mod own_driver;
mod rig;
mod starttls;

use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::node::BlockNode;
use block::options::*;
use event_loop::counting::{allocations, locks_taken};
use event_loop::ring::setup::{RingChoice, RingFlags};

use crate::nbd_transmission::rig::*;

/// A file that is gone when the test is over.
struct File(PathBuf);

impl File {
    fn new(name: &str, len: usize) -> File {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("nbd-transmission-{}-{name}", std::process::id()));
        std::fs::write(&path, vec![0xee; len]).unwrap();
        File(path)
    }

    fn node(&self, aio: Aio, direct: bool) -> Arc<dyn BlockNode> {
        let (filename, aio) = (self.0.clone(), Some(aio));
        blockdev(Driver::file(FileOptions { filename, aio, locking: Locking::Off }), direct)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Bytes that differ at each place of the file.
fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| (at ^ at >> 8 ^ at >> 16).to_le_bytes()[0]).collect()
}

#[test]
fn data_go_in_and_out_over_every_ring_and_engine() {
    let rings = [
        ("cooperative", RingChoice::Exactly(RingFlags::BEST)),
        ("deferring", RingChoice::Exactly(RingFlags::DEFERRING)),
        ("plain", RingChoice::Exactly(RingFlags::PLAIN)),
        ("epoll", RingChoice::Epoll),
    ];
    for (name, ring) in rings {
        for (aio, direct) in [
            (Aio::IoUring, false),
            (Aio::IoUring, true),
            (Aio::Native, true),
            (Aio::Threads, false),
            (Aio::Threads, true),
        ] {
            if ring == RingChoice::Epoll && aio == Aio::IoUring {
                continue;
            }
            let case = format!("{name}-{aio:?}-{direct}");
            let file = File::new(&case, 3 << 20);
            let mut rig = Rig::new(&case, ring, file.node(aio, direct));
            // Small and large, whole blocks and not, one behind the other.
            let writes =
                [(0, 4096), (8192, 512), (10_000, 777), (1 << 20, 600_000), (2 << 20, 70_000)];
            for (offset, len) in writes {
                rig.write(offset, &pattern(offset, len));
                rig.takes_reply(offset);
            }
            for (offset, len) in writes {
                rig.send(&request(READ, 7, offset, len as u32));
                rig.takes_reply(7);
                let mut data = vec![0; len];
                rig.take(&mut data);
                assert!(data == pattern(offset, len), "{case}: {len} at {offset}");
            }
            let contents = std::fs::read(&file.0).unwrap();
            for (offset, len) in writes {
                let there = &contents[offset as usize..][..len];
                assert!(there == pattern(offset, len), "{case}: {len} at {offset} of the file");
            }
        }
    }
}

/// What the loop needed for rounds of requests that were sent together.
struct Cost {
    allocations: u64,
    locks: u64,
    iterations: u64,
    enters: u64,
    operations: u64,
}

/// Requests per round.
const BATCH: u64 = 32;

/// Of `rounds` rounds, after as many to warm up.
fn cost(rig: &mut Rig, kind: u8, len: usize, rounds: u64) -> Cost {
    let mut requests = Vec::new();
    for n in 0..BATCH {
        requests.extend(request(kind, n, n * 2 * len as u64, len as u32));
        if kind == WRITE {
            requests.extend(vec![7; len]);
        }
    }
    let mut replies = vec![0; (16 + if kind == READ { len } else { 0 }) * BATCH as usize];
    let count = |rig: &Rig| {
        let stats = rig.event_loop.stats();
        let counters = [&stats.iterations, &stats.enters, &stats.submitted];
        ([allocations(), locks_taken()], counters.map(|counter| counter.get()))
    };
    let mut before = count(rig);
    for round in 0..2 * rounds {
        if round == rounds {
            before = count(rig);
        }
        rig.send(&requests);
        rig.take(&mut replies);
    }
    let after = count(rig);
    Cost {
        allocations: after.0[0] - before.0[0],
        locks: after.0[1] - before.0[1],
        iterations: after.1[0] - before.1[0],
        enters: after.1[1] - before.1[1],
        operations: after.1[2] - before.1[2],
    }
}

#[test]
fn requests_that_come_together_cost_one_receive() {
    const ROUNDS: u64 = 100;
    let mut rig = Rig::new("cost", RingChoice::default(), null());
    for (kind, len) in [(READ, 512), (READ, 4096), (WRITE, 512)] {
        let cost = cost(&mut rig, kind, len, ROUNDS);
        assert_eq!((cost.allocations, cost.locks), (0, 0), "{kind}, {len}: allocations, locks");
        // Replies are none, but a sendmsg(2), as long as the socket takes them.
        assert_eq!(cost.operations, ROUNDS, "{kind}, {len}");
        assert!(cost.enters <= cost.iterations, "{kind}, {len}: {} enters", cost.enters);
        assert!(cost.enters <= 3 * ROUNDS, "{kind}, {len}: {} enters", cost.enters);
    }
}

#[test]
fn requests_allocate_nothing_whatever_their_size() {
    let file = File::new("sizes", 32 << 20);
    for (case, direct) in [("buffered", false), ("direct", true)] {
        let mut rig = Rig::new(case, RingChoice::default(), file.node(Aio::IoUring, direct));
        for (kind, len) in [(READ, 4096), (WRITE, 4096), (READ, 128 << 10), (WRITE, 128 << 10)] {
            let cost = cost(&mut rig, kind, len, 5);
            assert_eq!((cost.allocations, cost.locks), (0, 0), "{case}: {kind}, {len}");
            assert!(cost.enters <= cost.iterations, "{case}: {kind}, {len}");
        }
    }
}

struct SetAtTheEnd(Arc<AtomicBool>);

impl Drop for SetAtTheEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Nothing else happens on the loop: what is left of the replies has to wake it.
#[test]
fn replies_that_a_socket_does_not_take_at_once_all_arrive() {
    const REPLIES: u64 = 96;
    const LEN: usize = 4096;
    let rig = Rig::new("full", RingChoice::default(), null());
    let Rig { event_loop, mut client, .. } = rig;
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let at_the_end = SetAtTheEnd(done.clone());
    let client = std::thread::spawn(move || {
        // Set before the end of the connection wakes the loop.
        let (_at_the_end, client) = (at_the_end, &mut client);
        let requests: Vec<u8> =
            (0..REPLIES).flat_map(|n| request(READ, n, n * 8192, LEN as u32)).collect();
        let mut replies = vec![0; (16 + LEN) * REPLIES as usize];
        for _ in 0..50 {
            client.write_all(&requests).unwrap();
            client.read_exact(&mut replies).expect("all replies");
        }
    });
    while !done.load(Ordering::Acquire) {
        event_loop.run_once(true).unwrap();
    }
    client.join().unwrap();
}

/// Sixteen clients at once send options of more than 4 KiB. The next ones wait, those with small options do not.
#[test]
fn few_clients_at_once_send_large_options() {
    const LEN: usize = 60_000;
    let mut rig = Rig::new("large", RingChoice::default(), null());
    let begin = |rig: &mut Rig, sent: usize| {
        let mut client = rig.greeted();
        client.write_all(&1u32.to_be_bytes()).unwrap();
        client.write_all(b"IHAVEOPT\0\0\0\x63").unwrap();
        client.write_all(&(LEN as u32).to_be_bytes()).unwrap();
        client.write_all(&vec![0; sent]).unwrap();
        client
    };
    let mut reply = [0; 20];
    let slow: Vec<_> = (0..16).map(|_| begin(&mut rig, LEN / 2)).collect();
    // The server has read what these have sent.
    rig.connect();
    let mut next = begin(&mut rig, LEN);
    for _ in 0..3 {
        // Each is served as if there were no others.
        rig.connect();
        let refused = next.read(&mut reply).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
    }
    drop(slow);
    let client = std::mem::replace(&mut rig.client, next);
    rig.take(&mut reply);
    assert_eq!(reply[8..12], 0x63u32.to_be_bytes());
    rig.client = client;
}
