//! Journals of qcow2 images that killed daemons have left.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{LoopDevices, Scratch, Server, ServerCommand, daemon};
use serde_json::Value;

/// A daemon with `disk.qcow2`, and its journals in that folder of the scratch folder, or in the user's.
fn start(scratch: &Scratch, name: &'static str, runtime: Option<&str>) -> Server {
    let path = scratch.path("disk.qcow2").display().to_string();
    daemon_on(scratch, name, runtime, "file", &path).start()
}

fn daemon_on<'a>(
    scratch: &'a Scratch,
    name: &'static str,
    runtime: Option<&str>,
    driver: &str,
    path: &str,
) -> ServerCommand<'a> {
    let disk = format!("qcow2,node-name=disk,file.driver={driver},file.filename={path}");
    let command = ServerCommand::new(scratch).named(name).arg("--blockdev").arg(disk);
    let command = match runtime {
        Some(folder) => {
            let folder = scratch.path(folder);
            fs::create_dir_all(&folder).expect("a folder");
            command.env("RUNTIME_DIRECTORY", folder.display().to_string())
        }
        None => command,
    };
    nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on")
}

/// Makes an image. A daemon answers writes to it, and is killed before a flush.
fn left(scratch: &Scratch, runtime: Option<&str>) {
    let create = ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"];
    client_output(scratch, "qemu-img", &create);
    write_and_kill(scratch, start(scratch, "killed", runtime));
}

fn write_and_kill(scratch: &Scratch, server: Server) {
    // The daemon writes metadata out soon after a client has left, so this one stays.
    let mut client = RawNbd::go(&scratch.path("nbd.sock"), "disk");
    for n in 0..64 {
        client.request(1, n, n << 20, 65536);
        client.send(&[7; 65536]);
        assert_eq!(client.reply(), (0, n));
    }
    server.kill();
}

/// 64 commands of qemu-io.
fn commands() -> impl Iterator<Item = String> {
    (0..64).map(|n| format!("read -P 7 {n}M 64k"))
}

fn args<'a>(options: &[&'a str], commands: &'a [String], uri: &'a str) -> Vec<&'a str> {
    let mut args = options.to_vec();
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(uri);
    args
}

/// Reads what was [`left`].
fn look(scratch: &Scratch) {
    let reads = commands().collect::<Vec<_>>();
    client_output(
        scratch,
        "qemu-io",
        &args(&["-r", "-f", "raw"], &reads, &nbd_uri(scratch, "disk")),
    );
}

fn journals(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(daemon());
    command.arg("journals").args(args).arg("--folder").arg(folder);
    command.output().expect("it runs")
}

/// The states in the list of a folder's journals.
fn states(folder: &Path) -> Vec<String> {
    let listed = journals(folder, &["--output", "json"]);
    assert!(listed.status.success());
    let listed: Vec<Value> = serde_json::from_slice(&listed.stdout).expect("JSON");
    listed.iter().map(|one| one["state"].as_str().expect("a state").to_owned()).collect()
}

/// The next daemon is another service.
#[test]
fn answered_writes_survive_although_the_next_daemon_has_another_folder() {
    let scratch = Scratch::new();
    left(&scratch, None);
    let server = start(&scratch, "next", Some("run"));
    look(&scratch);
    server.stop();
}

/// A journal that its image needs is removed by force alone.
#[test]
fn journals_are_listed_and_those_without_use_removed() {
    let scratch = Scratch::new();
    left(&scratch, Some("run"));
    let folder = scratch.path("run/journals");
    let image = scratch.path("disk.qcow2").display().to_string();
    assert_eq!(states(&folder), ["needed"]);
    journals(&folder, &["--clear"]);
    assert!(!journals(&folder, &["--clear", &image]).status.success());
    let server = start(&scratch, "next", Some("run"));
    look(&scratch);
    assert!(!journals(&folder, &["--clear", "--force", &image]).status.success(), "it is in use");
    server.stop();
    let scratch = Scratch::new();
    left(&scratch, Some("run"));
    let folder = scratch.path("run/journals");
    let image = scratch.path("disk.qcow2");
    assert!(
        journals(&folder, &["--clear", "--force", image.to_str().expect("UTF-8")]).status.success()
    );
    assert!(states(&folder).is_empty());
    let scratch = Scratch::new();
    left(&scratch, Some("run"));
    let folder = scratch.path("run/journals");
    // To another folder: nothing tells it from an image that was removed.
    let moved = scratch.path("run/moved.qcow2");
    fs::rename(scratch.path("disk.qcow2"), &moved).expect("an image");
    assert_eq!(states(&folder), ["image-missing"]);
    assert!(journals(&folder, &["--clear"]).status.success());
    assert_eq!(states(&folder), ["image-missing"]);
    fs::rename(moved, scratch.path("disk.qcow2")).expect("an image");
    let server = start(&scratch, "next", Some("run"));
    look(&scratch);
    server.stop();
}

/// Below an overlay, the image is only read: its journal is used, and the log says that it stays.
#[test]
fn the_log_names_an_image_whose_journal_is_only_read() {
    let scratch = Scratch::new();
    left(&scratch, Some("run"));
    let path = |name: &str| scratch.path(name).display().to_string();
    let (image, overlay) = (path("disk.qcow2"), path("overlay.qcow2"));
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &image, &overlay];
    client_output(&scratch, "qemu-img", &create);
    let disk = format!("qcow2,node-name=disk,file.driver=file,file.filename={overlay}");
    let server = ServerCommand::new(&scratch).named("next").arg("--blockdev").arg(disk);
    let server = server.env("RUNTIME_DIRECTORY", path("run"));
    let server = nbd_export(nbd_server(server, &scratch, ""), "disk", "").start();
    look(&scratch);
    let log = server.log();
    assert!(log.contains("is read from its journal"), "{log}");
    server.stop();
    assert_eq!(states(&scratch.path("run/journals")), ["needed"]);
    // What the log advises.
    let mut check = Command::new(daemon());
    check.env("RUNTIME_DIRECTORY", path("run")).args(["check", "--repair", "all", &image]);
    assert!(check.output().expect("it runs").status.success());
    let reads = commands().collect::<Vec<_>>();
    client_output(&scratch, "qemu-io", &args(&["-r", "-f", "qcow2"], &reads, &overlay));
}

/// Block devices have no inodes. Another device may have the number of one that was inactive.
#[test]
fn a_copy_on_another_device_leaves_the_journal_to_the_original() {
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let (file, other) = (scratch.path("original"), scratch.path("other"));
    let [original, copy] = [&file, &other].map(|file| all.attach(file, 8 << 20));
    let create = ["create", "-q", "-f", "qcow2", original.path(), "64M"];
    client_output(&scratch, "qemu-img", &create);
    let on = |name, path: &str| daemon_on(&scratch, name, Some("run"), "host_device", path);
    write_and_kill(&scratch, on("killed", original.path()).start());
    fs::write(copy.path(), fs::read(original.path()).expect("a device")).expect("a copy");
    let (status, log) = on("copy", copy.path()).run();
    assert!(
        !status.success() && log.contains(&format!("is a copy of '{}'", original.path())),
        "{log}"
    );
    let in_file = scratch.path("copy.qcow2").display().to_string();
    fs::write(&in_file, fs::read(original.path()).expect("a device")).expect("a copy");
    let (status, log) = daemon_on(&scratch, "file", Some("run"), "file", &in_file).run();
    assert!(
        !status.success() && log.contains(&format!("is a copy of '{}'", original.path())),
        "{log}"
    );
    let number = original.path().to_owned();
    drop((original, copy));
    let other = all.attach_again(&other);
    let original = all.attach_again(&file);
    assert_eq!(other.path(), number, "the lowest number that is free");
    File::options()
        .write(true)
        .open(&number)
        .and_then(|file| file.write_all_at(&[0; 65536], 0))
        .expect("a device");
    let server = on("moved", original.path()).start();
    look(&scratch);
    server.stop();
}
