//! Persistent dirty bitmaps after a kill of the daemon: they are right, unless something that sets no bits came in between.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    Mounted, Qmp, Scratch, Server, ServerCommand, daemon, eventually, merged, tied_command, tool,
};
use serde_json::{Value, json};

const KIB: u64 = 1024;
/// The number of a journal's last commit.
const COMMITTED: u64 = 64;

/// A daemon with the disk, and journals in `run`.
fn start(scratch: &Scratch, name: &'static str, more: &str) -> Server {
    let disk = scratch.path("disk.qcow2");
    let disk =
        format!("qcow2,node-name=disk,file.driver=file,file.filename={}{more}", disk.display());
    let runtime = scratch.path("run").display().to_string();
    let command = ServerCommand::new(scratch).named(name).monitor("qmp");
    let command = command.env("RUNTIME_DIRECTORY", runtime).arg("--blockdev").arg(disk);
    let writable = if more.is_empty() { ",writable=on" } else { "" };
    nbd_export(nbd_server(command, scratch, ""), "disk", writable).start()
}

/// An image with the bitmaps "stored" and "off", of which the second does not record.
fn image(scratch: &Scratch) {
    fs::create_dir(scratch.path("run")).expect("a folder");
    for arguments in [
        &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"][..],
        &["bitmap", "--add", "disk.qcow2", "stored"],
        &["bitmap", "--add", "--disable", "disk.qcow2", "off"],
    ] {
        client_output(scratch, "qemu-img", arguments);
    }
}

fn write(scratch: &Scratch, what: &str) {
    client_output(scratch, "qemu-io", &["-f", "raw", &nbd_uri(scratch, "disk"), "-c", what]);
}

/// The bitmaps that a daemon lists: names, bytes, and whether they record. `None` instead of bytes: inconsistent.
fn bitmaps(server: &Server) -> Vec<(String, Option<u64>, bool)> {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("a list");
    let disk = nodes.iter().find(|node| node["node-name"] == "disk").expect("the disk");
    let all = disk["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
    let tell = |bitmap: &Value| {
        let count = bitmap["count"].as_u64().filter(|_| bitmap.get("inconsistent").is_none());
        let name = bitmap["name"].as_str().expect("a name").to_owned();
        (name, count, bitmap["recording"] == true)
    };
    let mut all: Vec<_> = all.iter().map(tell).collect();
    all.sort();
    all
}

fn in_folder(scratch: &Scratch, prefix: &str) -> Vec<PathBuf> {
    let folder = fs::read_dir(scratch.path("run/journals")).expect("the folder of journals");
    let paths = folder.map(|entry| entry.expect("a file").path());
    let is_it = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    };
    paths.filter(is_it).collect()
}

/// Kills a daemon. The kernel releases the locks of its image a little later.
fn kill(scratch: &Scratch, server: Server) {
    server.kill();
    until_unlocked(scratch);
}

fn until_unlocked(scratch: &Scratch) {
    eventually("the image without locks", || {
        let info = client(scratch, "qemu-img", &["info", "disk.qcow2"]);
        info.status.success().then_some(())
    });
}

/// Has a daemon go through that, kills the last one, has `between` happen, and starts another one.
fn after_a_kill_of(
    scratch: &Scratch,
    use_it: impl FnOnce(Server) -> Server,
    between: impl FnOnce(),
) -> Vec<(String, Option<u64>, bool)> {
    image(scratch);
    let server = use_it(start(scratch, "first", ""));
    kill(scratch, server);
    between();
    let server = start(scratch, "second", "");
    let found = bitmaps(&server);
    server.stop();
    client_output(scratch, "qemu-img", &["check", "-q", "disk.qcow2"]);
    let all_right = found.iter().all(|(_, count, _)| count.is_some());
    assert!(!all_right || in_folder(scratch, "").is_empty(), "a closed image needs no files");
    found
}

/// The same for one daemon.
fn after_a_kill(
    scratch: &Scratch,
    use_it: impl FnOnce(&Server),
    between: impl FnOnce(),
) -> Vec<(String, Option<u64>, bool)> {
    let use_it = |server| {
        use_it(&server);
        server
    };
    after_a_kill_of(scratch, use_it, between)
}

fn named(name: &str) -> Value {
    json!({"node": "disk", "name": name})
}

fn command(server: &Server, command: &str, arguments: Value) {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute(&format!("block-dirty-bitmap-{command}"), arguments);
}

fn add(server: &Server, name: &str, more: Value) {
    let bitmap = merged(json!({"node": "disk", "name": name, "persistent": true}), &more);
    Qmp::connect(&server.socket("qmp")).execute("block-dirty-bitmap-add", bitmap);
}

/// A bitmap that is right.
fn of(name: &str, kib: u64, records: bool) -> (String, Option<u64>, bool) {
    (name.to_owned(), Some(kib * KIB), records)
}

#[test]
fn bitmaps_are_right_after_a_kill() {
    // Nothing was written. The image says so to other programs as well: its bitmaps are in use.
    let scratch = Scratch::new();
    let found = after_a_kill(
        &scratch,
        |_| {},
        || {
            let told = client_output(&scratch, "qemu-img", &["info", "disk.qcow2"]);
            assert_eq!(told.matches("in-use").count(), 2, "{told}");
        },
    );
    assert_eq!(found, [of("off", 0, false), of("stored", 0, true)]);
    // All commands, and a bitmap that the image has never had.
    let scratch = Scratch::new();
    let used = |server: &Server| {
        write(&scratch, "write 0 64k");
        add(server, "new", json!({"granularity": 4096}));
        add(server, "gone", json!({}));
        add(server, "paused", json!({}));
        write(&scratch, "write 1M 100k");
        command(server, "merge", json!({"node": "disk", "target": "off", "bitmaps": ["stored"]}));
        command(server, "remove", named("gone"));
        command(server, "disable", named("paused"));
        // What was taken stays after a kill, until bits are taken again.
        (0..2).for_each(|_| command(server, "clear", named("stored")));
    };
    let looked_at = || {
        let server = start(&scratch, "reads", ",read-only=on");
        assert!(bitmaps(&server).iter().all(|(_, count, _)| count.is_none()));
        server.stop();
        client_output(&scratch, "qemu-io", &["-r", "disk.qcow2", "-c", "read 0 64k"]);
    };
    let found = after_a_kill(&scratch, used, looked_at);
    let expected = [
        of("new", 100, true),
        of("off", 192, false),
        of("paused", 128, false),
        of("stored", 0, true),
    ];
    assert_eq!(found, expected);
    let scratch = Scratch::new();
    let found = after_a_kill(
        &scratch,
        |_| write(&scratch, "write 0 64k"),
        || {
            let server = start(&scratch, "killed", "");
            write(&scratch, "write 7M 4k");
            kill(&scratch, server);
        },
    );
    assert_eq!(found, [of("off", 0, false), of("stored", 128, true)]);
}

/// The new process goes on with the files of the old one.
#[test]
fn bitmaps_are_right_after_upgrades_and_a_kill() {
    let scratch = Scratch::new();
    let used = |mut server: Server| {
        add(&server, "new", json!({"granularity": 4096}));
        write(&scratch, "write 0 64k");
        // What was taken is there after a kill of the next process as well.
        command(&server, "clear", named("stored"));
        server.upgrade();
        write(&scratch, "write 1M 4k");
        add(&server, "later", json!({"disabled": true}));
        command(&server, "enable", named("off"));
        server.upgrade();
        command(&server, "enable", named("later"));
        write(&scratch, "write 2M 4k");
        server
    };
    let found = after_a_kill_of(&scratch, used, || {});
    let expected = [
        of("later", 64, true),
        of("new", 64 + 4 + 4, true),
        of("off", 64, true),
        of("stored", 64 + 64 + 64, true),
    ];
    assert_eq!(found, expected);
}

/// Whichever process is killed, and whenever: no bitmap claims to be right and lacks a write.
#[test]
fn a_kill_within_an_upgrade_leaves_bitmaps_right_or_inconsistent() {
    for delay_ms in [0, 30, 60, 90, 120, 200] {
        let scratch = Scratch::new();
        image(&scratch);
        let server = start(&scratch, "first", "");
        write(&scratch, "write 0 64k");
        let successor = server.kill_in_upgrade(Duration::from_millis(delay_ms));
        let goes_on = successor.is_some();
        if let Some(successor) = successor {
            write(&scratch, "write 4M 64k");
            successor.kill();
        }
        until_unlocked(&scratch);
        let server = start(&scratch, "second", "");
        let right = [of("off", 0, false), of("stored", if goes_on { 128 } else { 64 }, true)];
        let inconsistent = ["off", "stored"].map(|name| (name.to_owned(), None, false));
        let found = bitmaps(&server);
        assert!(found == right || !goes_on && found == inconsistent, "{delay_ms} ms: {found:?}");
        server.stop();
    }
}

/// Another node takes the place of the one that has the image open, or could not.
#[test]
fn bitmaps_are_right_after_a_reopening_and_a_kill() {
    for fails in [false, true] {
        let scratch = Scratch::new();
        let path = scratch.path("disk.qcow2");
        let file = json!({"driver": "file", "filename": path});
        let options = json!({"driver": "qcow2", "node-name": "disk", "discard": "unmap",
            "file": file});
        let used = |server: &Server| {
            add(server, "new", json!({}));
            write(&scratch, "write 0 64k");
            command(server, "clear", named("stored"));
            let mut qmp = Qmp::connect(&server.socket("qmp"));
            match fails {
                false => drop(qmp.execute("blockdev-reopen", json!({"options": [options]}))),
                true => {
                    let mut options = options.clone();
                    options["file"]["filename"] =
                        scratch.path("other").display().to_string().into();
                    qmp.refused("blockdev-reopen", json!({"options": [options]}));
                }
            }
            write(&scratch, "write 1M 64k");
            add(server, "later", json!({}));
            write(&scratch, "discard 2M 64k");
        };
        let found = after_a_kill(&scratch, used, || {});
        let discarded = if fails { 0 } else { 64 };
        let expected = [
            of("later", discarded, true),
            of("new", 128 + discarded, true),
            of("off", 0, false),
            of("stored", 128 + discarded, true),
        ];
        assert_eq!(found, expected, "{fails}");
    }
}

/// A transaction that is undone leaves bitmaps as they were, also those that it removes from the image.
#[test]
fn bitmaps_are_right_after_a_transaction_that_fails_and_a_kill() {
    let scratch = Scratch::new();
    let used = |server: &Server| {
        write(&scratch, "write 0 64k");
        let action = |kind: &str, data: Value| json!({"type": kind, "data": data});
        let merge = json!({"node": "disk", "target": "off", "bitmaps": ["stored"]});
        let mut added = named("added");
        added["persistent"] = true.into();
        let actions = json!({"actions": [
            action("block-dirty-bitmap-merge", merge),
            action("block-dirty-bitmap-enable", named("off")),
            action("block-dirty-bitmap-clear", named("stored")),
            action("block-dirty-bitmap-remove", named("stored")),
            action("block-dirty-bitmap-add", added),
            action("abort", json!({})),
        ]});
        Qmp::connect(&server.socket("qmp")).refused("transaction", actions);
        write(&scratch, "write 1M 64k");
    };
    let found = after_a_kill(&scratch, used, || {});
    assert_eq!(found, [of("off", 0, false), of("stored", 128, true)]);
}

/// The bitmaps of a larger or smaller disk are others, also what was taken from them.
#[test]
fn bitmaps_are_right_after_resizes_and_a_kill() {
    let scratch = Scratch::new();
    let used = |server: &Server| {
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        add(server, "new", json!({"granularity": 4096}));
        write(&scratch, "write 0 64k");
        command(server, "clear", named("stored"));
        for (size, offset) in [(16, 2), (32, 4), (24, 6)] {
            let exports = qmp.execute("query-block-exports", json!({}));
            qmp.execute("block-export-del", json!({"id": exports[0]["id"], "mode": "hard"}));
            qmp.wait_for("BLOCK_EXPORT_DELETED");
            qmp.execute("block_resize", json!({"node-name": "disk", "size": size << 20}));
            let export = json!({"type": "nbd", "id": format!("of-{size}"), "node-name": "disk",
                "name": "disk", "writable": true});
            qmp.execute("block-export-add", export);
            write(&scratch, &format!("write {offset}M 4k"));
        }
        write(&scratch, "write 24572k 4k");
    };
    let found = after_a_kill(&scratch, used, || {});
    // All that the disk has grown by is dirty in bitmaps that record.
    let grown = 16 << 10;
    let new = of("new", 64 + 3 * 4 + grown, true);
    assert_eq!(found, [new, of("off", 0, false), of("stored", 64 + 3 * 64 + grown, true)]);
}

/// What another program writes sets no bits here. A missing file, or a copy of the image, may be of another time.
#[test]
fn bitmaps_that_may_lack_a_write_are_inconsistent() {
    type Between = fn(&Scratch);
    let cases: [(&str, Between); 5] = [
        ("QEMU wrote", |scratch| {
            client_output(scratch, "qemu-io", &["disk.qcow2", "-c", "write 0 64k"]);
        }),
        ("qemu-img opened it for writing", |scratch| {
            client_output(scratch, "qemu-img", &["bitmap", "--add", "disk.qcow2", "other"]);
            client_output(scratch, "qemu-img", &["bitmap", "--remove", "disk.qcow2", "other"]);
        }),
        ("the files of the bitmaps are gone", |scratch| {
            in_folder(scratch, "bitmap-")
                .iter()
                .for_each(|path| fs::remove_file(path).expect("it"));
        }),
        ("the journal is gone", |scratch| {
            in_folder(scratch, "qcow2-").iter().for_each(|path| fs::remove_file(path).expect("it"));
        }),
        ("a version that does not know the files had the journal", |scratch| {
            let [journal] = &in_folder(scratch, "qcow2-")[..] else { panic!("one journal") };
            let journal = fs::File::options().read(true).write(true).open(journal).expect("it");
            let mut commit = [0; 8];
            journal.read_exact_at(&mut commit, COMMITTED).expect("a number");
            let next = u64::from_ne_bytes(commit) + 1;
            journal.write_all_at(&next.to_ne_bytes(), COMMITTED).expect("it is ours");
        }),
    ];
    for (name, between) in cases {
        let scratch = Scratch::new();
        let found =
            after_a_kill(&scratch, |_| write(&scratch, "write 0 64k"), || between(&scratch));
        let inconsistent = ["off", "stored"].map(|name| (name.to_owned(), None, false));
        assert_eq!(found, inconsistent, "{name}");
    }
}

/// A commit makes its base longer. What it writes there is noted, also after a kill.
#[test]
fn a_commit_into_a_shorter_base_is_noted() {
    let scratch = Scratch::new();
    let size = 1u64 << 30;
    let used = |server: &Server| {
        let top = scratch.path("top.qcow2").display().to_string();
        client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", &top, "1G"]);
        client_output(&scratch, "qemu-io", &["-c", "write 4M 64k", &top]);
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let exports = qmp.execute("query-block-exports", json!({}));
        qmp.execute("block-export-del", json!({"id": exports[0]["id"], "mode": "hard"}));
        qmp.wait_for("BLOCK_EXPORT_DELETED");
        let file = json!({"driver": "file", "filename": top});
        let top = json!({"driver": "qcow2", "node-name": "top", "backing": "disk", "file": file});
        qmp.execute("blockdev-add", top);
        qmp.execute("block-commit", json!({"job-id": "j", "device": "top"}));
        qmp.wait_for("BLOCK_JOB_READY");
        qmp.execute("job-complete", json!({"id": "j"}));
        qmp.wait_for("BLOCK_JOB_COMPLETED");
        let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let mut nodes = nodes.as_array().expect("a list").iter();
        let disk = nodes.find(|node| node["node-name"] == "disk").expect("it is there");
        assert_eq!(disk["image"]["virtual-size"], size, "{disk}");
    };
    let found = after_a_kill(&scratch, used, || {});
    // What was committed, and what the base has grown by.
    let grown = (size >> 10) - 8192;
    assert_eq!(found, [of("off", 0, false), of("stored", grown + 64, true)]);
}

/// A repair may drop data, and a copy may be of another time.
#[test]
fn bitmaps_of_a_repaired_or_copied_image_are_inconsistent() {
    let inconsistent = ["off", "stored"].map(|name| (name.to_owned(), None, false));
    let scratch = Scratch::new();
    let check = || {
        let mut check = Command::new(daemon());
        check.args(["check", "--repair", "all"]).arg(scratch.path("disk.qcow2"));
        check.env("RUNTIME_DIRECTORY", scratch.path("run"));
        assert!(check.output().expect("it runs").status.success());
    };
    assert_eq!(after_a_kill(&scratch, |_| write(&scratch, "write 0 64k"), check), inconsistent);
    let scratch = Scratch::new();
    image(&scratch);
    let server = start(&scratch, "first", "");
    write(&scratch, "write 0 64k");
    kill(&scratch, server);
    let [disk, copy] = ["disk.qcow2", "copy.qcow2"].map(|name| scratch.path(name));
    fs::copy(&disk, &copy).expect("a copy");
    let nodes = ServerCommand::new(&scratch).named("other").monitor("qmp");
    let nodes = nodes.env("RUNTIME_DIRECTORY", scratch.path("run").display().to_string()).start();
    let mut qmp = Qmp::connect(&nodes.socket("qmp"));
    let of_copy = json!({"driver": "qcow2", "node-name": "copy",
        "file": {"driver": "file", "filename": copy}});
    let refused = qmp.refused("blockdev-add", of_copy);
    assert!(refused.contains("this is a copy"), "{refused}");
    nodes.stop();
    // The image itself is as it was.
    let server = start(&scratch, "second", "");
    assert_eq!(bitmaps(&server), [of("off", 0, false), of("stored", 64, true)]);
    server.stop();
}

/// A backup by a bitmap that the kill interrupts: the next one has all parts of both.
#[test]
fn a_backup_that_a_kill_interrupts_keeps_its_bits() {
    let scratch = Scratch::new();
    let used = |server: &Server| {
        // More than the first copy has.
        write(&scratch, "write 0 2M");
        client_output(&scratch, "qemu-img", &["create", "-q", "-f", "raw", "backup.img", "8M"]);
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let path = scratch.path("backup.img");
        let target = json!({"driver": "file", "node-name": "target", "filename": path});
        qmp.execute("blockdev-add", target);
        let slow = json!({"job-id": "j", "device": "disk", "target": "target",
            "sync": "incremental", "bitmap": "stored", "speed": 65536});
        qmp.execute("blockdev-backup", slow);
        write(&scratch, "write 4M 64k");
        let job = qmp.execute("query-jobs", json!({}));
        assert_eq!(job[0]["status"], "running", "{job}");
    };
    let found = after_a_kill(&scratch, used, || {});
    assert_eq!(found, [of("off", 0, false), of("stored", 2048 + 64, true)]);
}

/// Two backups at the same time, each by its own bitmap: each bitmap keeps the bits that its backup has taken.
#[test]
fn two_backups_that_a_kill_interrupts_keep_their_bits() {
    let scratch = Scratch::new();
    let used = |server: &Server| {
        write(&scratch, "write 0 1M");
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let other = json!({"node": "disk", "name": "other", "persistent": true});
        qmp.execute("block-dirty-bitmap-add", other);
        write(&scratch, "write 2M 2M");
        for (target, bitmap) in [("first", "stored"), ("second", "other")] {
            client_output(&scratch, "qemu-img", &["create", "-q", "-f", "raw", target, "8M"]);
            let path = scratch.path(target);
            let node = json!({"driver": "file", "node-name": target, "filename": path});
            qmp.execute("blockdev-add", node);
            let slow = json!({"job-id": target, "device": "disk", "target": target,
                "sync": "incremental", "bitmap": bitmap, "speed": 65536});
            qmp.execute("blockdev-backup", slow);
            write(&scratch, "write 4M 64k");
        }
        let jobs = qmp.execute("query-jobs", json!({}));
        assert_eq!(
            (&jobs[0]["status"], &jobs[1]["status"]),
            (&json!("running"), &json!("running"))
        );
    };
    let found = after_a_kill(&scratch, used, || {});
    let kib = [("off", 0, false), ("other", 2048 + 64, true), ("stored", 3072 + 64, true)];
    assert_eq!(found, kib.map(|(name, kib, records)| of(name, kib, records)));
}

/// A folder without room: bitmaps work as without the folder, and the log says so once.
#[test]
fn without_room_for_its_bits_a_bitmap_is_inconsistent_after_a_kill() {
    let scratch = Scratch::new();
    let folder = scratch.path("small");
    let Some(_mounted) = Mounted::new(&folder, "256k") else {
        return test_requirements::untested(test_requirements::Needs::Root, "only root can mount");
    };
    client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "8G"]);
    let start = |name: &'static str| {
        let disk = scratch.path("disk.qcow2").display().to_string();
        let disk = format!("qcow2,node-name=disk,file.driver=file,file.filename={disk}");
        let command = ServerCommand::new(&scratch).named(name).monitor("qmp");
        let command = command.env("RUNTIME_DIRECTORY", folder.display().to_string());
        let command = command.arg("--blockdev").arg(disk);
        nbd_export(nbd_server(command, &scratch, ""), "disk", ",writable=on").start()
    };
    let server = start("first");
    add(&server, "coarse", json!({}));
    // 2 MiB of bits.
    add(&server, "fine", json!({"granularity": 512}));
    add(&server, "fine-too", json!({"granularity": 512}));
    write(&scratch, "write 0 64k");
    assert_eq!(server.log().matches("cannot be kept in memory").count(), 1, "{}", server.log());
    let all = [of("coarse", 64, true), of("fine", 64, true), of("fine-too", 64, true)];
    assert_eq!(bitmaps(&server), all);
    kill(&scratch, server);
    let server = start("second");
    assert_eq!(bitmaps(&server), all[..1]);
    server.stop();
    assert!(client(&scratch, "qemu-img", &["check", "-q", "disk.qcow2"]).status.success());
}

/// The log says that a kill loses bitmaps of an image that is not in a regular file.
#[test]
fn bitmaps_of_an_image_on_a_server_do_not_survive_a_kill() {
    let scratch = Scratch::new();
    image(&scratch);
    let serve = || {
        let mut command = tied_command(&tool("qemu-nbd"));
        command.args(["-t", "-f", "raw", "-k"]).arg(scratch.path("far"));
        let server = command.arg(scratch.path("disk.qcow2")).spawn().expect("it starts");
        eventually("qemu-nbd", || UnixStream::connect(scratch.path("far")).ok());
        server
    };
    let end = |mut server: Child| {
        server.kill().expect("our child");
        server.wait().expect("our child");
        until_unlocked(&scratch);
    };
    let start = |name| {
        let far = scratch.path("far").display().to_string();
        let disk = "qcow2,node-name=disk,file.driver=nbd,file.server.type=unix,file.server.path=";
        let command = ServerCommand::new(&scratch).named(name).monitor("qmp");
        let command = command.env("RUNTIME_DIRECTORY", scratch.path("run").display().to_string());
        command.arg("--blockdev").arg(format!("{disk}{far}")).start()
    };
    let says = |server: &Server, what: &str| {
        assert_eq!(server.log().matches(what).count(), 1, "{}", server.log());
    };
    let far = serve();
    let server = start("first");
    says(
        &server,
        "dirty bitmaps of node 'disk' do not survive a kill: its image is not in a regular",
    );
    add(&server, "new", json!({}));
    says(
        &server,
        "bitmap 'new' of node 'disk' does not survive a kill: its image is not in a regular",
    );
    server.kill();
    end(far);
    let far = serve();
    let server = start("second");
    // The new one is not in the image, as with QSD.
    let inconsistent = |name: &str| (name.to_owned(), None, false);
    assert_eq!(bitmaps(&server), ["off", "stored"].map(inconsistent));
    server.stop();
    end(far);
}

/// The log says that a kill loses bitmaps of an image that can have no journal.
#[test]
fn bitmaps_in_small_clusters_do_not_survive_a_kill() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("run")).expect("a folder");
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=2048", "disk.qcow2", "1M"];
    client_output(&scratch, "qemu-img", &create);
    let says = |server: &Server, what: &str| {
        assert_eq!(server.log().matches(what).count(), 1, "{}", server.log());
    };
    let server = start(&scratch, "first", "");
    add(&server, "b", json!({}));
    says(&server, "bitmap 'b' of node 'disk' does not survive a kill: its image has no journal");
    server.stop();
    let server = start(&scratch, "second", "");
    says(&server, "dirty bitmaps of node 'disk' do not survive a kill: its image has no room");
    add(&server, "new", json!({}));
    kill(&scratch, server);
    let server = start(&scratch, "third", "");
    assert_eq!(bitmaps(&server), [("b".to_owned(), None, false)]);
    says(&server, "are inconsistent, as it was not closed");
    server.stop();
}
