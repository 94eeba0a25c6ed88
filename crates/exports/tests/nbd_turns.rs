//! Clients of an NBD export that ask for more than their I/O thread moves at once, and take none of it:
//! what else is on the thread has its turn after a bounded part, and so has each of them.

use crate::common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use block::NodeRegistry;
use block::options::{BlockdevOptions, Discard, Driver as NodeDriver, NullOptions};
use common::Dir;
use event_loop::{EventLoop, LoopConfig};
use exports::nbd::{NbdExport, NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};

const CLIENTS: usize = 16;
const REQUESTS: usize = 8;
const LEN: u32 = 256 << 10;
/// What an iteration may begin: as many bytes as `turns.rs` says, and a request more.
const MOST_AT_ONCE: u64 = (512 << 10) / LEN as u64;

fn null_node() -> BlockdevOptions {
    BlockdevOptions {
        discard: Discard::Unmap,
        ..BlockdevOptions::new(
            Some("null"),
            NodeDriver::null_co(NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: true }),
        )
    }
}

fn serve(event_loop: &EventLoop, dir: &Dir) -> (NbdServer, NbdExport) {
    let server = NbdServerConfig {
        listen: NbdListen::Unix(dir.socket()),
        max_connections: CLIENTS as u32,
        handshake_max_seconds: 60,
        tls: None,
        held: false,
    };
    let server = NbdServer::start(event_loop, server).unwrap();
    let adding = server.add(NbdExportConfig {
        id: "disk".into(),
        name: "disk".into(),
        description: String::new(),
        node: NodeRegistry::new().open(&null_node()).unwrap(),
        io_threads: vec![event_loop.handle()],
        writable: false,
        writethrough: false,
        allocation_depth: false,
        bitmaps: Vec::new(),
    });
    let export = event_loop.block_on(adding).unwrap().unwrap();
    (server, export)
}

fn until(event_loop: &EventLoop, mut so: impl FnMut() -> bool) {
    while !so() {
        event_loop.run_once(true).unwrap();
    }
}

/// A client past the handshake.
fn client(event_loop: &EventLoop, dir: &Dir) -> UnixStream {
    let mut client = UnixStream::connect(dir.socket()).unwrap();
    client.set_nonblocking(true).unwrap();
    // Fixed new style, no zeroes; NBD_OPT_EXPORT_NAME.
    client.write_all(&3u32.to_be_bytes()).unwrap();
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk").unwrap();
    let (mut heard, mut bytes) = (0, [0; 64]);
    // The greeting, and the export's size and flags.
    until(event_loop, || {
        heard += client.read(&mut bytes).unwrap_or(0);
        heard == 18 + 10
    });
    client
}

#[test]
fn what_clients_ask_for_is_begun_in_bounded_parts_by_turns() {
    let dir = Dir::new();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let (server, export) = serve(&event_loop, &dir);
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| client(&event_loop, &dir)).collect();
    let request = |cookie: usize| {
        let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
        let cookie = (cookie as u64).to_be_bytes();
        [&head[..], &cookie, &0u64.to_be_bytes(), &LEN.to_be_bytes()].concat()
    };
    for client in &mut clients {
        let requests: Vec<u8> = (0..REQUESTS).flat_map(request).collect();
        client.write_all(&requests).unwrap();
    }
    let stats = export.queue_stats()[0].clone();
    let mut taken = stats.get().taken;
    let mut heard = [0usize; CLIENTS];
    let mut bytes = vec![0; 1 << 20];
    let each = REQUESTS * (16 + LEN as usize);
    until(&event_loop, || {
        let now = stats.get().taken;
        assert!(now - taken <= MOST_AT_ONCE, "{} requests are begun in one iteration", now - taken);
        taken = now;
        if taken < (CLIENTS * REQUESTS) as u64 {
            return false;
        }
        // All are begun although no client reads; then each client gets all of its data.
        for (client, heard) in clients.iter_mut().zip(&mut heard) {
            *heard += client.read(&mut bytes).unwrap_or(0);
        }
        heard.iter().all(|heard| *heard == each)
    });
    drop(clients);
    until(&event_loop, || !export.is_connected());
    event_loop.block_on(export.stop()).unwrap().unwrap();
    event_loop.block_on(server.stop()).unwrap();
}
