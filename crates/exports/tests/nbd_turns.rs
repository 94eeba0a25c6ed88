//! Clients of an NBD export that ask for more than their I/O thread moves at once, and take none of it:
//! what else is on the thread has its turn after a bounded part, and so has each of them.

use crate::common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use std::sync::Arc;

use block::NodeRegistry;
use block::options::{BlockdevOptions, Discard, Driver as NodeDriver, NullOptions};
use block::track::{DirtyBitmap, Storage};
use common::Dir;
use event_loop::{EventLoop, LoopConfig};
use exports::nbd::{NbdExport, NbdExportConfig, NbdListen, NbdServer, NbdServerConfig};

const CLIENTS: usize = 16;
const REQUESTS: usize = 8;
const LEN: u32 = 256 << 10;
/// What an iteration may begin: as many bytes as `turns.rs` says, and a request more.
const MOST_AT_ONCE: u64 = (512 << 10) / LEN as u64;

fn null_node(size: u64) -> BlockdevOptions {
    BlockdevOptions {
        discard: Discard::Unmap,
        ..BlockdevOptions::new(
            Some("null"),
            NodeDriver::null_co(NullOptions { size, latency_ns: 0, read_zeroes: true }),
        )
    }
}

fn serve(
    event_loop: &EventLoop,
    dir: &Dir,
    size: u64,
    bitmaps: Vec<Arc<DirtyBitmap>>,
) -> (NbdServer, NbdExport) {
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
        node: NodeRegistry::new().open(&null_node(size)).unwrap(),
        io_threads: vec![event_loop.handle()],
        writable: false,
        writethrough: false,
        allocation_depth: false,
        bitmaps,
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
    let (server, export) = serve(&event_loop, &dir, 1 << 30, Vec::new());
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| client(&event_loop, &dir)).collect();
    for client in &mut clients {
        client.write_all(&reads(REQUESTS)).unwrap();
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

/// So many reads of [`LEN`] bytes.
fn reads(count: usize) -> Vec<u8> {
    let request = |cookie: usize| {
        let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
        let cookie = (cookie as u64).to_be_bytes();
        [&head[..], &cookie, &0u64.to_be_bytes(), &LEN.to_be_bytes()].concat()
    };
    (0..count).flat_map(request).collect()
}

#[test]
fn clients_that_have_left_are_read_nothing() {
    let dir = Dir::new();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let (server, export) = serve(&event_loop, &dir, 1 << 30, Vec::new());
    let clients: Vec<_> = (0..CLIENTS).map(|_| client(&event_loop, &dir)).collect();
    for mut client in clients {
        client.write_all(&reads(REQUESTS)).unwrap();
    }
    until(&event_loop, || !export.is_connected());
    let taken = export.queue_stats()[0].get().taken;
    // Those that have their turn at once are not asked whether they are there.
    let all = (CLIENTS * REQUESTS) as u64;
    assert!(taken < all / 4, "{taken} of {all} reads are carried out for nobody");
    event_loop.block_on(export.stop()).unwrap().unwrap();
    event_loop.block_on(server.stop()).unwrap();
}

/// A client that has negotiated structured replies and the contexts of so many bitmaps.
fn client_of_bitmaps(event_loop: &EventLoop, dir: &Dir, bitmaps: usize) -> UnixStream {
    let mut client = UnixStream::connect(dir.socket()).unwrap();
    client.set_nonblocking(true).unwrap();
    let string = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    let names = (0..bitmaps).map(|n| string(&format!("qemu:dirty-bitmap:b{n}")));
    let queries: Vec<u8> = names.flatten().collect();
    let count = (bitmaps as u32).to_be_bytes();
    let contexts = [string("disk"), count.to_vec(), queries].concat();
    let go = [string("disk"), vec![0, 0]].concat();
    let options = [(8, &[][..]), (10, &contexts), (7, &go)];
    // Fixed new style, no zeroes.
    let flags = 3u32.to_be_bytes();
    client.write_all(&flags).unwrap();
    let mut option = |number: u32, data: &[u8]| {
        let head = [&b"IHAVEOPT"[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        client.write_all(&[&head.concat(), data].concat()).unwrap();
    };
    options.iter().for_each(|(number, data)| option(*number, data));
    let end = [&0x3_e889_0455_65a9u64.to_be_bytes()[..], &[0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0]];
    let (mut heard, mut bytes) = (Vec::new(), [0; 4096]);
    until(event_loop, || {
        let read = client.read(&mut bytes).unwrap_or(0);
        heard.extend_from_slice(&bytes[..read]);
        heard.ends_with(&end.concat())
    });
    client
}

/// Has a client ask 128 times at once for the block status of 4 GiB, with 8 bitmaps of 1 TiB that are set by `set`. Returns
/// the most requests that are begun in one iteration, and the iterations until all are.
fn ask_for_bitmaps(set: impl Fn(&DirtyBitmap)) -> (u64, u64) {
    const SIZE: u64 = 1 << 40;
    const BITMAPS: usize = 8;
    let bitmap = |n| DirtyBitmap::new(format!("b{n}"), SIZE, 65536, true, Storage::Memory);
    let bitmaps: Vec<_> = (0..BITMAPS).map(|n| Arc::new(bitmap(n))).collect();
    bitmaps.iter().for_each(|bitmap| set(bitmap));
    let dir = Dir::new();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let (server, export) = serve(&event_loop, &dir, SIZE, bitmaps);
    let mut client = client_of_bitmaps(&event_loop, &dir, BITMAPS);
    let request = |cookie: u64| {
        let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 7];
        [&head[..], &cookie.to_be_bytes(), &0u64.to_be_bytes(), &u32::MAX.to_be_bytes()].concat()
    };
    client.write_all(&(0..128).flat_map(request).collect::<Vec<u8>>()).unwrap();
    let stats = export.queue_stats()[0].clone();
    let mut done = stats.get().kinds[5].done;
    let (mut most, mut iterations, mut bytes) = (0, 0, vec![0; 1 << 20]);
    while done < 128 {
        event_loop.run_once(true).unwrap();
        let _ = client.read(&mut bytes);
        let now = stats.get().kinds[5].done;
        (most, iterations) = (most.max(now - done), iterations + 1);
        done = now;
    }
    drop(client);
    until(&event_loop, || !export.is_connected());
    event_loop.block_on(export.stop()).unwrap().unwrap();
    event_loop.block_on(server.stop()).unwrap();
    (most, iterations)
}

#[test]
fn the_status_of_dirty_bitmaps_costs_what_it_tells() {
    // As many extents as a reply has, from every bitmap.
    let (most, iterations) =
        ask_for_bitmaps(|bitmap| (0..4096).for_each(|part| bitmap.bits().set(part << 17, 1)));
    assert!(most <= 2, "{most} replies of 1,024 extents in an iteration");
    // All is clean, or all is dirty.
    let (_, clean) = ask_for_bitmaps(|_| {});
    assert!(clean < iterations / 2, "{clean} iterations, {iterations}");
    let (_, dirty) = ask_for_bitmaps(|bitmap| bitmap.bits().set(0, u64::MAX));
    assert!(dirty < iterations / 2, "{dirty} iterations, {iterations}");
}
