//! Full and incremental backups of a qcow2 disk in use, by jobs and by a client that reads over NBD. The daemon is killed
//! between any two steps: each backup is right, also an incremental one after a kill.

use crate::common;

use common::peers::run;
use common::wait_for_end;
use integration::nbd::{client_output, nbd_export, nbd_server, nbd_uri};
use integration::{Qmp, Scratch, Server, ServerCommand, merged};
use serde_json::{Value, json};

const SIZE: u64 = 32 << 20;
const BITMAP: &str = "since-last-backup";

/// Starts a daemon with the disk, which clients of `nbd_uri` write to.
fn start(scratch: &Scratch, name: &'static str) -> Server {
    let disk = scratch.path("disk.qcow2");
    let disk = format!("qcow2,node-name=disk,file.driver=file,file.filename={}", disk.display());
    let command =
        ServerCommand::new(scratch).named(name).monitor("qmp").arg("--blockdev").arg(disk);
    nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on").start()
}

/// A guest's writes: some places, with data that tells the round.
fn write(scratch: &Scratch, round: u64) {
    let mut commands = vec!["-f".to_owned(), "raw".to_owned(), nbd_uri(scratch, "disk")];
    for nth in 0..40 {
        let at = (round * 7919 + nth * 104_729) % (SIZE / 4096) * 4096;
        commands.extend(["-c".to_owned(), format!("write -P {} {at} 4k", 1 + (round + nth) % 255)]);
    }
    commands.extend(["-c".to_owned(), "flush".to_owned()]);
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    client_output(scratch, "qemu-io", &commands);
}

/// The disk as its clients see it, in a file.
fn copy_of_disk(scratch: &Scratch, name: &str) {
    let uri = nbd_uri(scratch, "disk");
    client_output(scratch, "qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, name]);
}

fn compare(scratch: &Scratch, one: &str, other: &str) {
    client_output(scratch, "qemu-img", &["compare", "-f", "raw", "-F", "raw", one, other]);
}

/// The bitmap, as the daemon tells of it.
fn bitmap(qmp: &mut Qmp) -> Option<Value> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let disk = nodes.as_array()?.iter().find(|node| node["node-name"] == "disk")?.clone();
    disk["dirty-bitmaps"].as_array()?.iter().find(|bitmap| bitmap["name"] == BITMAP).cloned()
}

/// How a backup is made.
trait Backup {
    /// Copies all, and begins the bitmap.
    fn full(&self, scratch: &Scratch, qmp: &mut Qmp);
    /// Copies what the bitmap has set, and begins anew.
    fn incremental(&self, scratch: &Scratch, qmp: &mut Qmp);
}

fn new_bitmap() -> Value {
    json!({"type": "block-dirty-bitmap-add",
        "data": {"node": "disk", "name": BITMAP, "persistent": true}})
}

/// `blockdev-backup` to `backup.img`.
struct Jobs;

impl Jobs {
    fn with_target(scratch: &Scratch, qmp: &mut Qmp, backup: impl FnOnce(&mut Qmp)) {
        let path = scratch.path("backup.img");
        qmp.execute(
            "blockdev-add",
            json!({"driver": "file", "node-name": "target", "filename": path}),
        );
        backup(qmp);
        wait_for_end(qmp, "j");
        qmp.execute("blockdev-del", json!({"node-name": "target"}));
    }
}

impl Backup for Jobs {
    fn full(&self, scratch: &Scratch, qmp: &mut Qmp) {
        Jobs::with_target(scratch, qmp, |qmp| {
            let job = json!({"job-id": "j", "device": "disk", "target": "target", "sync": "full",
                "x-perf": {"max-workers": 2, "max-chunk": 65536}});
            let actions = json!([new_bitmap(), {"type": "blockdev-backup", "data": job}]);
            qmp.execute("transaction", json!({"actions": actions}));
        });
    }

    fn incremental(&self, scratch: &Scratch, qmp: &mut Qmp) {
        Jobs::with_target(scratch, qmp, |qmp| {
            let job = json!({"job-id": "j", "device": "disk", "target": "target",
                "sync": "incremental", "bitmap": BITMAP});
            qmp.execute("blockdev-backup", job);
        });
    }
}

/// A client that copies over NBD while the guest is stopped.
struct Pull;

/// Copies what a context says is dirty, or all data if none is given, into `backup.img`.
const COPY: &str = "
import sys
c = nbd.NBD()
if context:
    c.add_meta_context(context)
c.connect_uri(uri)
size = c.get_size()
extents = []
def note(name, offset, entries, error):
    at = offset
    for length, flags in zip(entries[::2], entries[1::2]):
        if flags & 1:
            extents.append((at, length))
        at += length
    ends.append(at)
at = 0
while context and at < size:
    ends = []
    c.block_status(size - at, at, note)
    at = ends[-1]
if not context:
    extents = [(0, size)]
with open('backup.img', 'r+b') as backup:
    for at, length in extents:
        while length:
            part = min(length, 1 << 20)
            backup.seek(at)
            backup.write(c.pread(part, at))
            at, length = at + part, length - part
c.shutdown()
";

impl Pull {
    /// Has a client copy the disk, which nobody writes to meanwhile. `shown`: only what that bitmap has set.
    fn copy(scratch: &Scratch, qmp: &mut Qmp, shown: Option<&str>) {
        let mut export = json!({"type": "nbd", "id": "pull", "node-name": "disk", "name": "pull"});
        if let Some(name) = shown {
            export["bitmaps"] = json!([name]);
        }
        qmp.execute("block-export-add", export);
        let context = shown.map(|name| format!("qemu:dirty-bitmap:{name}")).unwrap_or_default();
        let given = format!("uri, context = {:?}, {context:?}", nbd_uri(scratch, "pull"));
        let path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
        client_output(scratch, "/usr/bin/env", &[path, "nbdsh", "-c", &given, "-c", COPY]);
        qmp.execute("block-export-del", json!({"id": "pull"}));
        qmp.wait_for("BLOCK_EXPORT_DELETED");
    }
}

impl Backup for Pull {
    fn full(&self, scratch: &Scratch, qmp: &mut Qmp) {
        let bitmap = new_bitmap();
        qmp.execute("block-dirty-bitmap-add", bitmap["data"].clone());
        Pull::copy(scratch, qmp, None);
    }

    fn incremental(&self, scratch: &Scratch, qmp: &mut Qmp) {
        let copied = json!({"node": "disk", "name": "copied"});
        let merge = json!({"node": "disk", "target": "copied", "bitmaps": [BITMAP]});
        let clear = json!({"node": "disk", "name": BITMAP});
        let actions = json!([
            {"type": "block-dirty-bitmap-add", "data": merged(copied.clone(), &json!({"disabled": true}))},
            {"type": "block-dirty-bitmap-merge", "data": merge},
            {"type": "block-dirty-bitmap-clear", "data": clear},
        ]);
        qmp.execute("transaction", json!({"actions": actions}));
        Pull::copy(scratch, qmp, Some("copied"));
        qmp.execute("block-dirty-bitmap-remove", copied);
    }
}

/// Makes a full backup and two incremental ones. Before the step of that number, the daemon is killed, or closed.
/// Returns how many full backups it took.
fn back_up(how: &dyn Backup, interrupted: usize, kill: bool) -> usize {
    let scratch = Scratch::new();
    let size = SIZE.to_string();
    client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", &size]);
    client_output(&scratch, "qemu-img", &["create", "-q", "-f", "raw", "backup.img", &size]);
    let mut server = start(&scratch, "first");
    let mut full = 0;
    for step in 0..6 {
        if step == interrupted {
            match kill {
                true => server.kill(),
                false => server.stop(),
            }
            server = start(&scratch, "second");
        }
        if step % 2 == 0 {
            write(&scratch, step as u64);
            continue;
        }
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let before = scratch.path("as-it-was.img").display().to_string();
        copy_of_disk(&scratch, &before);
        match bitmap(&mut qmp) {
            Some(bitmap) if bitmap.get("inconsistent").is_none() => {
                how.incremental(&scratch, &mut qmp);
            }
            unusable => {
                if unusable.is_some() {
                    let of = json!({"node": "disk", "name": BITMAP});
                    qmp.refused("block-dirty-bitmap-clear", of.clone());
                    qmp.execute("block-dirty-bitmap-remove", of);
                }
                how.full(&scratch, &mut qmp);
                full += 1;
            }
        }
        compare(&scratch, &before, "backup.img");
    }
    server.stop();
    run("qemu-img", scratch.dir(), &["check", "-q", "DIR/disk.qcow2"]);
    full
}

/// The bitmap survives the kill, so no further backup is a full one.
#[test]
fn backups_are_right_whenever_the_daemon_is_killed() {
    for interrupted in 1..6 {
        for how in [&Jobs as &dyn Backup, &Pull] {
            let full = back_up(how, interrupted, true);
            assert_eq!(full, 1, "killed before {interrupted}");
        }
    }
}

#[test]
fn a_daemon_that_is_restarted_goes_on_with_incremental_backups() {
    for interrupted in [2, 5] {
        for how in [&Jobs as &dyn Backup, &Pull] {
            assert_eq!(back_up(how, interrupted, false), 1, "stopped before {interrupted}");
        }
    }
}
