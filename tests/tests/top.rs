//! `ringmill top`, for programs and on a terminal.

use std::process::Command;

use integration::{
    BlkClient, Image, Request, Scratch, Segment, Server, ServerCommand, Terminal, eventually,
    request,
};
use nix::sys::signal::Signal;

/// The output of `ringmill top` with these words after the socket, and whether it succeeds.
fn top(scratch: &Scratch, words: &[&str]) -> (bool, String) {
    let command = ServerCommand::other_command(scratch, "top").named("top");
    let socket = scratch.path("qmp.sock");
    let command = command.arg(socket.to_str().expect("UTF-8"));
    let (status, output) = words.iter().fold(command, |command, word| command.arg(*word)).run();
    (status.success(), output)
}

#[test]
fn a_view_has_exports_and_threads() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &image, "")
        .export("disk", "iothread=io0")
        .monitor("qmp")
        .start();
    assert_eq!(server.socket("qmp"), scratch.path("qmp.sock"));
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
    // A view has the requests since the previous one. Repeat until a view has some.
    let busy = eventually("a view with requests in it", || {
        let looks = std::thread::scope(|scope| {
            let view = scope.spawn(|| top(&scratch, &["--count", "1", "--interval-ms", "300"]));
            while !view.is_finished() {
                blk.read(0, 4096);
            }
            view.join().expect("top runs")
        });
        let (success, text) = looks;
        assert!(success, "{text}");
        let row = text.lines().find(|line| line.starts_with("disk "))?.to_owned();
        let rate = row.split_whitespace().nth(3)?.parse::<f64>().expect("a rate");
        (rate > 0.0).then_some(text)
    });
    let lines: Vec<Vec<&str>> = busy.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[1][..4], ["EXPORT", "TYPE", "STATE", "REQ/S"], "{busy}");
    assert_eq!(lines[2][..3], ["disk", "vhost-user-blk", "ok"], "{busy}");
    let percentiles = lines[2][5..8].iter().map(|text| text.parse::<f64>().expect("a number"));
    assert!(percentiles.is_sorted(), "{busy}");
    assert_eq!(lines[4][..2], ["I/O", "THREAD"], "{busy}");
    assert_eq!((lines[5][0], lines.len()), ("io0", 6), "{busy}");

    drop(blk);
    server.stop();
}

/// Thirty exports with long names on a terminal of 80 x 24. Visible names differ, scrolling shows all exports,
/// and a resize draws the view again.
#[test]
fn thirty_exports_are_seen_on_a_small_terminal() {
    let scratch = Scratch::new();
    let name = |n: usize| format!("production-database-volume-{n:02}");
    let mut command = ServerCommand::new(&scratch).iothread("io0").monitor("qmp");
    command = command.args(["--blockdev", "null-co,node-name=n,size=1048576"]);
    for n in 1..=30 {
        let socket = scratch.path(&format!("{n}.sock"));
        let export = format!(
            "vhost-user-blk,id={},node-name=n,num-queues=2,iothread=io0,addr.type=unix,addr.path={}",
            name(n),
            socket.display()
        );
        command = command.arg("--export").arg(export);
    }
    let server = command.start();
    let program = std::fs::read_link(format!("/proc/{}/exe", server.pid())).expect("the daemon");
    let mut top = Command::new(program);
    top.arg("top").arg(server.socket("qmp"));
    let mut terminal = Terminal::start(&top, 80, 24);
    // Returns the numbers at the ends of visible names.
    let seen = |lines: &[String]| -> Vec<usize> {
        let names = lines.iter().filter(|line| line.starts_with("production-"));
        let names = names.filter_map(|line| line.split_whitespace().next());
        names.map(|name| name[name.len() - 2..].parse().expect("a number")).collect()
    };
    let range = |lines: &[String], heading: &str, wanted: std::ops::RangeInclusive<usize>| {
        (lines[1].starts_with(heading) && seen(lines) == wanted.collect::<Vec<_>>()).then_some(())
    };
    let keys = terminal.wait_for("the first exports, and the keys", |lines| {
        range(lines, "EXPORT 1-19/30 ", 1..=19)?;
        assert!(lines[1].contains(" REQ/S ") && lines[1].contains(" P99 US "), "{lines:#?}");
        let threads = lines.iter().any(|line| line.starts_with("io0 "));
        threads.then(|| lines[23].clone()).filter(|keys| !keys.is_empty())
    });
    assert!(keys.contains("PgDn") && keys.contains("q quit"), "{keys}");
    // Page down; up, three times; end.
    for (key, heading, wanted) in [
        ("\x1b[6~", "EXPORT 12-30/30 ", 12..=30),
        ("\x1b[A\x1b[A\x1b[A", "EXPORT 9-27/30 ", 9..=27),
        ("\x1b[F", "EXPORT 12-30/30 ", 12..=30),
    ] {
        terminal.press(key);
        terminal.wait_for(heading, |lines| range(lines, heading, wanted.clone()));
    }
    terminal.resize(60, 12);
    terminal.wait_for("a smaller view", |lines| range(lines, "EXPORT 12-18/30 ", 12..=18));
    terminal.resize(130, 40);
    terminal.wait_for("all of them", |lines| {
        let whole = lines.get(2).is_some_and(|line| line.starts_with(&format!("{} ", name(1))));
        range(lines, "EXPORT  ", 1..=30).filter(|()| whole)
    });
    terminal.press("u");
    terminal.wait_for("queues", |lines| lines[3].starts_with("  0 on io0 ").then_some(()));
    terminal.press("q");
    assert!(terminal.wait().success());
    server.stop();
}

#[test]
fn a_missing_monitor_is_reported() {
    let scratch = Scratch::new();
    let (success, text) = top(&scratch, &["--count", "1"]);
    assert!(!success && text.contains("qmp.sock: connect failed: "), "{text}");
}

/// An upgrade closes the monitor's connections. `top` connects to the new process.
#[test]
fn views_go_on_after_an_upgrade() {
    let scratch = Scratch::new();
    let mut server = ServerCommand::new(&scratch)
        .args(["--blockdev", "null-co,node-name=n,size=1048576"])
        .export("n", "")
        .monitor("qmp")
        .monitor("other")
        .start();
    let socket = server.socket("qmp");
    let watch = |count: &str| {
        let words = ["--batch", "--interval-ms", "100", "--count", count];
        ServerCommand::other_command(&scratch, "top")
            .named("top")
            .arg(socket.to_str().expect("UTF-8"))
            .args(words)
            .spawn()
    };
    let mut top = watch("1000000");
    let views = |top: &Server| top.log().matches("\nn  ").count();
    for _ in 0..3 {
        let seen = views(&top);
        eventually("a view", || (views(&top) > seen).then_some(()));
        server.upgrade();
        let seen = views(&top);
        eventually("views of the new process", || (views(&top) > seen + 1).then_some(()));
    }
    top.signal(Signal::SIGKILL);
    top.wait();
    // On a terminal, too, where a daemon that has gone is waited for.
    let program = std::fs::read_link(format!("/proc/{}/exe", server.pid())).expect("the daemon");
    let mut command = Command::new(program);
    command.arg("top").arg(&socket);
    let mut terminal = Terminal::start(&command, 100, 10);
    let head = |lines: &[String], text: &str| lines[0].contains(text).then_some(());
    terminal.wait_for("a view", |lines| head(lines, ", sorted by "));
    server.stop();
    terminal.wait_for("the reason", |lines| head(lines, "no connection: "));
    terminal.wait_for("the last view", |lines| lines[2].starts_with("n ").then_some(()));
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    terminal.wait_for("a view of another daemon", |lines| {
        head(lines, ", sorted by ").filter(|()| !lines[2].starts_with("n "))
    });
    terminal.press("q");
    assert!(terminal.wait().success());
    server.stop();
}

#[test]
fn a_stopped_export_is_seen() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = image.path().display();
    for (errno, state) in [(28, "nospace"), (5, "failed")] {
        let server = ServerCommand::new(&scratch)
            .monitor("qmp")
            .arg("--blockdev")
            .arg(format!(
                "driver=blkdebug,node-name=disk,image.driver=file,image.filename={path},\
                 inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.errno={errno}"
            ))
            .export("disk", "werror=stop")
            .start();
        let seen = || {
            let (success, text) = top(&scratch, &["--count", "1", "--interval-ms", "10"]);
            assert!(success, "{text}");
            let row = text.lines().find(|line| line.starts_with("disk ")).expect("the export");
            row.split_whitespace().nth(2).expect("a state").to_owned()
        };
        assert_eq!(seen(), "unused");
        let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
        assert_eq!(seen(), "ok");
        let segments = vec![Segment { at: 4096, len: 512, device_writes: false }];
        blk.submit(0, &Request { kind: request::OUT, sector: 0, segments });
        eventually("the state", || (seen() == state).then_some(()));
        drop(blk);
        assert_eq!(seen(), state);
        server.stop();
    }
}
