//! The `nbd` driver with servers that nobody here wrote.

use crate::common;

use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::*;
use block::request::Op;
use block::status::{Extent, ExtentState};
use common::nbd::{Connected, NbdServer, Old, OldServer};
use common::*;
use event_loop::{EventLoop, IoThread, IoThreadConfig, LoopConfig, oneshot};
use nix::errno::Errno;

const MIB: usize = 1 << 20;

fn open(options: &BlockdevOptions) -> Connected {
    Connected::new(NodeRegistry::new().open(options).unwrap())
}

#[test]
fn an_image_behind_qemu_nbd() {
    let image = TempFile::new(&disk(), "nbd-qemu", 4 * MIB);
    let server = NbdServer::qemu(&image.0, &["--discard=unmap"]);
    let mut options = server.node();
    options.discard = Discard::Unmap;
    let node = NodeRegistry::new().open(&options).unwrap();
    let geometry = node.geometry();
    assert_eq!(geometry.size, 4 << 20);
    assert!(geometry.discard && geometry.write_zeroes && geometry.write_cache);
    let mut rig = Connected::new(node);
    // More than a server's largest request has, more than an input's memory, less than that.
    let expected = image.contents();
    for (offset, len) in [(0, 4 * MIB), (512, 3 * MIB), (MIB as u64, 64 << 10), (1536, 512)] {
        let at = offset as usize;
        assert_eq!(rig.read(offset, len, 8), Ok(expected[at..at + len].to_vec()), "{len}");
    }
    let data = vec![0xa5; 2 * MIB];
    rig.write(4096, &data, 8).unwrap();
    rig.write_op(Op::Write { fua: true }, 0, &data[..512], 0).unwrap();
    assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
    let zeroes = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
    assert_eq!(rig.op(zeroes, MIB as u64, MIB as u64), Ok(()));
    assert_eq!(rig.op(Op::Discard, 3 << 20, 1 << 20), Ok(()));
    let mut expected = expected;
    expected[4096..4096 + 2 * MIB].fill(0xa5);
    expected[..512].fill(0xa5);
    expected[MIB..2 * MIB].fill(0);
    expected[3 * MIB..].fill(0);
    assert_eq!(rig.read(0, 4 * MIB, 0), Ok(expected.clone()));
    assert!(image.contents() == expected);
    let hole = |mib: u64| Extent::own(mib << 20, ExtentState::Hole);
    let data = |mib: u64| Extent::own(mib << 20, ExtentState::Data);
    assert_eq!(rig.extents(0, 4 << 20), [data(1), hole(1), data(1), hole(1)]);
    assert_eq!(rig.op(Op::Discard, 4 << 20, 512), Err(Errno::EIO), "beyond the end");
}

#[test]
fn missing_server_features_are_emulated() {
    for simple in [&["--no-sr"][..], &[]] {
        let filters = ["--filter=nozero", "--filter=fua", "--filter=noextents", "memory", "1M"];
        let server = NbdServer::nbdkit(&[simple, &filters].concat());
        let mut rig = open(&server.node());
        let data = pattern(MIB);
        rig.write_op(Op::Write { fua: true }, 0, &data, 0).unwrap();
        let zeroes = |no_fallback| Op::WriteZeroes { may_unmap: false, no_fallback, fua: true };
        assert_eq!(rig.op(zeroes(true), 4096, 200 << 10), Err(Errno::EOPNOTSUPP));
        assert_eq!(rig.op(zeroes(false), 4096, 200 << 10), Ok(()));
        let mut expected = data;
        expected[4096..4096 + (200 << 10)].fill(0);
        assert_eq!(rig.read(0, MIB, 0), Ok(expected));
        assert_eq!(rig.extents(0, 1 << 20), [Extent::own(1 << 20, ExtentState::Data)]);
    }
}

#[test]
fn servers_with_an_old_handshake_are_used() {
    // With no options, and with one, with and without zeroes behind the export's description.
    for handshake in
        ["--oldstyle", "--mask-handshake=0", "--mask-handshake=2", "--mask-handshake=1"]
    {
        let server = NbdServer::nbdkit(&[handshake, "memory", "1M"]);
        let mut rig = open(&server.node());
        let data = pattern(MIB);
        rig.write(0, &data, 0).unwrap();
        assert_eq!(rig.read(0, MIB, 0), Ok(data), "{handshake}");
        let unknown = Extent::own(1 << 20, ExtentState::Data);
        if handshake != "--mask-handshake=1" {
            assert_eq!(rig.extents(0, 1 << 20), [unknown], "{handshake}");
        }
    }
    for (handshake, export) in [
        (Old::Oldstyle(0), ""),
        (Old::Oldstyle(3), ""),
        (Old::Newstyle(0), "old"),
        (Old::Newstyle(2), "old"),
        // Options are refused, also that which has replaced the name.
        (Old::Newstyle(1), "old"),
        (Old::Newstyle(3), "old"),
    ] {
        let server = OldServer::start(handshake);
        let mut rig = open(&server.node(export));
        assert_eq!(rig.read(4096, 8192, 0), Ok(vec![7; 8192]), "{handshake:?}");
    }
    let left = "Failed to read export length: the server left when it was asked for export 'new': check that it \
                has one of that name";
    for (handshake, export, why) in [
        (Old::Oldstyle(1), "old", "Server does not support non-empty export names"),
        (Old::Oldstyle(0x1_0001), "", "Unexpected export flags"),
        (Old::Newstyle(0), "new", left),
        (Old::Newstyle(3), "new", left),
    ] {
        let server = OldServer::start(handshake);
        let refused = NodeRegistry::new().open(&server.node(export)).err();
        let refused = refused.map(|error| error.to_string());
        assert_eq!(refused.as_deref(), Some(why), "{handshake:?}");
    }
}

#[test]
fn an_end_within_a_sector_reads_as_zeroes_and_takes_no_data() {
    let server = NbdServer::nbdkit(&["memory", "1000"]);
    let node = NodeRegistry::new().open(&server.node()).unwrap();
    assert_eq!(node.geometry().size, 1024);
    let mut rig = Connected::new(node);
    let mut data = pattern(1024);
    assert_eq!(rig.write(0, &data, 0), Err(Errno::ENOSPC));
    data[1000..].fill(0);
    assert_eq!(rig.write(0, &data, 0), Ok(()));
    assert_eq!(rig.read(0, 1024, 0), Ok(data.clone()));
    assert_eq!(rig.read(512, 512, 0), Ok(data[512..].to_vec()));
}

#[test]
fn errors_of_a_server_keep_their_number() {
    let server =
        NbdServer::nbdkit(&["--filter=error", "memory", "1M", "error=ENOSPC", "error-rate=1"]);
    let mut rig = open(&server.node());
    assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::ENOSPC));
    assert_eq!(rig.read(0, 512, 0), Err(Errno::ENOSPC));
    let server = NbdServer::nbdkit(&[
        "--filter=error",
        "memory",
        "1M",
        "error-pwrite=EPERM",
        "error-pwrite-rate=1",
    ]);
    let mut rig = open(&server.node());
    assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::EPERM));
    assert_eq!(rig.read(0, 512, 0), Ok(vec![0; 512]));
}

#[test]
fn errors_of_opening_name_the_reason() {
    let image = TempFile::new(&disk(), "nbd-open", MIB);
    let server = NbdServer::qemu(&image.0, &["-r", "-x", "disk"]);
    let refused = |change: &dyn Fn(&mut BlockdevOptions)| {
        let mut options = server.node();
        change(&mut options);
        NodeRegistry::new().open(&options).err().map(|error| error.to_string())
    };
    let nbd = |options: &mut BlockdevOptions, change: &dyn Fn(&mut NbdOptions)| {
        let nbd: &mut NbdOptions = options.driver.downcast_mut().unwrap();
        nbd.export = "disk".into();
        change(nbd);
    };
    assert_eq!(refused(&|_| {}).as_deref(), Some("Requested export not available"));
    let denied = "Could not open image: Permission denied";
    assert_eq!(refused(&|options| nbd(options, &|_| {})).as_deref(), Some(denied));
    let read_only = |options: &mut BlockdevOptions| {
        options.read_only = true;
        nbd(options, &|_| {});
    };
    assert_eq!(refused(&read_only), None);
    let nowhere = |options: &mut BlockdevOptions| {
        nbd(options, &|nbd| nbd.server = NbdServerAddr::Unix { path: "/nowhere".into() });
    };
    let expected = "Failed to connect to '/nowhere': No such file or directory";
    assert_eq!(refused(&nowhere).as_deref(), Some(expected));
}

/// A loop that another thread runs, for as long as `f` takes.
fn beside<R: Send>(node: &Arc<dyn BlockNode>, f: impl FnOnce(&mut Rig) -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(|| f(&mut Connected::new(node.clone()))).join().unwrap())
}

#[test]
fn several_loops_share_a_connection_where_the_server_wants_that() {
    let shared = ["--filter=multi-conn", "memory", "1M", "multi-conn-mode=disable"];
    for (arguments, connections) in [(&["memory", "1M"][..], 2), (&shared, 1)] {
        let server = NbdServer::nbdkit(arguments);
        let node = NodeRegistry::new().open(&server.node()).unwrap();
        let thread = IoThread::spawn(IoThreadConfig::default()).unwrap();
        // The first loop has the connection, and goes on by itself.
        let (sender, first) = oneshot::channel();
        let on_loop = node.clone();
        let open = move |event_loop: &EventLoop| {
            sender.send(on_loop.open_channel(event_loop).is_ok());
        };
        thread.handle().spawn(open).unwrap();
        let here = EventLoop::new(LoopConfig::default()).unwrap();
        assert_eq!(here.block_on(first).unwrap(), Ok(true));
        let data = pattern(MIB);
        beside(&node, |rig| {
            rig.write(0, &data, 8).unwrap();
            assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
            assert!(rig.read(0, MIB, 8).unwrap() == data);
            assert_eq!(rig.op(Op::Discard, 0, 2 << 20), Err(Errno::EIO));
            assert_eq!(rig.extents(0, 4096).len(), 1);
            assert_eq!(server.clients(), connections, "{arguments:?}");
        });
        // When the loop that has it goes, another takes its place.
        beside(&node, |rig| {
            assert!(rig.read(4096, 4096, 0).unwrap() == data[4096..8192]);
            thread.stop().unwrap();
            assert!(rig.read(4096, 4096, 0).unwrap() == data[4096..8192]);
            assert!(rig.read(8192, 4096, 0).unwrap() == data[8192..12288]);
        });
    }
}
