//! Journals of qcow2 images that killed daemons have left.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{Scratch, Server, ServerCommand, daemon};
use nix::sys::signal::Signal;
use serde_json::Value;

/// A daemon with `disk.qcow2`, and its journals in that folder of the scratch folder, or in the user's.
fn start(scratch: &Scratch, name: &'static str, runtime: Option<&str>) -> Server {
    let path = scratch.path("disk.qcow2");
    let disk = format!("qcow2,node-name=disk,file.driver=file,file.filename={}", path.display());
    let command = ServerCommand::new(scratch).named(name).arg("--blockdev").arg(disk);
    let command = match runtime {
        Some(folder) => {
            let folder = scratch.path(folder);
            fs::create_dir_all(&folder).expect("a folder");
            command.env("RUNTIME_DIRECTORY", folder.display().to_string())
        }
        None => command,
    };
    nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on").start()
}

/// Makes an image. A daemon answers writes to it, and is killed before a flush.
fn left(scratch: &Scratch, runtime: Option<&str>) {
    let create = ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"];
    client_output(scratch, "qemu-img", &create);
    let server = start(scratch, "killed", runtime);
    // The end by a signal, so that nothing is flushed.
    let writes = commands("write").chain(["abort".to_owned()]).collect::<Vec<_>>();
    let output =
        client(scratch, "qemu-io", &args(&["-f", "raw"], &writes, &nbd_uri(scratch, "disk")));
    assert_eq!(output.status.signal(), Some(Signal::SIGABRT as i32));
    server.kill();
}

/// 64 commands of qemu-io.
fn commands(what: &str) -> impl Iterator<Item = String> {
    (0..64).map(move |n| format!("{what} -P 7 {n}M 64k"))
}

fn args<'a>(options: &[&'a str], commands: &'a [String], uri: &'a str) -> Vec<&'a str> {
    let mut args = options.to_vec();
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(uri);
    args
}

/// Reads what was [`left`].
fn look(scratch: &Scratch) {
    let reads = commands("read").collect::<Vec<_>>();
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
    fs::remove_file(scratch.path("disk.qcow2")).expect("an image");
    assert_eq!(states(&folder), ["image-missing"]);
    assert!(journals(&folder, &["--clear"]).status.success());
    assert!(states(&folder).is_empty());
}
