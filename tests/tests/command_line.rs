//! The daemon's command line: what it refuses, and what it does when all is well.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use integration::nbd::client_output;
use integration::{
    BlkClient, Image, Qmp, Scratch, ServerCommand, daemon as program, eventually, pattern, tool,
};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// Runs a daemon with a good image, `arguments` and a good export after them, and finds that it refuses with a
/// message that has `named` in it, and that nothing was made.
fn refused(arguments: &[&str], named: &str) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "");
    for argument in arguments {
        server = server.arg(*argument);
    }
    let pid_file = scratch.path("pid").display().to_string();
    let (status, stderr) = server.arg("--pidfile").arg(pid_file).run();
    assert_eq!(status.code(), Some(1), "{arguments:?}: {stderr}");
    assert!(stderr.contains(named), "{arguments:?}: {stderr}");
    let mut left: Vec<_> = fs::read_dir(scratch.dir())
        .expect("the folder is there")
        .map(|entry| entry.expect("it can be read").file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["daemon.log", "disk.img"], "{arguments:?}");
}

#[test]
fn an_unknown_option() {
    refused(&["--frobnicate"], "frobnicate");
}

#[test]
fn an_unknown_driver() {
    refused(&["--blockdev", "driver=frob,node-name=n"], "frob");
}

#[test]
fn an_unknown_option_of_a_driver() {
    refused(&["--blockdev", "driver=null-co,node-name=n,frob=1"], "frob");
}

#[test]
fn a_missing_file() {
    refused(&["--blockdev", "driver=file,node-name=n,filename=/nonexistent"], "/nonexistent");
}

#[test]
fn a_node_name_twice() {
    refused(&["--blockdev", "driver=null-co,node-name=disk"], "disk");
}

#[test]
fn an_unknown_type_of_object() {
    refused(&["--object", "frob,id=o"], "frob");
}

#[test]
fn an_unknown_property_of_an_object() {
    refused(&["--object", "iothread,id=o,frob=1"], "frob");
}

#[test]
fn an_unknown_type_of_export() {
    refused(&["--export", "type=frob,id=e,node-name=disk"], "frob");
}

const EXPORT: &str = "type=vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path=e";

#[test]
fn an_unknown_option_of_an_export() {
    refused(&["--export", &format!("{EXPORT},frob=1")], "frob");
}

#[test]
fn an_export_of_no_node() {
    refused(&["--export", &EXPORT.replace("=disk", "=frob")], "frob");
}

#[test]
fn an_export_on_no_iothread() {
    refused(&["--export", &format!("{EXPORT},iothread=frob")], "frob");
}

#[test]
fn invalid_values() {
    refused(&["--export", &format!("{EXPORT},num-queues=many")], "num-queues");
    refused(&["--export", &format!("{EXPORT},num-queues=0")], "num-queues");
    refused(&["--export", &format!("{EXPORT},logical-block-size=1000")], "1000");
    refused(&["--export", &format!("{EXPORT},writable=perhaps")], "writable");
    refused(&["--object", "iothread,id=o,poll-max-ns=-1"], "poll-max-ns");
}

#[test]
fn invalid_json() {
    refused(&["--blockdev", "{\"driver\": "], "JSON");
}

#[test]
fn help_and_version() {
    let scratch = Scratch::new();
    for option in ["--help", "--version"] {
        let (status, stderr) = ServerCommand::new(&scratch).arg(option).run();
        assert!(status.success(), "{option}: {stderr}");
    }
}

#[test]
fn under_the_name_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch)
        .called_qemu_storage_daemon()
        .file("disk", &image, "")
        .export("disk", "")
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
    drop(client);
    server.stop();
}

/// A daemon that is not our child. Killed when this is dropped.
struct Background(Pid);

impl Drop for Background {
    fn drop(&mut self) {
        // It is gone already unless the test fails.
        let _ = signal::kill(self.0, Signal::SIGKILL);
    }
}

#[test]
fn a_daemon_in_the_background() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let pid_file = scratch.path("pid");
    let daemon = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "");
    let daemon = daemon.arg("--daemonize").arg("--pidfile").arg(pid_file.display().to_string());
    let (status, stderr) = daemon.run();
    assert!(status.success(), "{stderr}");

    // It serves by the time that the command returns.
    let pid = fs::read_to_string(&pid_file).expect("a pid file");
    let pid = Background(Pid::from_raw(pid.trim().parse().expect("a pid")));
    let socket = scratch.path("disk.sock");
    let mut client = BlkClient::connect(&socket, 1, 16).expect("the export serves");
    assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
    drop(client);

    signal::kill(pid.0, Signal::SIGTERM).expect("the daemon is there");
    eventually("the end of the daemon", || signal::kill(pid.0, None).is_err().then_some(()));
    assert!(!socket.exists() && !pid_file.exists(), "files were left behind");
}

/// Also in headers that it writes, and when it opens images again.
#[test]
fn a_daemon_in_the_background_keeps_the_folder_of_relative_paths() {
    let scratch = Scratch::new();
    Image::empty(&scratch, "disk.img", 1);
    let daemon = Command::new(program())
        .current_dir(scratch.dir())
        .args(["storage-daemon", "--daemonize", "--pidfile", "pid"])
        .args(["--chardev", "socket,id=m,path=m.sock,server=on,wait=off", "--monitor", "m"])
        .args(["--blockdev", "file,node-name=disk,filename=disk.img"])
        .status();
    assert!(daemon.expect("it runs").success());
    let pid = fs::read_to_string(scratch.path("pid")).expect("a pid file");
    let _pid = Background(Pid::from_raw(pid.trim().parse().expect("a pid")));
    let mut qmp = Qmp::connect(&scratch.path("m.sock"));
    let overlay =
        json!({"node-name": "disk", "snapshot-node-name": "top", "snapshot-file": "top.qcow2"});
    qmp.execute("blockdev-snapshot-sync", overlay);
    let top = scratch.path("top.qcow2").display().to_string();
    let info = client_output(&scratch, "qemu-img", &["info", "-U", "--output=json", &top]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    let disk = scratch.path("disk.img").display().to_string();
    assert_eq!(info["full-backing-filename"], disk, "{info}");
    for active in [false, true] {
        qmp.execute("blockdev-set-active", json!({"node-name": "top", "active": active}));
    }
}

/// Whatever the umask of the caller.
#[test]
fn a_daemon_in_the_background_has_the_umask_of_qsd() {
    let scratch = Scratch::new();
    let ours = [program().to_str().expect("UTF-8"), "storage-daemon"].map(str::to_owned);
    let theirs = [tool("qemu-storage-daemon").display().to_string()];
    for (name, words) in [("ours", &ours[..]), ("theirs", &theirs)] {
        let [pid_file, socket] =
            ["pid", "sock"].map(|kind| scratch.path(&format!("{name}.{kind}")));
        let chardev = format!("socket,id=m,path={},server=on,wait=off", socket.display());
        let status = Command::new(tool("sh"))
            .args(["-c", r#"umask 0; exec "$@""#, "sh"])
            .args(words)
            .args(["--daemonize", "--chardev", &chardev, "--monitor", "m", "--pidfile"])
            .arg(&pid_file)
            .status();
        assert!(status.expect("a shell runs").success());
        let pid = fs::read_to_string(&pid_file).expect("a pid file");
        let pid = Background(Pid::from_raw(pid.trim().parse().expect("a pid")));
        let status = fs::read_to_string(format!("/proc/{}/status", pid.0)).expect("it runs");
        assert!(status.contains("\nUmask:\t0027\n"), "{name}: {status}");
        assert_eq!(fs::metadata(&socket).expect("a socket").mode() & 0o777, 0o750, "{name}");
    }
}

#[test]
fn no_error_repeats_a_secret() {
    let scratch = Scratch::new();
    let state = scratch.path("state").display().to_string();
    for words in [
        &["--object", "secret,id=s,data=geheim123", "--state", &state][..],
        &["--object", "secret,id=s,data=geheim123,format=base64"],
        &["--object", "secret,id=s,data=geheim123,file=/dev/null"],
        &["--object=secret,id=s,data=geheim123,nothing=1"],
        &["--object", "secret,id=s,data=geheim123", "--object", "secret,id=s,data=geheim123"],
        &["--object", "secret,id=s,data=a,geheim123"],
        &["--object", r#"{"qom-type": "secret", "id": "s", "data": "geheim123""#],
        &["--objct=secret,id=s,data=geheim123"],
        &["secret,id=s,data=geheim123"],
    ] {
        let command = ServerCommand::new(&scratch);
        let command = words.iter().fold(command, |command, word| command.arg(*word));
        let (status, log) = command.run();
        assert_eq!(status.code(), Some(1), "{words:?}: {log}");
        assert!(log.contains('…') && !log.contains("geheim"), "{words:?}: {log}");
    }
}

#[test]
fn the_pid_file_is_removed() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();
    assert!(scratch.path("daemon.pid").exists());
    server.stop();
    assert!(!scratch.path("daemon.pid").exists());
}

#[test]
fn linux_aio_without_direct_io() {
    let node = "driver=file,node-name=n,filename=disk.img,aio=native";
    let image = "/proc/self/exe";
    let node = node.replace("disk.img", image) + ",read-only=on";
    refused(&["--blockdev", &node], "aio=native was specified, but it requires cache.direct=on");
}

/// The daemon says what is missing and what to do, before a guest could find out.
#[test]
fn missing_linux_aio() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (status, log) = ServerCommand::new(&scratch)
        .wrapped_by(env!("CARGO_BIN_EXE_deny-linux-aio"))
        .file("disk", &image, "aio=native,cache.direct=on")
        .export("disk", "")
        .run();
    assert_eq!(status.code(), Some(1), "{log}");
    for part in ["node 'disk' has aio=native", "io_setup failed", "fs.aio-max-nr"] {
        assert!(log.contains(part), "{part}: {log}");
    }
}
