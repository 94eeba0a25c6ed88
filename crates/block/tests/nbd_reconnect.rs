//! The `nbd` driver when its server goes away, and comes back or does not.

use crate::common;

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use common::nbd::{Connected, NbdServer};
use common::*;
use event_loop::IoBufs;
use nix::errno::Errno;

const MIB: usize = 1 << 20;
/// Bytes of each request here.
const LEN: usize = 64 << 10;

/// A rig whose requests wait that many seconds for the server.
fn open(server: &NbdServer, reconnect_delay: u32) -> Connected {
    let nbd = NbdOptions { reconnect_delay, ..server.options() };
    Connected::new(NodeRegistry::new().open(&blockdev("disk", Driver::from(nbd))).unwrap())
}

/// Reads until that goes well, as it has to in the end.
fn until_back(rig: &mut Rig) {
    let begun = Instant::now();
    while rig.read(0, 512, 0).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not connect again");
        // Time for the task that connects.
        rig.event_loop.run_once(true).unwrap();
    }
}

#[test]
fn requests_wait_for_a_server_that_was_killed_under_load() {
    let image = TempFile::new(&disk(), "nbd-kill", 16 * MIB);
    let mut server = NbdServer::qemu(&image.0, &["--cache=writeback"]);
    let mut rig = open(&server, 600);
    let mut expected = image.contents();
    for round in 1..=3u8 {
        // More than there are slots.
        let mut tags = Vec::new();
        for nth in 0..200 {
            let offset = nth * LEN;
            if nth % 5 == 0 {
                let tag = rig.submit(Op::Read, offset as u64, LEN as u64, memory(LEN, 0));
                tags.push((tag, Some(offset)));
                continue;
            }
            let data: Vec<u8> = (0..LEN).map(|i| (i as u8) ^ round ^ (nth as u8)).collect();
            expected[offset..offset + LEN].copy_from_slice(&data);
            let write = Op::Write { fua: nth % 7 == 0 };
            tags.push((rig.submit(write, offset as u64, LEN as u64, filled(&data, 0)), None));
        }
        // In the middle: some are answered, most are not.
        let (first, read) = tags[0];
        let (result, bufs) = rig.wait(first);
        assert!(result.is_ok() && bytes(&bufs) == expected[..LEN], "{read:?}");
        server.kill();
        let late = rig.submit(Op::Flush, 0, 0, IoBufs::new());
        for _ in 0..20 {
            rig.event_loop.run_once(false).unwrap();
        }
        assert!(rig.answer(late).is_none(), "what waits is not answered");
        server.restart();
        for (tag, read) in tags.into_iter().skip(1) {
            let (result, bufs) = rig.wait(tag);
            assert_eq!(result, Ok(()));
            if let Some(offset) = read {
                assert!(bytes(&bufs) == expected[offset..offset + LEN], "read at {offset}");
            }
        }
        assert_eq!(rig.wait(late).0, Ok(()));
        assert!(rig.read(0, 16 * MIB, 0).unwrap() == expected);
        assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
    }
    assert!(image.contents() == expected);
}

#[test]
fn without_a_delay_requests_fail_until_the_server_is_back() {
    let image = TempFile::new(&disk(), "nbd-fail", MIB);
    let mut server = NbdServer::qemu(&image.0, &[]);
    let mut rig = open(&server, 0);
    let expected = image.contents();
    assert!(rig.read(0, MIB, 0).unwrap() == expected);
    server.kill();
    let begun = Instant::now();
    // The first ones may find the connection still there; they fail when it shows that it is not.
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO));
    assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::EIO));
    assert!(begun.elapsed() < Duration::from_secs(60));
    server.restart();
    until_back(&mut rig);
    assert!(rig.read(0, MIB, 0).unwrap() == expected);
}

#[test]
fn requests_fail_when_the_delay_is_over() {
    let image = TempFile::new(&disk(), "nbd-delay", MIB);
    let mut server = NbdServer::qemu(&image.0, &[]);
    let mut rig = open(&server, 1);
    rig.read(0, 512, 0).unwrap();
    server.kill();
    let begun = Instant::now();
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO));
    assert!(begun.elapsed() >= Duration::from_secs(1), "it waited");
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO), "at once from now on");
    server.restart();
    until_back(&mut rig);
}

#[test]
fn an_export_that_became_another_is_not_used() {
    let mut server = NbdServer::nbdkit(&["memory", "1M"]);
    let mut rig = open(&server, 2);
    rig.read(0, 512, 0).unwrap();
    let others =
        [&["memory", "2M"][..], &["--filter=nozero", "memory", "1M"], &["-r", "memory", "1M"]];
    for other in others {
        server.kill();
        server.restart_as(other);
        assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO), "{other:?}");
        server.kill();
        server.restart_as(&["memory", "1M"]);
        until_back(&mut rig);
    }
}

/// A server that shakes hands and leaves: how often it was connected to.
fn leaver(listener: UnixListener, connections: Arc<AtomicU32>) {
    for stream in listener.incoming() {
        connections.fetch_add(1, Ordering::SeqCst);
        // A client that goes away in the middle is none of its business.
        let _ = stream.and_then(shake_hands);
    }
}

fn shake_hands(mut stream: UnixStream) -> io::Result<()> {
    // Fixed newstyle, without zeroes.
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let [.., a, b, c, d] = header;
        let mut data = vec![0; u32::from_be_bytes([a, b, c, d]) as usize];
        stream.read_exact(&mut data)?;
        let option = &header[8..12];
        let mut reply = |kind: u32, data: &[u8]| {
            let (magic, len) = (0x3_e889_0455_65a9u64.to_be_bytes(), data.len() as u32);
            stream.write_all(
                &[&magic, option, &kind.to_be_bytes(), &len.to_be_bytes(), data].concat(),
            )
        };
        if option != [0, 0, 0, 7] {
            reply(0x8000_0001, &[])?;
            continue;
        }
        // NBD_INFO_EXPORT: a size, NBD_FLAG_HAS_FLAGS; then NBD_REP_ACK.
        reply(3, &[&[0, 0][..], &(MIB as u64).to_be_bytes(), &[0, 1]].concat())?;
        return reply(1, &[]);
    }
}

#[test]
fn a_server_that_shakes_hands_and_leaves_is_not_run_after() {
    let path = std::env::temp_dir().join(format!("ringmill-leaver-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let connections = Arc::new(AtomicU32::new(0));
    let counter = connections.clone();
    std::thread::spawn(move || leaver(listener, counter));
    let server = NbdServerAddr::Unix { path: path.clone() };
    let nbd = NbdOptions {
        server,
        export: String::new(),
        tls_creds: None,
        tls_hostname: None,
        reconnect_delay: 3,
        open_timeout: 0,
    };
    let begun = Instant::now();
    let mut rig =
        Connected::new(NodeRegistry::new().open(&blockdev("disk", Driver::from(nbd))).unwrap());
    // It waits for an answer no longer than for a server that is not there.
    assert_eq!(rig.read(0, 512, 0), Err(Errno::EIO));
    assert!(begun.elapsed() >= Duration::from_secs(3), "it waited");
    // One connection, one at once when that was lost, then 1, 2, 4 seconds later.
    let most = 3 + begun.elapsed().as_secs() as u32;
    let made = connections.load(Ordering::SeqCst);
    assert!((3..=most).contains(&made), "{made} connections, {most} at most");
    std::fs::remove_file(&path).unwrap();
}
