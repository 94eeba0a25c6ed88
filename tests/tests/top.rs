//! `ringmill top`, as programs and people run it.

use std::process::Stdio;

use integration::{BlkClient, Image, Scratch, ServerCommand, eventually, tied_command, tool};

/// What `ringmill top` prints with these words behind the socket, and whether it succeeds.
fn top(scratch: &Scratch, words: &[&str]) -> (bool, String) {
    let command = ServerCommand::other_command(scratch, "top").named("top");
    let socket = scratch.path("qmp.sock");
    let command = command.arg(socket.to_str().expect("UTF-8"));
    let (status, output) = words.iter().fold(command, |command, word| command.arg(*word)).run();
    (status.success(), output)
}

#[test]
fn a_view_tells_of_exports_and_threads() {
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
    // A view has what is done between two looks, which are not to be timed: so views go on until
    // one has something.
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
        let rate = row.split_whitespace().nth(2)?.parse::<f64>().expect("a rate");
        (rate > 0.0).then_some(text)
    });
    let lines: Vec<Vec<&str>> = busy.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[1][..3], ["EXPORT", "TYPE", "REQ/S"], "{busy}");
    assert_eq!(lines[2][..2], ["disk", "vhost-user-blk"], "{busy}");
    let percentiles = lines[2][4..7].iter().map(|text| text.parse::<f64>().expect("a number"));
    assert!(percentiles.is_sorted(), "{busy}");
    assert_eq!(lines[4][..2], ["I/O", "THREAD"], "{busy}");
    assert_eq!((lines[5][0], lines.len()), ("io0", 6), "{busy}");

    // On a terminal, which script(1) gives it.
    let program = std::fs::read_link(format!("/proc/{}/exe", server.pid())).expect("the daemon");
    let socket = scratch.path("qmp.sock");
    let run = format!(
        "stty cols 120 rows 20; {} top {} --count 1 --interval-ms 100",
        program.display(),
        socket.display()
    );
    let screen = tied_command(&tool("script"))
        .args(["--quiet", "--return", "--command", &run, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .output()
        .expect("script runs");
    assert!(screen.status.success(), "{screen:?}");
    let text = String::from_utf8_lossy(&screen.stdout);
    // Into the other screen and back.
    assert!(text.contains("\x1b[?1049h") && text.contains("\x1b[?1049l"), "{text:?}");
    assert!(text.contains("EXPORT") && text.contains("vhost-user-blk"), "{text:?}");
    drop(blk);
    server.stop();
}

#[test]
fn a_monitor_that_is_not_there_is_told_of() {
    let scratch = Scratch::new();
    let (success, text) = top(&scratch, &["--count", "1"]);
    assert!(!success && text.contains("qmp.sock: connect failed: "), "{text}");
}
