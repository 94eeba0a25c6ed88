//! The daemon is upgraded while NBD clients are connected. The clients continue over the same connections.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbd_uri, nbds_uri, request};
use integration::tls::{Authority, NOW};
use integration::{
    Image, Qmp, Scratch, Server, ServerCommand, daemon as program, eventually, install, pattern,
    tied_command, tool,
};
use serde_json::{Value, json};

const READ: u16 = 0;
const WRITE: u16 = 1;

fn serve(scratch: &Scratch, image: &Image) -> Server {
    let command = ServerCommand::new(scratch).called_qemu_storage_daemon().monitor("qmp");
    let command = command.iothread("io0").iothread("io1").file("disk", image, "cache.direct=on");
    let options = ",writable=on,iothread.0=io0,iothread.1=io1";
    nbd_export(nbd_server(command, scratch, ""), "disk", options).start()
}

/// Writes and reads with many requests in flight, one connection after the other, and checks all data, until the file
/// `stop` exists.
const LOAD: &str = "
import os, random
state, rng, connections = {}, random.Random(1), []
for _ in range(2):
    c = nbd.NBD()
    c.add_meta_context('base:allocation')
    c.connect_uri(uri)
    connections.append(c)
block = lambda n, g: (b'%08d%08d' % (n, g)) * 1024
while not os.path.exists('stop'):
    for c in connections:
        cookies = []
        for n in rng.sample(range(256), 32):
            state[n] = state.get(n, 0) + 1
            cookies.append(c.aio_pwrite(block(n, state[n]), n * 16384))
        while cookies:
            c.poll(-1)
            cookies = [x for x in cookies if not c.aio_command_completed(x)]
        reads = []
        for n in rng.sample(sorted(state), min(32, len(state))):
            buf = nbd.Buffer(16384)
            reads.append((c.aio_pread(buf, n * 16384), n, buf))
        for cookie, n, buf in reads:
            while not c.aio_command_completed(cookie):
                c.poll(-1)
            assert buf.to_bytearray() == block(n, state[n]), n
    print('round', flush=True)
for c in connections:
    assert c.block_status(1 << 20, 0, lambda *a: 0) is None
    c.flush()
    c.shutdown()
";

struct Load(Child);

impl Load {
    fn start(scratch: &Scratch) -> Load {
        Load::run(scratch, &nbd_uri(scratch, "disk"), LOAD)
    }

    fn run(scratch: &Scratch, uri: &str, script: &str) -> Load {
        let uri = format!("uri = {uri:?}");
        let mut command = Command::new(tool("nbdsh"));
        // nbdsh needs Debian's Python.
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(["-c", &uri, "-c", script]);
        command.current_dir(scratch.dir()).stdin(Stdio::piped()).stdout(Stdio::piped());
        Load(command.spawn().expect("nbdsh can be run"))
    }

    /// Waits until more data is written and read.
    fn go_on(&mut self) {
        for _ in 0..3 {
            self.round();
        }
    }

    fn round(&mut self) {
        let mut line = String::new();
        // Without read-ahead beyond the line.
        let mut lines = BufReader::with_capacity(1, self.0.stdout.as_mut().expect("a pipe"));
        lines.read_line(&mut line).expect("a line");
        assert_eq!(line, "round\n", "the client has ended");
    }

    fn finish(mut self, scratch: &Scratch) {
        fs::write(scratch.path("stop"), "").expect("a file");
        let mut rest = String::new();
        self.0.stdout.take().expect("a pipe").read_to_string(&mut rest).expect("its last rounds");
        assert!(self.0.wait().expect("it ends").success());
    }
}

#[test]
fn clients_continue_over_their_connections() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let mut server = serve(&scratch, &image);
    let mut load = Load::start(&scratch);
    for _ in 0..5 {
        load.go_on();
        server.upgrade();
    }
    load.go_on();
    // New connections are accepted by the new process.
    client_output(&scratch, "nbdinfo", &[&nbd_uri(&scratch, "disk")]);
    load.finish(&scratch);
    server.stop();
}

#[test]
fn clients_continue_if_the_new_program_fails() {
    for script in [
        "#!/bin/sh\nexit 3\n",
        "#!/usr/bin/python3
import socket
to = socket.socket(fileno=0)
while (kind := to.recv(100)[:1]) != b'Q':
    if kind == b'G':
        to.send(b'R')
",
    ] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 8);
        let mut server = serve(&scratch, &image);
        let mut load = Load::start(&scratch);
        load.go_on();
        let installed = scratch.path("qemu-storage-daemon");
        fs::remove_file(&installed).expect("it is a link");
        install(&installed, script);
        let socket = server.socket("qmp");
        let done = Command::new(program()).arg("upgrade").arg(socket).output().expect("it runs");
        assert!(!done.status.success(), "{done:?}");
        load.go_on();
        client_output(&scratch, "nbdinfo", &[&nbd_uri(&scratch, "disk")]);
        fs::remove_file(&installed).expect("it is ours");
        std::os::unix::fs::symlink(program(), &installed).expect("a link");
        server.upgrade();
        load.go_on();
        load.finish(&scratch);
        server.stop();
    }
}

/// Whatever part of a message has arrived, and however much the client has not read.
#[test]
fn messages_continue_at_any_byte() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 16);
    let mut server = serve(&scratch, &image);
    let socket = scratch.path("nbd.sock");
    let block = pattern::block(3, 7);
    let len = block.len() as u32;
    let mut message = request(WRITE, 5, 3 * u64::from(len), len).to_vec();
    message.extend_from_slice(&block);
    // Within the header; after it; within the payload; after the whole message.
    let mut writers = [13, 28, 2000, message.len()].map(|sent| {
        let mut raw = RawNbd::go(&socket, "disk");
        raw.send(&message[..sent]);
        (raw, sent)
    });
    // A refused request, within its payload.
    let mut refused = RawNbd::go(&socket, "disk");
    refused.request(WRITE, 9, 1 << 40, 4096);
    refused.send(&[1; 1000]);
    // Much more data than the socket takes, not read.
    let mut slow = RawNbd::go(&socket, "disk");
    for cookie in 0..12 {
        slow.request(READ, cookie, cookie << 20, 1 << 20);
    }
    let mut idle = RawNbd::go(&socket, "disk");
    for _ in 0..2 {
        server.upgrade();
    }
    for (raw, sent) in &mut writers {
        raw.send(&message[*sent..]);
        assert_eq!(raw.reply(), (0, 5), "{sent} bytes were sent before");
    }
    refused.send(&[1; 3096]);
    assert_eq!(refused.reply(), (28, 9));
    refused.request(READ, 10, 3 * u64::from(len), len);
    assert_eq!(refused.reply(), (0, 10));
    assert_eq!(refused.take::<{ pattern::BLOCK }>()[..], block[..]);
    let mut seen = Vec::new();
    for _ in 0..12 {
        let (error, cookie) = slow.reply();
        assert_eq!(error, 0);
        let mut data = vec![0; 1 << 20];
        slow.0.read_exact(&mut data).expect("data");
        for (n, block) in data.chunks(pattern::BLOCK).enumerate() {
            let index = (cookie << 20) / pattern::BLOCK as u64 + n as u64;
            // The block may have been read before or after the write.
            let known = if index == 3 { 7 } else { 0 };
            let generation = pattern::generation(index, block);
            assert!(generation == Ok(0) || generation == Ok(known), "block {index}");
        }
        seen.push(cookie);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..12).collect::<Vec<_>>());
    idle.request(READ, 1, 0, 512);
    assert_eq!(idle.reply(), (0, 1));
    drop((writers, refused, slow, idle));
    server.stop();
    assert_eq!(pattern::generation(3, &image.read(3 * u64::from(len), block.len())), Ok(7));
}

#[test]
fn clients_in_the_handshake_are_disconnected() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut server = serve(&scratch, &image);
    let socket = scratch.path("nbd.sock");
    let mut choosing = RawNbd::greet(&socket);
    server.upgrade();
    assert_eq!(choosing.0.read(&mut [0; 1]).expect("the end"), 0);
    let mut again = RawNbd::go(&socket, "disk");
    again.request(READ, 1, 0, 512);
    assert_eq!(again.reply(), (0, 1));
    drop(again);
    server.stop();
}

/// Copies to a disk, copies from one, and verified writes, all in progress during five upgrades: a throttle group delays
/// them until its limit is lifted. No delayed request is lost.
#[test]
fn other_programs_continue() {
    const MIB: u64 = 16;
    let scratch = Scratch::new();
    let names = ["out", "in", "fio"];
    let (source, filled) =
        (Image::filled(&scratch, "source.img", MIB), Image::filled(&scratch, "out.img", MIB));
    let images =
        [filled, Image::empty(&scratch, "in.img", MIB), Image::empty(&scratch, "fio.img", MIB)];
    let mut command = ServerCommand::new(&scratch).monitor("qmp").iothread("io0").iothread("io1");
    command = command.arg("--object").arg("throttle-group,id=slow,limits.iops-total=20");
    for (name, image) in names.iter().zip(&images) {
        let below = format!("file.driver=file,file.filename={}", image.path().display());
        let node = format!("throttle,node-name={name},throttle-group=slow,{below}");
        command = command.arg("--blockdev").arg(node);
    }
    command = nbd_server(command, &scratch, "");
    for name in names {
        command = nbd_export(command, name, ",writable=on,iothread.0=io0,iothread.1=io1");
    }
    let mut server = command.start();
    let run = |program: &str, arguments: &[&str]| {
        let mut command = tied_command(&tool(program));
        command.args(arguments).current_dir(scratch.dir()).stdout(Stdio::null());
        command.spawn().expect("the client runs")
    };
    let [out, to, fio] = names.map(|name| nbd_uri(&scratch, name));
    let fio = format!("--uri={fio}");
    // 1024 requests of 16 KiB: 50 seconds with the limit, except requests that each upgrade releases.
    let few = ["--requests=2", "--connections=2", "--request-size=16384"];
    let mut clients = [
        run("nbdcopy", &[&few[..], &[&out, "copy.img"]].concat()),
        run("nbdcopy", &[&few[..], &["--flush", "source.img", &to]].concat()),
        run(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &fio,
                "--rw=randwrite",
                "--bs=16k",
                "--iodepth=4",
                "--size=16M",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--randseed=7",
            ],
        ),
    ];
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let all_get_on = |qmp: &mut Qmp| {
        let exports = qmp.execute("query-blockstats", json!({}));
        let done = |export: &Value, kind: &str| export["stats"][kind].as_u64().expect("a count");
        let gets_on = |one| done(one, "rd_operations") + done(one, "wr_operations") > 0;
        exports.as_array().expect("a list").iter().all(gets_on)
    };
    for _ in 0..5 {
        eventually("requests done for all by this process", || all_get_on(&mut qmp).then_some(()));
        drop(qmp);
        server.upgrade();
        qmp = Qmp::connect(&server.socket("qmp"));
    }
    for client in &mut clients {
        assert_eq!(client.try_wait().expect("our child"), None, "it was there all the time");
    }
    let limits = json!({"path": "slow", "property": "limits", "value": {"iops-total": 0}});
    qmp.execute("qom-set", limits);
    for client in &mut clients {
        assert!(client.wait().expect("our child").success());
    }
    drop(qmp);
    server.stop();
    let copy = Image::existing(&scratch.path("copy.img"));
    assert_eq!((copy.md5(), images[1].md5()), (images[0].md5(), source.md5()));
}

#[test]
fn clients_with_tls_connect_again() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let image = Image::filled(&scratch, "disk.img", 1);
    let object = format!("tls-creds-x509,id=tls0,endpoint=server,dir={}", creds.display());
    let command = ServerCommand::new(&scratch).arg("--object").arg(object);
    let command = nbd_server(command.file("disk", &image, ""), &scratch, ",tls-creds=tls0");
    let mut server = nbd_export(command, "disk", ",writable=on").start();
    let script = "
def connect():
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.connect_uri(uri)
    assert h.pread(4096, 0) != bytes(4096)
    return h
h = connect()
print('round', flush=True)
input()
try:
    h.pread(4096, 0)
except nbd.Error:
    connect().shutdown()
    print('round', flush=True)
";
    let mut load = Load::run(&scratch, &nbds_uri(&scratch, "disk", &alice), script);
    load.round();
    server.upgrade();
    load.0.stdin.take().expect("a pipe").write_all(b"go on\n").expect("it reads");
    load.round();
    assert!(load.0.wait().expect("it ends").success());
    server.stop();
}
