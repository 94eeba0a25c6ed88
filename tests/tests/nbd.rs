//! The NBD server and the clients of its users: libnbd's programs, QEMU's, fio.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};

use integration::nbd::{RawNbd, client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    Image, Port, Qmp, Scratch, Server, ServerCommand, eventually, pattern, tied_command, tool,
};
use nix::sys::signal::Signal;
use serde_json::json;

/// A daemon that offers an image as `disk`, writable, with more options for the node.
fn serve(scratch: &Scratch, image: &Image, options: &str) -> Server {
    let command = ServerCommand::new(scratch).file("disk", image, options);
    nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on").start()
}

#[test]
fn nbdcopy_takes_an_image_in_and_out() {
    let scratch = Scratch::new();
    let source = Image::filled(&scratch, "source", 20);
    let copy = Image::empty(&scratch, "copy", 20);
    for (target, options) in [("buffered", ""), ("direct", "cache.direct=on,discard=unmap")] {
        let target = Image::empty(&scratch, target, 20);
        let server = serve(&scratch, &target, options);
        let uri = nbd_uri(&scratch, "disk");
        let path = |image: &Image| image.path().to_str().expect("UTF-8").to_owned();
        // Several connections and many requests in flight are its default.
        client_output(&scratch, "nbdcopy", &["--flush", &path(&source), &uri]);
        client_output(&scratch, "qemu-img", &["compare", "-Fraw", "-fraw", &path(&source), &uri]);
        client_output(&scratch, "nbdcopy", &[&uri, &path(&copy)]);
        server.stop();
        for image in [&target, &copy] {
            let (source, image) = (path(&source), path(image));
            client_output(&scratch, "qemu-img", &["compare", "-fraw", "-Fraw", &source, &image]);
        }
    }
}

#[test]
fn nbdinfo_lists_exports_and_capabilities() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 3);
    let command = ServerCommand::new(&scratch).file("disk", &image, "read-only=on");
    let command = command.arg("--blockdev").arg("null-co,node-name=null,size=1048576");
    let command = nbd_server(command, &scratch, "");
    let command = nbd_export(command, "disk", ",name=a b/ü,description=Für Leute");
    let server = nbd_export(command, "null", ",writable=on").start();
    let list = ["--list", "--json", &nbd_uri(&scratch, "")];
    let list = client_output(&scratch, "nbdinfo", &list);
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let exports = list["exports"].as_array().expect("a list");
    let facts = |name: &str, facts: &[(&str, serde_json::Value)]| {
        let export = exports.iter().find(|export| export["export-name"] == name);
        let export = export.unwrap_or_else(|| panic!("{name} in {list}"));
        for (fact, value) in facts {
            assert_eq!(&export[*fact], value, "{fact} of {name}");
        }
    };
    assert_eq!(exports.len(), 2);
    assert_eq!((&list["protocol"], &list["structured"]), (&"newstyle-fixed".into(), &true.into()));
    let both = [
        ("is_rotational", false.into()),
        ("can_cache", true.into()),
        ("can_df", true.into()),
        ("can_flush", true.into()),
        ("can_fua", true.into()),
        ("can_multi_conn", true.into()),
        ("contexts", vec!["base:allocation"].into()),
        ("block_size_minimum", 1.into()),
        ("block_size_preferred", 4096.into()),
        ("block_size_maximum", (32 << 20).into()),
    ];
    facts("a b/ü", &both);
    facts("null", &both);
    facts(
        "a b/ü",
        &[
            ("description", "Für Leute".into()),
            ("export-size", (3 << 20).into()),
            ("is_read_only", true.into()),
            ("can_trim", false.into()),
            ("can_zero", false.into()),
            ("can_fast_zero", false.into()),
        ],
    );
    facts(
        "null",
        &[
            ("export-size", (1 << 20).into()),
            ("is_read_only", false.into()),
            ("can_trim", true.into()),
            ("can_zero", true.into()),
            ("can_fast_zero", true.into()),
        ],
    );
    let missing = client(&scratch, "nbdinfo", &[&nbd_uri(&scratch, "nobody")]);
    assert!(!missing.status.success(), "{missing:?}");
    server.stop();
}

#[test]
fn qemu_io_writes_zeroes_and_discards_at_any_byte() {
    let scratch = Scratch::new();
    for (node, options) in [("buffered", "discard=unmap"), ("direct", "cache.direct=on")] {
        let image = Image::filled(&scratch, node, 8);
        let server = serve(&scratch, &image, options);
        let commands = [
            "write -P 7 1000 5000",
            "read -P 7 1000 5000",
            "aio_write -P 9 2M 1M",
            "aio_write -P 10 3M 1M",
            "aio_flush",
            "read -P 9 2M 1M",
            "write -z 4M 1M",
            "write -z -u 5M 1000000",
            "read -P 0 4M 2048576",
            "discard 6M 1M",
            "write -f -P 11 7M 4k",
            "flush",
            "writev -P 12 7340033 511 513 8192",
            "read -P 12 7340033 9216",
        ];
        let uri = nbd_uri(&scratch, "disk");
        let mut arguments = vec!["-f", "raw"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        arguments.push(&uri);
        let output = client_output(&scratch, "qemu-io", &arguments);
        assert!(!output.contains("failed"), "{node}: {output}");
        server.stop();
        assert_eq!(image.read(1000, 5000), [7; 5000], "{node}");
        assert_eq!(pattern::generation(2, &image.read(8192, pattern::BLOCK)), Ok(0), "{node}");
        assert_eq!(image.read(3 << 20, 1 << 20), vec![10; 1 << 20], "{node}");
        assert_eq!(image.read(4 << 20, 2_048_576), vec![0; 2_048_576], "{node}");
    }
}

/// What a script for nbdsh finds: `h` is not connected, `uri` is the export's.
fn nbdsh(scratch: &Scratch, uri: &str, script: &str) {
    let uri = format!("uri = {uri:?}");
    client_output(scratch, "nbdsh", &["-c", "import errno", "-c", &uri, "-c", script]);
}

const EXPECT: &str = "
def expect(number, call):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == number, (error.errnum, error)
    else:
        raise AssertionError('no error')
";

#[test]
fn errors_and_extents_are_as_the_protocol_has_them() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, "discard=unmap");
    let script = format!(
        "{EXPECT}{}",
        "
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.set_strict_mode(0)
h.connect_uri(uri)
assert h.get_structured_replies_negotiated()
h.pwrite(b'x' * 4096, 1 << 20)
h.flush()
def extents(offset, count, flags=0):
    found = []
    def on(context, offset, entries, error):
        assert context == nbd.CONTEXT_BASE_ALLOCATION, context
        found.extend(entries)
    h.block_status(count, offset, on, flags)
    return found
M = 1 << 20
assert extents(0, 4 * M) == [M, 3, 4096, 0, 3 * M - 4096, 3], extents(0, 4 * M)
assert extents(0, 4 * M, nbd.CMD_FLAG_REQ_ONE) == [M, 3]
assert extents(M - 512, 1024) == [512, 3, 512, 0]
assert extents(M + 100, 100, nbd.CMD_FLAG_REQ_ONE) == [100, 0]
expect(errno.EINVAL, lambda: extents(4 * M, 512))
assert h.pread(100, M - 50) == b'\\0' * 50 + b'x' * 50
assert h.pread(4096, M, nbd.CMD_FLAG_DF) == b'x' * 4096
expect(errno.EINVAL, lambda: h.pread(512, 4 * M))
expect(errno.EINVAL, lambda: h.pread(512, (1 << 64) - 512))
expect(errno.ENOSPC, lambda: h.pwrite(b'y' * 512, 4 * M))
expect(errno.EINVAL, lambda: h.trim(512, 4 * M))
expect(errno.ENOSPC, lambda: h.zero(512, 4 * M))
expect(errno.EINVAL, lambda: h.pread(512, 0, 1 << 9))
expect(errno.EINVAL, lambda: h.pwrite(b'y' * 512, 0, nbd.CMD_FLAG_NO_HOLE))
h.cache(M, M)
expect(errno.EINVAL, lambda: h.cache(512, 4 * M))
h.zero(4096, M, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert h.pread(4096, M) == b'\\0' * 4096
h.zero(M, 2 * M, nbd.CMD_FLAG_FAST_ZERO)
h.pwrite(b'z' * 8192, 3 * M, nbd.CMD_FLAG_FUA)
h.trim(8192, 3 * M, nbd.CMD_FLAG_FUA)
h.pwrite(b'', 0)
h.zero(0, 0)
assert h.pread(4096, 0) == b'\\0' * 4096
h.shutdown()
"
    );
    nbdsh(&scratch, &nbd_uri(&scratch, "disk"), &script);
    server.stop();
}

/// nbdsh script: prints the chunks of some reads. The image has data in its first and third 64 KiB.
const CHUNKS: &str = "
h.connect_uri(uri)
image = (b'Z' * (64 << 10) + bytes(64 << 10)) * 2
kinds = {nbd.READ_DATA: 'data', nbd.READ_HOLE: 'hole'}
def chunks(length, offset, flags=0):
    found = []
    def chunk(bytes, at, status, error):
        found.append((kinds[status], at, len(bytes)))
        assert status == nbd.READ_DATA or bytes == bytearray(len(bytes)), 'a hole is zeroes'
    read = h.pread_structured(length, offset, chunk, flags)
    found.sort(key=lambda chunk: chunk[1])
    assert read == image[offset:offset + length]
    print(offset, length, [(at, length, kind) for kind, at, length in found])
chunks(192 << 10, 0)
chunks(192 << 10, 0, nbd.CMD_FLAG_DF)
chunks(64 << 10, 64 << 10)
chunks(128 << 10, 64 << 10)
chunks(4096, 0)
chunks(100, 70000)
chunks(8192, (64 << 10) - 4096)
h.shutdown()
";

#[test]
fn holes_are_reported_as_by_qemus_server() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 4);
    let file = OpenOptions::new().write(true).open(image.path()).expect("the image");
    for at in [0, 128 << 10] {
        file.write_all_at(&[b'Z'; 64 << 10], at).expect("space for it");
    }
    let uri = nbd_uri(&scratch, "disk");
    let script = format!("uri = {uri:?}\n{CHUNKS}");
    let print = || client_output(&scratch, "nbdsh", &["-c", &script]);
    let server = serve(&scratch, &image, "");
    let ours = print();
    server.stop();
    let qsd = tied_command(&tool("qemu-storage-daemon"))
        .args(["--blockdev", &format!("file,node-name=d,filename={}", image.path().display())])
        .args([
            "--nbd-server",
            &format!("addr.type=unix,addr.path={}", scratch.path("nbd.sock").display()),
        ])
        .args(["--export", "nbd,id=e,node-name=d,name=disk,writable=on"])
        .spawn();
    let mut qsd = qsd.expect("qemu-storage-daemon runs");
    eventually("its socket", || UnixStream::connect(scratch.path("nbd.sock")).ok());
    let theirs = print();
    qsd.kill().and_then(|()| qsd.wait()).expect("our child");
    assert_eq!(ours, theirs);
    assert!(ours.contains("(65536, 65536, 'hole')"), "{ours}");
}

#[test]
fn a_client_without_structured_replies_is_served() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, "");
    let script = format!(
        "{EXPECT}{}",
        "
h.set_request_structured_replies(False)
h.set_strict_mode(0)
h.connect_uri(uri)
assert not h.get_structured_replies_negotiated()
assert not h.can_df()
h.pwrite(b'x' * 100, 50)
assert h.pread(100, 50) == b'x' * 100
expect(errno.EINVAL, lambda: h.pread(512, 4 << 20))
expect(errno.EINVAL, lambda: h.pread(512, 0, nbd.CMD_FLAG_DF))
cookies = [h.aio_pread(nbd.Buffer(65536), n * 65536) for n in range(64)]
while cookies:
    h.poll(-1)
    cookies = [c for c in cookies if not h.aio_command_completed(c)]
h.flush()
h.shutdown()
"
    );
    nbdsh(&scratch, &nbd_uri(&scratch, "disk"), &script);
    server.stop();
}

#[test]
fn a_read_only_export_takes_no_write() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let sum = image.md5();
    let command = ServerCommand::new(&scratch).file("disk", &image, "");
    let server = nbd_export(nbd_server(command, &scratch, ""), "disk", "").start();
    let script = format!(
        "{EXPECT}{}",
        "
h.set_strict_mode(0)
h.connect_uri(uri)
assert h.is_read_only()
expect(errno.EPERM, lambda: h.pwrite(b'x' * 512, 0))
expect(errno.EPERM, lambda: h.trim(512, 0))
expect(errno.EPERM, lambda: h.zero(512, 0))
h.flush()
assert len(h.pread(1 << 20, 0)) == 1 << 20
"
    );
    nbdsh(&scratch, &nbd_uri(&scratch, "disk"), &script);
    server.stop();
    assert_eq!(image.md5(), sum);
}

#[test]
fn fio_verifies_what_it_has_written_over_tcp_and_several_threads() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 32);
    let reserved = Port::new();
    let port = reserved.number();
    let address = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}");
    let command = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
    let command = command.file("disk", &image, "cache.direct=on").arg("--nbd-server").arg(address);
    let server = nbd_export(command, "disk", ",writable=on,iothread.0=io0,iothread.1=io1").start();
    let uri = format!("--uri=nbd://127.0.0.1:{port}/disk");
    let job = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randrw",
        "--bsrange=512-64k",
        "--blockalign=512",
        "--iodepth=32",
        "--size=32M",
        "--io_size=24M",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--randseed=7",
    ];
    client_output(&scratch, "fio", &job);
    server.stop();
}

#[test]
fn an_inherited_listening_socket() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = scratch.path("inherited");
    let listener = UnixListener::bind(&path).expect("a socket");
    let command = ServerCommand::new(&scratch).file("disk", &image, "").stdin(listener);
    let command = command.arg("--nbd-server").arg("addr.type=fd,addr.str=0");
    let server = nbd_export(command, "disk", "").start();
    let uri = format!("nbd+unix:///disk?socket={}", path.display());
    let size = client_output(&scratch, "nbdinfo", &["--size", &uri]);
    assert_eq!(size.trim(), "1048576");
    server.stop();
}

#[test]
fn a_flush_on_one_connection_is_one_for_all() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let command = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
    let command = command.file("disk", &image, "");
    let command = nbd_server(command, &scratch, "");
    let server = nbd_export(command, "disk", ",writable=on,iothread.0=io0,iothread.1=io1").start();
    let script = "
h.connect_uri(uri)
assert h.can_multi_conn()
other = nbd.NBD()
other.connect_uri(uri)
for n in range(100):
    block = bytes([n]) * 4096
    h.pwrite(block, 0)
    assert other.pread(4096, 0) == block
    other.flush()
    other.pwrite(block, 8192, nbd.CMD_FLAG_FUA)
    assert h.pread(4096, 8192) == block
";
    nbdsh(&scratch, &nbd_uri(&scratch, "disk"), script);
    server.stop();
}

/// QEMU's daemon leaves the socket, too.
#[test]
fn the_unix_socket_stays_when_the_daemon_ends_and_goes_with_the_server() {
    let scratch = Scratch::new();
    let socket = scratch.path("nbd.sock");
    let command = || nbd_server(ServerCommand::new(&scratch).monitor("qmp"), &scratch, "");
    let mut server = command().start();
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success());
    assert!(socket.exists());
    // The next server replaces a socket that was left behind.
    let mut server = command().start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("quit", json!({}));
    assert!(server.wait().success());
    assert!(socket.exists());
    let server = command().start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("nbd-server-stop", json!({}));
    assert!(!socket.exists());
    drop(qmp);
    server.stop();
    assert!(!socket.exists());
}

/// A client's socket is closed when its process has ended. The daemon notices later, on another thread.
#[test]
fn a_disconnected_client_does_not_use_the_export() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let command =
        ServerCommand::new(&scratch).monitor("qmp").iothread("io").file("disk", &image, "");
    let server = nbd_server(command, &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    for _ in 0..50 {
        qmp.execute(
            "block-export-add",
            json!({"type": "nbd", "id": "disk", "node-name": "disk", "iothread": "io"}),
        );
        let clients = [(); 3].map(|()| RawNbd::go(&scratch.path("nbd.sock"), "disk"));
        let refused = qmp.refused("nbd-server-remove", json!({"name": "disk"}));
        assert_eq!(refused, "export 'disk' still in use");
        drop(clients);
        qmp.execute("nbd-server-remove", json!({"name": "disk", "mode": "safe"}));
    }
    drop(qmp);
    server.stop();
}

/// A connection's memory, 33 MB for the largest request, takes up only the pages that were used.
#[test]
fn idle_connections_take_up_few_pages() {
    const CONNECTIONS: u64 = 32;
    let scratch = Scratch::new();
    let command = ServerCommand::new(&scratch);
    let command =
        command.arg("--blockdev").arg("null-co,node-name=disk,size=1048576,read-zeroes=on");
    let command = nbd_server(command, &scratch, "");
    let server = nbd_export(command, "disk", "").start();
    let go = || {
        let mut raw = RawNbd::go(&scratch.path("nbd.sock"), "disk");
        raw.request(0, 7, 0, 4096);
        assert_eq!(raw.reply(), (0, 7));
        assert_eq!(raw.take(), [0; 4096]);
        raw
    };
    let first = go();
    let before = server.private_kib();
    let clients: Vec<RawNbd> = (0..CONNECTIONS).map(|_| go()).collect();
    let each = (server.private_kib() - before) / CONNECTIONS;
    assert!(each < 512, "{each} KiB for a connection");
    drop((first, clients));
    server.stop();
}
