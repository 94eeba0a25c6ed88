//! The kernel reports lost writes once, and the next flush succeeds. So a daemon whose flush has failed refuses an upgrade:
//! the new process would believe the image intact.
//!
//! A library that is loaded before libc (`tests/clients/flushes_that_fail.c`) makes a flush fail once, at a time that the
//! test decides.

use std::io::{self, PipeWriter, Write};
use std::process::Command;
use std::thread;

use integration::{
    BlkClient, Completion, Image, Qmp, Request, Scratch, Server, ServerCommand, daemon, eventually,
    pattern, preloaded, request, tool,
};
use nix::sys::signal::Signal;
use serde_json::json;

/// `VIRTIO_BLK_S_IOERR`.
const IO_ERROR: u8 = 1;

/// A daemon whose flushes wait for a byte and then fail, until the pipe is closed.
fn with_flushes_that_fail<'a>(scratch: &'a Scratch) -> (ServerCommand<'a>, PipeWriter) {
    let (failures, fail) = io::pipe().expect("a pipe");
    let command = ServerCommand::new(scratch)
        .env("LD_PRELOAD", preloaded(scratch, "flushes_that_fail.c"))
        .stdin(failures)
        .monitor("qmp")
        .iothread("io0");
    (command, fail)
}

fn times(server: &Server, what: &str) -> usize {
    server.log().matches(what).count()
}

/// The flush fails while the other process starts.
#[test]
fn after_a_failed_flush_an_image_is_not_handed_over() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (command, mut fail) = with_flushes_that_fail(&scratch);
    let command = command.file("disk", &image, "aio=threads");
    let mut server = command.export("disk", "iothread=io0").start();
    let socket = server.socket("qmp");
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.write(8, &pattern::block(1, 1));
    let flush = Request { kind: request::FLUSH, sector: 0, segments: vec![] };
    let id = client.submit(0, &flush);

    let started = || times(&server, "started the new program");
    let monitor = socket.clone();
    let upgrading = thread::spawn(move || Qmp::connect(&monitor).refused("x-upgrade", json!({})));
    eventually("the other process", || (started() == 1).then_some(()));
    fail.write_all(b"!").expect("the daemon listens");
    drop(fail);
    assert_eq!(client.wait(0).expect("an answer"), [Completion { id, status: IO_ERROR }]);
    let why = upgrading.join().expect("it is refused");
    let failed = format!("flushing {} has failed", image.path().display());
    assert!(why.contains(&failed), "{why}");

    let still_fails = |client: &mut BlkClient| {
        assert_eq!(client.call(request::FLUSH, 0, &[], 0).status, IO_ERROR);
    };
    still_fails(&mut client);
    let refused = Command::new(daemon()).arg("upgrade").arg(&socket).output().expect("it runs");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains(&failed), "{refused:?}");
    assert_eq!(started(), 1, "none is started in vain");
    for (block, generation) in [(1, 1), (2, 0)] {
        let found = client.read(block * 8, pattern::BLOCK);
        assert_eq!(pattern::generation(block, &found), Ok(generation));
    }
    client.write(16, &pattern::block(2, 2));
    still_fails(&mut client);
    drop(client);
    server.signal(Signal::SIGTERM);
    assert!(!server.wait().success(), "not all is flushed");
}

/// The daemon's own flush before the queues stop takes longer than the limit, and fails.
#[test]
fn an_ongoing_flush_is_awaited() {
    let scratch = Scratch::new();
    let raw = Image::filled(&scratch, "disk.img", 1);
    // All clusters are allocated: writes change no metadata, whose flush would be awaited.
    let path = scratch.path("disk.qcow2");
    let mut convert = Command::new(tool("qemu-img"));
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]).arg(raw.path()).arg(&path);
    assert!(convert.status().expect("qemu-img can be run").success());
    let (command, mut fail) = with_flushes_that_fail(&scratch);
    let file = format!("file.driver=file,file.aio=threads,file.filename={}", path.display());
    let command = command.arg("--blockdev").arg(format!("qcow2,node-name=disk,{file}"));
    let mut server = command.export("disk", "iothread=io0").start();
    let socket = server.socket("qmp");
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.write(8, &pattern::block(1, 1));

    let upgrading = thread::spawn(move || Qmp::connect(&socket).refused("x-upgrade", json!({})));
    // The wait for the first flush has ended.
    eventually("queues to be stopped", || (times(&server, "take long") > 0).then_some(()));
    fail.write_all(b"!").expect("the daemon listens");
    drop(fail);
    let why = upgrading.join().expect("it is refused");
    assert!(why.contains("flush"), "{why}");
    assert_eq!(client.call(request::FLUSH, 0, &[], 0).status, IO_ERROR);
    drop(client);
    server.signal(Signal::SIGTERM);
    assert!(!server.wait().success(), "not all is flushed");
}
