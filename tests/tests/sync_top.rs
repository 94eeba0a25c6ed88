//! Jobs that copy only what the topmost image stores (`sync=top`), and mirrors to targets without data (`target-is-zero`).

use crate::common;

use common::peers::{Peers, run};
use fastrand::Rng;
use integration::{Qmp, Scratch, ServerCommand};
use serde_json::{Value, json};

const SIZE: u64 = 4 << 20;
/// From here on, only the backing image has data.
const LOWER: u64 = SIZE - (256 << 10);

/// Random places of data and zeroes: commands of qemu-io.
fn random_writes(seed: u64, pattern: u8) -> Vec<String> {
    let mut random = Rng::with_seed(seed);
    let mut commands = Vec::new();
    for _ in 0..12 {
        let at = random.u64(..LOWER / 512) * 512;
        let len = (1 + random.u64(..400)) * 512;
        let len = len.min(LOWER - at);
        commands.push(match random.u64(..4) {
            0 => format!("write -z {at} {len}"),
            _ => format!("write -P {pattern} {at} {len}"),
        });
    }
    commands
}

fn io(peers: &mut Peers, file: &str, commands: &[String]) {
    let mut arguments = vec!["-f", "qcow2"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command.as_str()]));
    arguments.push(file);
    peers.run("qemu-io", &arguments);
}

/// `base` below `top` of small clusters, and a raw target full of other data.
fn make_images(peers: &mut Peers, seed: u64, cluster: &str) {
    let size = SIZE.to_string();
    let cluster = format!("cluster_size={cluster}");
    let backing = ["-b", "base.qcow2", "-F", "qcow2", "DIR/top.qcow2", &size];
    let create = ["create", "-q", "-f", "qcow2"];
    peers.run("qemu-img", &[&create[..], &["DIR/base.qcow2", &size]].concat());
    let mut base = random_writes(seed, 1);
    base.push(format!("write -P 3 {LOWER} 256k"));
    io(peers, "DIR/base.qcow2", &base);
    peers.run("qemu-img", &[&create[..], &["-o", &cluster], &backing].concat());
    io(peers, "DIR/top.qcow2", &random_writes(seed + 1000, 2));
    for side in peers.sides() {
        std::fs::write(side.path("target.raw"), vec![9; SIZE as usize]).expect("a target");
    }
}

fn node(name: &str, driver: &str, file: &str) -> Value {
    let file = json!({"driver": "file", "filename": format!("DIR/{file}")});
    json!({"driver": driver, "node-name": name, "file": file})
}

/// The device is the image, or a filter above it. The target is raw, or an image of the cluster size that is given.
fn compare(seed: u64, command: &str, device: &str, source_cluster: &str, target: Option<&str>) {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    make_images(&mut peers, seed, source_cluster);
    let size = SIZE.to_string();
    if let Some(cluster) = target {
        let cluster = format!("cluster_size={cluster}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &cluster];
        let backing = ["-b", "base.qcow2", "-F", "qcow2", "DIR/target.qcow2", &size];
        peers.run("qemu-img", &[&create[..], &backing].concat());
    }
    peers.execute("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    peers.execute("blockdev-add", node("top", "qcow2", "top.qcow2"));
    let filter =
        json!({"driver": "throttle", "node-name": "limited", "throttle-group": "g", "file": "top"});
    if device == "limited" {
        peers.execute("blockdev-add", filter);
    }
    let options = match target {
        Some(_) => {
            let mut options = node("target", "qcow2", "target.qcow2");
            // The backing image is not opened, and cannot fill what is not copied of a cluster.
            options["backing"] = Value::Null;
            options
        }
        None => node("target", "raw", "target.raw"),
    };
    peers.execute("blockdev-add", options);
    let mut job = json!({"job-id": "j", "device": device, "target": "target", "sync": "top"});
    let blocking = command == "blockdev-mirror" && seed.is_multiple_of(2);
    if blocking {
        job["copy-mode"] = "write-blocking".into();
    }
    if command == "blockdev-mirror" {
        // QSD's jobs miss writes of exports that are added later.
        peers.serve(device);
    }
    peers.execute(command, job);
    if command == "blockdev-mirror" {
        peers.wait_for("BLOCK_JOB_READY");
        // Small writes, to what the topmost image has and to what it has not.
        peers.io(&["write -P 5 1k 1k", "write -P 6 4000k 1k", "write -z 2000k 1k"]);
        peers.execute("job-complete", json!({"id": "j"}));
    }
    peers.wait_for("BLOCK_JOB_COMPLETED");
    peers.stop();
    let what = format!("{command} of {device}, seed {seed}, {source_cluster} to {target:?}");
    if target.is_none() {
        let [ours, theirs] =
            peers.sides().map(|side| std::fs::read(side.path("target.raw")).expect("a target"));
        let differs = (0..ours.len()).find(|at| ours[*at] != theirs[*at]);
        let differs = differs.map(|at| (at, ours[at], theirs[at]));
        assert_eq!(differs, None, "{what}: where, ours, theirs");
        assert!(ours.contains(&9) && ours.contains(&2), "{what}");
        return;
    }
    for side in peers.sides().into_iter().take(if blocking { 1 } else { 2 }) {
        run("qemu-img", &side.folder, &["check", "-q", "DIR/target.qcow2"]);
        let same = ["compare", "-q", "DIR/top.qcow2", "DIR/target.qcow2"];
        run("qemu-img", &side.folder, &same);
    }
    if blocking {
        // QSD copies only the written bytes, and the rest of the target's cluster becomes zeroes.
        return;
    }
    let [ours, theirs] = peers.sides().map(|side| {
        let map = run("qemu-img", &side.folder, &["map", "--output=json", "DIR/target.qcow2"]);
        let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
        let depth = |extent: &Value| (extent["start"].clone(), extent["depth"].clone());
        let mut depths: Vec<_> = map.iter().map(depth).collect();
        depths.dedup_by(|next, before| next.1 == before.1);
        depths
    });
    assert_eq!(ours, theirs, "{what}");
}

#[test]
fn a_backup_of_the_top_is_as_qemu_storage_daemons() {
    compare(1, "blockdev-backup", "top", "65536", None);
    compare(2, "blockdev-backup", "limited", "4096", None);
    compare(3, "blockdev-backup", "top", "4096", Some("131072"));
}

#[test]
fn a_mirror_of_the_top_is_as_qemu_storage_daemons() {
    compare(5, "blockdev-mirror", "limited", "4096", None);
    compare(7, "blockdev-mirror", "top", "4096", Some("131072"));
    compare(8, "blockdev-mirror", "top", "131072", Some("4096"));
}

/// Zeroes are not written to a target that is said to have them, but over data that the mirror has written.
#[test]
fn zeroes_are_not_written_to_a_target_that_has_them() {
    for (is_zero, mode) in [(false, "background"), (true, "background"), (true, "write-blocking")] {
        let scratch = Scratch::new();
        let dir = scratch.dir().to_owned();
        run("qemu-img", &dir, &["create", "-q", "-f", "qcow2", "DIR/source.qcow2", "4M"]);
        run("qemu-io", &dir, &["-f", "qcow2", "-c", "write -P 1 1M 64k", "DIR/source.qcow2"]);
        std::fs::write(dir.join("target.raw"), vec![9; SIZE as usize]).expect("a target");
        let server = ServerCommand::new(&scratch).monitor("qmp").start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        for (name, driver) in [("source", "qcow2"), ("target", "raw")] {
            let file = json!({"driver": "file", "filename": dir.join(format!("{name}.{driver}"))});
            qmp.execute("blockdev-add", json!({"driver": driver, "node-name": name, "file": file}));
        }
        let mirror = json!({
            "job-id": "j", "device": "source", "target": "target", "sync": "full",
            "target-is-zero": is_zero, "copy-mode": mode,
        });
        qmp.execute("blockdev-mirror", mirror);
        qmp.wait_for("BLOCK_JOB_READY");
        let addr = json!({"type": "unix", "data": {"path": dir.join("nbd.sock")}});
        qmp.execute("nbd-server-start", json!({"addr": addr}));
        let export =
            json!({"type": "nbd", "id": "e", "node-name": "source", "name": "e", "writable": true});
        qmp.execute("block-export-add", export);
        let url = "nbd+unix:///e?socket=DIR/nbd.sock";
        for write in ["write -P 2 3M 64k", "write -z 3M 64k", "write -z 1M 4k"] {
            run("qemu-io", &dir, &["-f", "raw", "-c", write, url]);
            // Each is in the target before the next one.
            integration::eventually("equal sides", || {
                let jobs = qmp.execute("query-block-jobs", json!({}));
                (jobs[0]["len"] == jobs[0]["offset"]).then_some(())
            });
        }
        qmp.execute("job-complete", json!({"id": "j"}));
        qmp.wait_for("BLOCK_JOB_COMPLETED");
        server.stop();
        let target = std::fs::read(dir.join("target.raw")).expect("the target");
        let at = |kib: usize| target[kib << 10];
        let untouched = if is_zero { 9 } else { 0 };
        assert_eq!(
            [at(0), at(1024), at(1028), at(1087), at(1088), at(3072), at(3135), at(3136)],
            [untouched, 0, 1, 1, untouched, 0, 0, untouched],
            "target-is-zero={is_zero}, {mode}"
        );
    }
}
