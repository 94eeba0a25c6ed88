//! The daemon's standard error: empty by default when all is well, else what options ask for.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use integration::{
    BlkClient, Image, Qmp, Scratch, Server, ServerCommand, daemon, eventually, tied_command, tool,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// A daemon with one server of each kind.
fn command<'a>(scratch: &'a Scratch, image: &Image) -> ServerCommand<'a> {
    let nbd = scratch.path("nbd.sock");
    ServerCommand::new(scratch)
        .called_qemu_storage_daemon()
        .monitor("qmp")
        .iothread("io0")
        .file("disk", image, "")
        .export("disk", "iothread=io0")
        .arg("--nbd-server")
        .arg(format!("addr.type=unix,addr.path={}", nbd.display()))
        .arg("--export")
        .arg("nbd,id=n,node-name=disk")
}

/// Clients of each kind connect and disconnect. One stays connected during a live upgrade.
fn whole_life(server: &mut Server, scratch: &Scratch) {
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
    blk.read(0, 4096);
    let uri = format!("nbd+unix:///disk?socket={}", scratch.path("nbd.sock").display());
    let copied = tied_command(&tool("nbdinfo")).args(["--map", &uri]).output().expect("it runs");
    assert!(copied.status.success(), "{copied:?}");
    let mut ctl = tied_command(daemon());
    let answer = ctl.arg("ctl").arg(server.socket("qmp")).arg("query-version").output();
    assert!(answer.expect("ctl runs").status.success());
    server.upgrade();
    blk.read(0, 4096);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("query-block-exports", json!({}));
    drop((blk, qmp));
    drop(BlkClient::connect(&server.socket("disk"), 1, 16).expect("it still serves"));
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success(), "{}", server.log());
}

#[test]
fn nothing_is_said_when_all_is_well() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut server = command(&scratch, &image).logging(None).start();
    whole_life(&mut server, &scratch);
    assert_eq!(server.log(), "");
}

#[test]
fn requested_messages_are_logged_before_and_after_an_upgrade() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut server = command(&scratch, &image)
        .logging(None)
        .args(["--log-level", "debug", "--log-format", "json"])
        .start();
    whole_life(&mut server, &scratch);
    let log = server.log();
    let lines: Vec<Value> =
        log.lines().map(|line| serde_json::from_str(line).expect("an object per line")).collect();
    let text = |line: &Value, name: &str| line[name].as_str().expect("a text").to_owned();
    for line in &lines {
        let time = text(line, "time");
        assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 27, "{time}");
        assert_eq!(text(line, "program"), "qemu-storage-daemon");
    }
    let said = |level: &str, part: &str| -> BTreeSet<u64> {
        let said = lines
            .iter()
            .filter(|line| text(line, "level") == level && text(line, "message").contains(part));
        said.map(|line| line["pid"].as_u64().expect("a number")).collect()
    };
    // Logged by the first daemon, and by its successor.
    for (level, part) in [
        ("debug", "io0: io_uring"),
        ("debug", "chardev qmp: client connected"),
        ("info", "sandbox: "),
        ("info", "front end connected"),
    ] {
        assert_eq!(said(level, part).len(), 2, "{level} {part}:\n{log}");
    }
    for level in ["warning", "error"] {
        assert_eq!(said(level, "").len(), 0, "{log}");
    }
}

#[test]
fn the_variable_stands_for_the_option_which_comes_first() {
    for (variable, option, is_said) in
        [("info", None, true), ("info", Some("error"), false), ("error", Some("info"), true)]
    {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 1);
        let mut command = command(&scratch, &image).logging(Some(variable));
        if let Some(option) = option {
            command = command.args(["--log-level", option]);
        }
        let pid_file = scratch.path("daemon.pid");
        let path = pid_file.to_str().expect("UTF-8").to_owned();
        let mut server = command.arg("--pidfile").arg(path).spawn();
        eventually("the daemon's pid file", || pid_file.exists().then_some(()));
        server.signal(Signal::SIGTERM);
        assert!(server.wait().success());
        assert_eq!(server.log().contains("SIGTERM: "), is_said, "{variable} {option:?}");
    }
}

#[test]
fn a_wrong_variable_is_reported() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = command(&scratch, &image).logging(Some("everything")).spawn();
    let line = "qemu-storage-daemon: warning: RINGMILL_LOG: 'everything' is no level of the log; \
                known levels: error, warn, info, debug\n";
    eventually("a line about it", || server.log().contains(line).then_some(()));
}

/// systemd.exec(5): `JOURNAL_STREAM` has the device and inode of the journal's stream.
#[test]
fn the_journal_gets_priorities() {
    for is_journal in [true, false] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 1);
        // The file that the daemon gets as standard error.
        let log = scratch.path("daemon.log");
        let file = File::create(&log).expect("a new file").metadata().expect("it is there");
        let inode = file.st_ino() + u64::from(!is_journal);
        let mut server = command(&scratch, &image)
            .env("JOURNAL_STREAM", format!("{}:{inode}", file.st_dev()))
            .start();
        whole_life(&mut server, &scratch);
        let lines = fs::read_to_string(log).expect("the log");
        let with_priority = lines.lines().filter(|line| line.starts_with("<6>")).count();
        assert_eq!(with_priority, if is_journal { lines.lines().count() } else { 0 }, "{lines}");
        let with_time = lines.lines().filter(|line| line.starts_with("20")).count();
        assert_eq!(with_time, if is_journal { 0 } else { lines.lines().count() }, "{lines}");
        assert!(lines.contains("sandbox: "), "{lines}");
    }
}

#[test]
fn the_journal_gets_trace_events_as_debug_messages() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let log = scratch.path("daemon.log");
    let file = File::create(&log).expect("a new file").metadata().expect("it is there");
    let server = command(&scratch, &image)
        .logging(None)
        .args(["--trace", "add_sqe"])
        .env("JOURNAL_STREAM", format!("{}:{}", file.st_dev(), file.st_ino()))
        .start();
    server.stop();
    let lines = fs::read_to_string(log).expect("the log");
    assert!(lines.lines().any(|line| line.contains("add_sqe")), "{lines}");
    assert!(lines.lines().all(|line| line.starts_with("<7>")), "{lines}");
}

/// A daemon without journals serves, and says why.
#[test]
fn a_folder_of_journals_that_others_may_open_is_a_warning() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let journals = scratch.path("run/journals");
    fs::create_dir_all(&journals).expect("a new folder");
    fs::set_permissions(&journals, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let run = scratch.path("run").display().to_string();
    let server = command(&scratch, &image).logging(None).env("RUNTIME_DIRECTORY", run).start();
    let log = server.log();
    server.stop();
    let owner = nix::unistd::geteuid();
    let why = format!("other users than {owner} have access to the folder (mode 0755)");
    assert!(log.contains(&format!("warning: {}: ", journals.display())), "{log}");
    assert!(log.contains(&why) && log.lines().count() == 1, "{log}");
}

#[test]
fn an_error_at_the_start_has_the_form_of_qsd() {
    let scratch = Scratch::new();
    let missing = scratch.path("missing.img");
    let option = format!("file,node-name=f,filename={}", missing.display());
    let message = format!(
        "--blockdev {option}: Could not open '{}': No such file or directory",
        missing.display()
    );
    let run = |arguments: &[&str]| {
        let command = ServerCommand::new(&scratch).called_qemu_storage_daemon();
        let command = command.args(["--blockdev", &option]);
        let (status, said) =
            arguments.iter().fold(command, |command, argument| command.arg(*argument)).run();
        fs::remove_file(scratch.path("qemu-storage-daemon")).expect("the link");
        assert_eq!(status.code(), Some(1));
        said
    };
    assert_eq!(run(&[]), format!("qemu-storage-daemon: {message}\n"));
    let json: Value = serde_json::from_str(&run(&["--log-format", "json"])).expect("an object");
    assert_eq!((&json["level"], &json["message"]), (&json!("error"), &json!(message)));
}

/// Returns what `serve` draws on a terminal with this many columns, until it is interrupted.
fn on_terminal(columns: usize, log_level: &str) -> String {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (socket, pid_file) = (scratch.path("disk.sock"), scratch.path("serve.pid"));
    let run = format!(
        "stty cols {columns} rows 20; exec {} serve {} --socket {} --pidfile {} --log-level {log_level}",
        daemon().display(),
        image.path().display(),
        socket.display(),
        pid_file.display()
    );
    let screen = scratch.path("screen");
    let mut script = tied_command(&tool("script"))
        .args(["--quiet", "--return", "--flush", "--command", &run])
        .arg(&screen)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("script runs");
    let drawn = || fs::read_to_string(&screen).unwrap_or_default();
    let blk = eventually("the export", || {
        pid_file.exists().then(|| BlkClient::connect(&socket, 1, 16).expect("it serves"))
    });
    drop(blk);
    eventually("two status lines", || (drawn().matches("requests/s").count() >= 2).then_some(()));
    let pid = fs::read_to_string(&pid_file).expect("a pid").trim().parse().expect("a number");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGINT).expect("it is there");
    assert!(script.wait().expect("script ends").success());
    let drawn = drawn();
    let (_, drawn) = drawn.split_once('\n').expect("script's own first line");
    drawn.to_owned()
}

const ERASE: &str = "\r\u{1b}[K";

/// Returns the terminal's lines after this output. The last line has the cursor.
fn lines_left(drawn: &str) -> Vec<String> {
    let line = |line: &str| line.rsplit(ERASE).next().unwrap_or_default().replace('\r', "");
    drawn.split('\n').map(line).collect()
}

#[test]
fn the_status_line_runs_into_nothing() {
    for (columns, log_level) in [(120, "info"), (120, "warn"), (40, "info"), (16, "info")] {
        let drawn = on_terminal(columns, log_level);
        // script(1) adds this last line.
        let (drawn, _) = drawn.rsplit_once("\nScript done").expect("script's own last line");
        let lines = lines_left(drawn);
        let status = |line: &&String| line.contains("requests/s");
        assert_eq!(lines.iter().filter(status).count(), 0, "{columns}: {drawn:?}");
        for shown in drawn.split(ERASE).skip(1) {
            let shown = shown.rsplit(['\n']).next().unwrap_or_default();
            assert!(shown.chars().count() < columns, "{columns}: {shown:?} in {drawn:?}");
        }
        let is_info = log_level == "info";
        let connected = lines.iter().filter(|line| line.ends_with("front end connected")).count();
        assert_eq!(connected, usize::from(is_info), "{drawn:?}");
        assert_eq!(drawn.contains("SIGINT: "), is_info, "{drawn:?}");
        // The shell's prompt gets an empty line.
        assert_eq!(lines.last().map(String::as_str), Some(""), "{drawn:?}");
        // The instructions appear once.
        assert_eq!(drawn.matches("Attach it to QEMU").count(), 1, "{drawn:?}");
    }
}
