//! `--trace`: each event is logged when its mechanism runs; patterns, files and errors.

use std::fs;
use std::path::Path;

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{BlkClient, Image, Scratch, Server, ServerCommand, eventually, pattern, request};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// A line of the log: `TID@SECONDS.MICROSECONDS:event argument value ...`.
#[derive(Debug)]
struct Line {
    thread: u32,
    micros: u64,
    event: String,
    arguments: Vec<(String, String)>,
}

impl Line {
    fn parse(line: &str) -> Option<Line> {
        let (place, event) = line.split_once(':')?;
        let (thread, time) = place.split_once('@')?;
        let (seconds, micros) = time.split_once('.')?;
        assert_eq!(micros.len(), 6, "{line}");
        let seconds: u64 = seconds.parse().ok()?;
        let mut words = event.split(' ').map(str::to_owned);
        let event = words.next()?;
        let mut arguments = Vec::new();
        while let Some(name) = words.next() {
            arguments.push((name, words.next().expect("a value")));
        }
        let (thread, micros) =
            (thread.parse().ok()?, seconds * 1_000_000 + micros.parse::<u64>().ok()?);
        Some(Line { thread, micros, event, arguments })
    }

    fn text(&self, name: &str) -> &str {
        let argument = self.arguments.iter().find(|(argument, _)| argument == name);
        &argument.unwrap_or_else(|| panic!("{self:?} has no {name}")).1
    }

    fn number(&self, name: &str) -> i64 {
        let text = self.text(name);
        let number = match text.strip_prefix("0x") {
            Some(digits) => i64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        number.unwrap_or_else(|| panic!("{self:?}: {name} is no number"))
    }
}

/// The complete lines in the log so far.
fn lines(path: &Path) -> Vec<Line> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let parse = |line| Line::parse(line).unwrap_or_else(|| panic!("not a line of a log: {line}"));
    whole.lines().map(parse).collect()
}

fn of<'a>(lines: &'a [Line], event: &str) -> Vec<&'a Line> {
    lines.iter().filter(|line| line.event == event).collect()
}

fn trace(pattern: &str, log: &Path) -> String {
    format!("{pattern},file={}", log.display())
}

#[test]
fn the_way_of_a_request_is_logged() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let log = scratch.path("trace.log");
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &image, "cache.direct=on,discard=unmap")
        .export("disk", "num-queues=2,iothread=io0")
        .arg("--trace")
        .arg(trace("*", &log))
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 2, 16).expect("a device");
    client.read(40, pattern::BLOCK);
    client.write(48, &pattern::block(6, 1));
    assert_eq!(client.call(request::FLUSH, 0, &[], 0).status, 0);
    assert_eq!(client.call(request::GET_ID, 0, &[], 20).status, 0);
    assert_eq!(client.call(77, 0, &[1; 512], 0).status, 2);
    let range = [&8u64.to_le_bytes()[..], &8u32.to_le_bytes(), &0u32.to_le_bytes()].concat();
    assert_eq!(client.call(request::DISCARD, 0, &range, 0).status, 0);
    assert_eq!(client.call(request::WRITE_ZEROES, 0, &range, 0).status, 0);
    drop(client);
    server.stop();
    let lines = lines(&log);

    // One begin and one end of this queue, with the request and its result.
    let one = |event: &str| match of(&lines, event)[..] {
        [line] => line,
        ref lines => panic!("{event}: {lines:?}"),
    };
    let read = one("virtio_blk_handle_read");
    assert_eq!((read.number("sector"), read.number("nsectors")), (40, 8));
    let write = one("virtio_blk_handle_write");
    assert_eq!((write.number("sector"), write.number("nsectors")), (48, 8));
    let others = of(&lines, "virtio_blk_handle_other");
    let kinds: Vec<_> = others.iter().map(|line| line.number("kind")).collect();
    assert_eq!(kinds, [4, 8, -1, 11, 13]);
    let ends = of(&lines, "virtio_blk_req_complete");
    let statuses: Vec<_> = ends.iter().map(|line| line.number("status")).collect();
    assert_eq!(statuses, [0, 0, 0, 0, 2, 0, 0]);
    let begins: Vec<_> = [read, write].into_iter().chain(others).collect();
    for (begin, end) in begins.iter().zip(&ends) {
        for line in [*begin, *end] {
            assert_eq!((line.text("dev"), line.number("queue")), ("disk", 0));
        }
        assert_eq!(begin.number("req"), end.number("req"));
        assert!(begin.micros <= end.micros && begin.thread == end.thread, "{begin:?} {end:?}");
    }

    // Between them the image is read, through the ring.
    let place = |wanted: &Line| lines.iter().position(|line| std::ptr::eq(line, wanted)).unwrap();
    let span = &lines[place(read)..place(ends[0])];
    let (file, done) = (of(span, "file_submit")[0], of(span, "file_complete")[0]);
    assert_eq!((file.text("node"), file.text("op")), ("disk", "read"));
    assert_eq!((file.number("offset"), file.number("bytes")), (40 * 512, 4096));
    assert_eq!((done.text("node"), done.number("req")), ("disk", file.number("req")));
    assert_eq!(done.number("ret"), 4096);
    let read_sqe = |line: &&&Line| [1, 22].contains(&line.number("opcode"));
    let sqes = of(span, "add_sqe");
    let sqe = sqes.iter().find(read_sqe).expect("IORING_OP_READ or _READV");
    assert_eq!(sqe.number("off"), 40 * 512);
    assert!(sqe.number("fd") > 2, "{sqe:?}");
    let cqes = of(span, "cqe_handler");
    let mine = |line: &&&Line| line.text("user_data") == sqe.text("user_data");
    assert_eq!(cqes.iter().find(mine).expect("its completion").number("res"), 4096);
    let ops: Vec<_> = of(&lines, "file_submit").iter().map(|line| line.text("op")).collect();
    assert!(ops.starts_with(&["read", "write", "fdatasync", "fallocate"]), "{ops:?}");

    // Before and after them: kick and signal.
    let kicks = of(&lines, "virtio_queue_notify");
    assert!(kicks.iter().any(|line| place(line) < place(read) && line.number("polled") == 0));
    assert!(kicks.iter().all(|line| line.text("dev") == "disk"), "{kicks:?}");
    let signals = of(&lines[place(ends[0])..place(write)], "virtio_notify");
    assert_eq!(signals.len(), 1, "one signal for one request: {signals:?}");
    assert!(of(&lines, "thread_pool_submit_aio").is_empty(), "io_uring does it");
}

#[test]
fn nbd_requests_and_replies_are_logged() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let log = scratch.path("trace.log");
    let command = ServerCommand::new(&scratch)
        .file("disk", &image, "")
        .arg("--trace")
        .arg(trace("nbd_*", &log));
    let server = nbd_export(nbd_server(command, &scratch, ""), "disk", ",writable=on").start();
    // Simple replies.
    let mut raw = RawNbd::go(&scratch.path("nbd.sock"), "disk");
    raw.request(0, 0xa, 4096, 512);
    assert_eq!(raw.reply(), (0, 0xa));
    raw.take::<512>();
    raw.request(0, 0xb, 8 << 20, 512);
    assert_eq!(raw.reply(), (22, 0xb), "EINVAL: beyond the end");
    drop(raw);
    // Structured ones.
    let uri = nbd_uri(&scratch, "disk");
    let script = "h.add_meta_context('base:allocation')
h.connect_uri(uri)
h.pwrite(h.pread(1024, 2048), 0)
h.block_status(4096, 0, lambda *args: 0)
h.set_strict_mode(0)
try:
    h.pread(512, 8 << 20)
except nbd.Error:
    pass
h.shutdown()";
    client_output(&scratch, "nbdsh", &["-c", &format!("uri = {uri:?}"), "-c", script]);
    server.stop();
    let lines = lines(&log);
    let numbers = |event: &str, arguments: &[&str]| -> Vec<Vec<i64>> {
        let of = of(&lines, event);
        of.iter().map(|line| arguments.iter().map(|name| line.number(name)).collect()).collect()
    };
    let asked = numbers("nbd_receive_request", &["flags", "kind", "from", "len"]);
    let beyond = vec![0, 0, 8 << 20, 512];
    let expected = [
        vec![0, 0, 4096, 512],
        beyond.clone(),
        vec![0, 0, 2048, 1024],
        vec![0, 1, 0, 1024],
        vec![0, 7, 0, 4096],
        beyond,
    ];
    assert_eq!(asked, expected);
    let simple = numbers("nbd_co_send_simple_reply", &["cookie", "error", "len"]);
    assert_eq!(simple, [[0xa, 0, 512], [0xb, 22, 0]]);
    assert_eq!(numbers("nbd_co_send_chunk_read", &["offset", "size"]), [[2048, 1024]]);
    assert_eq!(numbers("nbd_co_send_extents", &["extents"]), [[1]]);
    assert_eq!(numbers("nbd_co_send_chunk_error", &["err"]), [[22]]);
    let written = of(&lines, "nbd_receive_request")[3];
    let done = of(&lines, "nbd_co_send_chunk_done")[0];
    assert_eq!(written.text("cookie"), done.text("cookie"));
    assert_eq!((written.text("client"), written.thread), (done.text("client"), done.thread));
}

#[test]
fn the_thread_pool_is_logged() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let log = scratch.path("trace.log");
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "aio=threads")
        .export("disk", "")
        .arg("--trace")
        .arg(trace("thread_pool_*", &log))
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    for sector in [0, 8, 16] {
        client.read(sector, pattern::BLOCK);
    }
    drop(client);
    server.stop();
    let lines = lines(&log);
    let submits = of(&lines, "thread_pool_submit_aio");
    let completes = of(&lines, "thread_pool_complete_aio");
    assert!(submits.len() >= 3 && submits.len() + completes.len() == lines.len(), "{lines:?}");
    for (submit, complete) in submits.iter().zip(&completes).take(3) {
        assert_eq!(submit.text("user_data"), complete.text("user_data"));
        assert!(submit.number("fd") > 2);
        assert_eq!(complete.number("ret"), 4096);
    }
}

/// Pins that thread of the daemon and this one to different CPUs. On one CPU, polling would keep its client from running,
/// find nothing, and be given up.
fn apart(server: &Server, name: &str) {
    let only = |cpu: usize, pid: Pid| {
        let mut set = CpuSet::new();
        set.set(cpu).and_then(|()| sched_setaffinity(pid, &set)).expect("a CPU");
    };
    let allowed = sched_getaffinity(Pid::this()).expect("it is known");
    let mut cpus = (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu) == Ok(true));
    let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else { return };
    only(first, server.thread(name));
    // This thread's CPU.
    only(second, Pid::from_raw(0));
}

#[test]
fn busy_polling_is_logged() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let log = scratch.path("trace.log");
    // A window so large that any interval fits, even on a busy machine.
    let server = ServerCommand::new(&scratch)
        .arg("--object")
        .arg("iothread,id=io0,poll-policy=weighted,poll-max-ns=10000000000")
        .file("disk", &image, "")
        .export("disk", "iothread=io0")
        .arg("--trace")
        .arg(trace("poll_*", &log))
        .arg("--trace")
        .arg("run_poll_handlers_*")
        .start();
    apart(&server, "io0");
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    let lines =
        eventually("each event of busy polling but poll_remove, and something found by it", || {
            client.read(0, 512);
            let lines = lines(&log);
            let events = [
                "poll_add",
                "poll_grow",
                "poll_shrink",
                "run_poll_handlers_begin",
                "run_poll_handlers_end",
            ];
            let ends = of(&lines, "run_poll_handlers_end");
            let is_found = ends.iter().any(|end| end.number("progress") == 1);
            let all = is_found && events.iter().all(|event| !of(&lines, event).is_empty());
            all.then_some(lines)
        });
    let added = of(&lines, "poll_add")[0];
    // POLLIN, or 0 if the loop found the event by polling.
    assert!(added.number("fd") > 2 && [0, 1].contains(&added.number("revents")), "{added:?}");
    for grown in of(&lines, "poll_grow") {
        assert!(grown.number("old") < grown.number("new"), "{grown:?}");
        assert!(grown.number("new") <= 10_000_000_000, "{grown:?}");
    }
    for shrunk in of(&lines, "poll_shrink") {
        assert!(shrunk.number("old") > shrunk.number("new"), "{shrunk:?}");
    }
    let begun = of(&lines, "run_poll_handlers_begin")[0];
    assert!(begun.number("max_ns") > 0 && begun.number("timeout") >= -1, "{begun:?}");
    drop(client);
    let lines = eventually("poll_remove", || {
        Some(self::lines(&log)).filter(|lines| !of(lines, "poll_remove").is_empty())
    });
    let removed = of(&lines, "poll_remove")[0];
    assert_eq!(removed.text("node"), of(&lines, "poll_add")[0].text("node"));
    server.stop();
}

#[test]
fn patterns_files_and_minus_choose_events() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (list, log) = (scratch.path("events"), scratch.path("trace-%d.log"));
    fs::write(&list, "# requests\n\n  virtio_*  \nno_such_event\n-virtio_notify\n")
        .expect("a file");
    let server = ServerCommand::new(&scratch)
        .called_qemu_storage_daemon()
        .file("disk", &image, "")
        .export("disk", "")
        .arg("-T")
        .arg(format!("-virtio_blk_*,events={}", list.display()))
        .arg("--trace")
        .arg(format!("enable=-virtio_queue_*,file={}", log.display()))
        .arg("--trace=nor_this")
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.read(0, 512);
    drop(client);
    let messages = server.log();
    let log = scratch.path(&format!("trace-{}.log", server.pid()));
    server.stop();
    let lines = lines(&log);
    let events: Vec<_> = lines.iter().map(|line| &*line.event).collect();
    assert_eq!(events, ["virtio_blk_handle_read", "virtio_blk_req_complete"]);
    let at = |line: u32| format!("{}:{line}: trace event 'no_such_event' does not", list.display());
    assert!(messages.contains(&at(4)), "{messages}");
    assert!(messages.contains("--trace: trace event 'nor_this' does not exist"), "{messages}");
}

#[test]
fn without_a_file_the_log_goes_to_standard_error() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut server = ServerCommand::other_command(&scratch, "serve")
        .arg(image.path().to_str().expect("a path in UTF-8"))
        .arg("--socket")
        .arg(scratch.path("disk.sock").to_str().expect("a path in UTF-8"))
        .arg("--trace")
        .arg("virtio_blk_handle_*")
        .spawn();
    eventually("the export", || server.log().contains("\nServing ").then_some(()));
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.read(8, 512);
    let log = server.log();
    let line = log.lines().find(|line| line.contains("virtio_blk_handle_read"));
    let line = Line::parse(line.expect("a line of the log")).expect("of its form");
    assert_eq!((line.text("dev"), line.number("sector")), ("export0", 8));
    drop(client);
    server.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(server.wait().success());
}

#[test]
fn invalid_patterns_are_refused() {
    let scratch = Scratch::new();
    for command in ["serve", "storage-daemon"] {
        let run = |value: &str| {
            let mut server = ServerCommand::other_command(&scratch, command);
            if command == "serve" {
                server = server.arg("no-such-image");
            }
            server.arg("--trace").arg(value).run()
        };
        for (value, message) in [
            (
                "poll_*,file=/nonexistent/log",
                "Error opening logfile /nonexistent/log: No such file",
            ),
            ("file=", "Error opening logfile : No such file or directory"),
            ("events=/nonexistent", "--trace events=/nonexistent: No such file or directory"),
            ("events=/", "--trace events=/: Is a directory"),
            ("pattern=x", "--trace pattern=x: Invalid parameter 'pattern'"),
        ] {
            let (status, log) = run(value);
            assert_eq!(status.code(), Some(1), "{command} --trace {value}: {log}");
            assert!(log.contains(message), "{command} --trace {value}: {log}");
        }
        let (status, log) = run("help");
        assert!(status.success(), "{log}");
        let mut sorted: Vec<_> = log.lines().collect();
        sorted.sort_unstable();
        assert_eq!(log.lines().collect::<Vec<_>>(), sorted);
        assert!(sorted.contains(&"virtio_notify"), "{log}");
    }
}
