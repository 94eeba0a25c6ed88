//! `copy-on-read`, `copy-before-write` with `snapshot-access`, `preallocate`, `throttle`, and `luks`, beside `qemu-img`.

use std::fs;

use integration::nbd::client_output;
use integration::{Qmp, Scratch, Server, ServerCommand, merged};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

fn path(scratch: &Scratch, name: &str) -> String {
    scratch.path(name).display().to_string()
}

fn image(scratch: &Scratch, arguments: &[&str]) {
    client_output(scratch, "qemu-img", arguments);
}

/// Writes to an image, or to an export.
fn io(scratch: &Scratch, format: &str, at: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", format];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(at);
    let output = client_output(scratch, "qemu-io", &arguments);
    assert!(!output.contains("failed"), "{output}");
}

fn file(scratch: &Scratch, name: &str) -> Value {
    json!({"driver": "file", "filename": path(scratch, name)})
}

fn qcow2(scratch: &Scratch, name: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "file": file(scratch, &format!("{name}.qcow2"))})
}

/// Serves nodes over NBD.
fn serve(scratch: &Scratch, qmp: &mut Qmp, nodes: &[(&str, bool)]) {
    let addr = json!({"type": "unix", "data": {"path": path(scratch, "nbd")}});
    qmp.execute("nbd-server-start", json!({"addr": addr}));
    for (name, writable) in nodes {
        let export = json!({"type": "nbd", "id": name, "node-name": name, "writable": writable});
        qmp.execute("block-export-add", export);
    }
}

fn uri(scratch: &Scratch, node: &str) -> String {
    format!("nbd+unix:///{node}?socket={}", path(scratch, "nbd"))
}

fn daemon(scratch: &Scratch) -> (Server, Qmp) {
    let server = ServerCommand::new(scratch).monitor("qmp").start();
    let qmp = Qmp::connect(&server.socket("qmp"));
    (server, qmp)
}

/// A chain: 1 in the first MiB of the lowest image, 2 in the second MiB of the next, 3 in 64 KiB of the highest.
fn chain(scratch: &Scratch) {
    let [low, mid, top] = ["low.qcow2", "mid.qcow2", "top.qcow2"].map(|name| path(scratch, name));
    image(scratch, &["create", "-q", "-f", "qcow2", &low, "8M"]);
    image(scratch, &["create", "-q", "-f", "qcow2", "-b", &low, "-F", "qcow2", &mid]);
    image(scratch, &["create", "-q", "-f", "qcow2", "-b", &mid, "-F", "qcow2", &top]);
    io(scratch, "qcow2", &low, &["write -P 1 0 2M"]);
    io(scratch, "qcow2", &mid, &["write -P 2 1M 1M"]);
    io(scratch, "qcow2", &top, &["write -P 3 3M 64k"]);
}

/// Returns the bytes that the highest image of the chain holds itself.
fn held(scratch: &Scratch) -> u64 {
    let map = client_output(
        scratch,
        "qemu-img",
        &["map", "-U", "--output=json", &path(scratch, "top.qcow2")],
    );
    let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
    let own = map.iter().filter(|part| part["depth"] == 0 && part["data"] == true);
    own.filter_map(|part| part["length"].as_u64()).sum()
}

#[test]
fn what_is_read_is_copied_down_to_the_bottom() {
    for (bottom, copied) in [(None, 1024 + 512), (Some("mid"), 1024)] {
        let scratch = Scratch::new();
        chain(&scratch);
        let (server, mut qmp) = daemon(&scratch);
        for name in ["low", "mid", "top"] {
            let mut node = qcow2(&scratch, name);
            node["backing"] = match name {
                "low" => Value::Null,
                "mid" => "low".into(),
                _ => "mid".into(),
            };
            node["read-only"] = (name != "top").into();
            qmp.execute("blockdev-add", node);
        }
        let mut filter = json!({"driver": "copy-on-read", "node-name": "cor", "file": "top"});
        for (wrong, why) in [
            ("none", "Bottom node 'none' not found"),
            ("other", "Bottom node 'other' is not in the backing chain of node 'cor'"),
        ] {
            if wrong == "other" {
                qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "other"}));
            }
            filter["bottom"] = wrong.into();
            assert_eq!(qmp.refused("blockdev-add", filter.clone()), why);
        }
        filter.as_object_mut().expect("options").remove("bottom");
        if let Some(bottom) = bottom {
            filter["bottom"] = bottom.into();
        }
        qmp.execute("blockdev-add", filter);
        serve(&scratch, &mut qmp, &[("cor", true)]);
        let before = held(&scratch);
        io(
            &scratch,
            "raw",
            &uri(&scratch, "cor"),
            &["read -P 1 512k 512k", "read -P 2 1M 1M", "read -P 0 4M 1M"],
        );
        io(
            &scratch,
            "raw",
            &uri(&scratch, "cor"),
            &["write -P 9 1M 4k", "read -P 2 1028k 4k", "flush"],
        );
        server.stop();
        assert_eq!(held(&scratch) - before, copied << 10, "{bottom:?}");
        io(
            &scratch,
            "qcow2",
            &path(&scratch, "top.qcow2"),
            &["read -P 9 1M 4k", "read -P 2 1028k 1020k"],
        );
        image(&scratch, &["check", "-q", &path(&scratch, "top.qcow2")]);
    }
}

#[test]
fn a_snapshot_stays_what_the_disk_was_while_it_is_written_and_across_an_upgrade() {
    snapshot_stays(&[]);
}

#[test]
fn what_was_overwritten_may_be_kept_in_an_overlay_of_the_disk() {
    snapshot_stays(&["-F", "qcow2", "-b", "top.qcow2"]);
}

/// `behind`: options of `qemu-img create` for the backing image of the node `kept`.
fn snapshot_stays(behind: &[&str]) {
    let scratch = Scratch::new();
    chain(&scratch);
    let (was, kept) = (path(&scratch, "was.img"), path(&scratch, "kept.qcow2"));
    image(&scratch, &["convert", "-O", "raw", &path(&scratch, "top.qcow2"), &was]);
    image(&scratch, &[&["create", "-q", "-f", "qcow2"], behind, &[&kept, "8M"]].concat());
    let (mut server, mut qmp) = daemon(&scratch);
    qmp.execute("blockdev-add", qcow2(&scratch, "top"));
    let mut target = qcow2(&scratch, "kept");
    target["backing"] = if behind.is_empty() { Value::Null } else { "top".into() };
    qmp.execute("blockdev-add", target);
    let cbw =
        json!({"driver": "copy-before-write", "node-name": "cbw", "file": "top", "target": "kept"});
    qmp.execute("blockdev-add", cbw);
    let wrong = json!({"driver": "snapshot-access", "node-name": "was", "file": "kept"});
    assert_eq!(qmp.refused("blockdev-add", wrong), "Node 'kept' keeps no snapshot");
    qmp.execute(
        "blockdev-add",
        json!({"driver": "snapshot-access", "node-name": "was", "file": "cbw"}),
    );
    serve(&scratch, &mut qmp, &[("cbw", true), ("was", false)]);
    let compare = || {
        image(&scratch, &["compare", "-q", "-f", "raw", "-F", "raw", &uri(&scratch, "was"), &was]);
    };
    let disk = uri(&scratch, "cbw");
    io(&scratch, "raw", &disk, &["write -P 9 512k 5k", "write -z 3M 8k", "discard 1M 64k"]);
    compare();
    drop(qmp);
    server.upgrade();
    // What was copied before is not copied again, and what was not is.
    io(&scratch, "raw", &disk, &["write -P 8 512k 64k", "write -P 8 2M 6M", "read -P 8 2M 6M"]);
    compare();
    server.stop();
}

/// The classic fleecing: the overlay shows the disk as it was when the job began.
#[test]
fn a_backup_into_an_overlay_of_its_source_shows_what_the_source_was() {
    for (format, export_first) in [("raw", false), ("qcow2", true)] {
        let scratch = Scratch::new();
        let [source, overlay, was] =
            ["source", "overlay.qcow2", "was"].map(|name| path(&scratch, name));
        image(&scratch, &["create", "-q", "-f", format, &source, "8M"]);
        io(
            &scratch,
            format,
            &source,
            &["write -P 1 0 1M", "write -P 2 2M 100k", "write -P 3 6M 2M"],
        );
        image(&scratch, &["convert", "-f", format, "-O", "raw", &source, &was]);
        image(&scratch, &["create", "-q", "-f", "qcow2", "-F", format, "-b", &source, &overlay]);

        let (server, mut qmp) = daemon(&scratch);
        let node = json!({"driver": format, "node-name": "disk", "file": file(&scratch, "source")});
        qmp.execute("blockdev-add", node);
        serve(&scratch, &mut qmp, &[("disk", true)]);
        let mut node = qcow2(&scratch, "overlay");
        node["backing"] = "disk".into();
        qmp.execute("blockdev-add", node);
        let export = |qmp: &mut Qmp| {
            let export = json!({"type": "nbd", "id": "overlay", "node-name": "overlay"});
            qmp.execute("block-export-add", export);
        };
        if export_first {
            export(&mut qmp);
        }
        let mirror = json!({"job-id": "j", "device": "disk", "target": "overlay", "sync": "none",
            "auto-dismiss": false});
        let why = qmp.refused("blockdev-mirror", mirror.clone());
        assert_eq!(why, "Need a root block node");
        qmp.execute("blockdev-backup", mirror);
        if !export_first {
            export(&mut qmp);
        }

        let (disk, moment) = (uri(&scratch, "disk"), uri(&scratch, "overlay"));
        let compare =
            || image(&scratch, &["compare", "-q", "-f", "raw", "-F", "raw", &moment, &was]);
        // Data, zeroes and holes are overwritten by each other.
        let changes = [
            "write -P 7 0 5k",
            "write -P 7 1M 5k",
            "write -z 2M 4k",
            "discard 64k 64k",
            "write -P 7 3M 1M",
        ];
        io(&scratch, "raw", &disk, &changes);
        compare();
        let writes: Vec<String> =
            (0..128).map(|n| format!("aio_write -P 9 {}k 5k", n * 61)).collect();
        let writes: Vec<&str> = writes.iter().map(String::as_str).chain(["aio_flush"]).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| io(&scratch, "raw", &disk, &writes));
            (0..3).for_each(|_| compare());
        });
        compare();

        // As in QSD, after the job the overlay shows what the disk is where it has nothing.
        let reads = ["read -P 7 3M 1k", "read -P 9 61k 5k"];
        io(&scratch, "raw", &disk, &reads);
        qmp.execute("job-cancel", json!({"id": "j"}));
        assert_eq!(qmp.wait_for("BLOCK_JOB_CANCELLED").get("error"), None);
        assert_eq!(qmp.execute("query-jobs", json!({}))[0]["error"], "Operation canceled");
        qmp.execute("job-dismiss", json!({"id": "j"}));
        io(&scratch, "raw", &disk, &["write -P 8 3M 64k", "read -P 8 3M 64k"]);
        qmp.execute("block-export-del", json!({"id": "overlay", "mode": "hard"}));
        qmp.wait_for("BLOCK_EXPORT_DELETED");
        qmp.execute("blockdev-del", json!({"node-name": "overlay"}));
        server.stop();
        image(&scratch, &["check", "-q", &overlay]);
    }
}

/// A disk of random bytes, and the password.
fn plain(scratch: &Scratch) -> String {
    let bytes = (0..8 * MIB as u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
    fs::write(scratch.path("plain"), bytes.collect::<Vec<_>>()).expect("a disk");
    fs::write(scratch.path("password"), "letmein").expect("a password");
    format!("secret,id=s,file={}", path(scratch, "password"))
}

#[test]
fn what_qemu_img_encrypts_is_read_and_what_is_written_is_read_by_qemu_img() {
    let ciphers = [
        "cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha256",
        "cipher-alg=aes-128,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha512",
        "cipher-alg=aes-192,cipher-mode=xts,ivgen-alg=plain,hash-alg=sha1",
        "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=sha256",
    ];
    for cipher in ciphers {
        let scratch = Scratch::new();
        let secret = plain(&scratch);
        let luks = path(&scratch, "luks");
        let options = format!("key-secret=s,iter-time=10,{cipher}");
        image(
            &scratch,
            &["create", "-q", "-f", "luks", "--object", &secret, "-o", &options, &luks, "8M"],
        );
        let target = format!("driver=luks,key-secret=s,file.filename={luks}");
        let disk = path(&scratch, "plain");
        let convert = [
            "convert",
            "-n",
            "-f",
            "raw",
            "--object",
            &secret,
            "--target-image-opts",
            &disk,
            &target,
        ];
        image(&scratch, &convert);

        let (server, mut qmp) = daemon(&scratch);
        for (id, data) in [("wrong", "password"), ("s", "letmein")] {
            qmp.execute("object-add", json!({"qom-type": "secret", "id": id, "data": data}));
        }
        let mut node = json!({"driver": "luks", "node-name": "l", "file": file(&scratch, "luks")});
        let refused = qmp.refused("blockdev-add", node.clone());
        assert_eq!(refused, "Parameter 'key-secret' is required for cipher");
        node["key-secret"] = "wrong".into();
        let refused = qmp.refused("blockdev-add", node.clone());
        assert_eq!(refused, "Invalid password, cannot unlock any keyslot");
        node["key-secret"] = "s".into();
        qmp.execute("blockdev-add", node);
        let nodes = qmp.execute("query-named-block-nodes", json!({}));
        let told = nodes.as_array().into_iter().flatten().find(|node| node["node-name"] == "l");
        let told = told.expect("the node");
        assert_eq!(
            (&told["encrypted"], &told["image"]["virtual-size"]),
            (&json!(true), &json!(8 * MIB))
        );
        serve(&scratch, &mut qmp, &[("l", true)]);
        let served = uri(&scratch, "l");
        image(&scratch, &["compare", "-q", "-f", "raw", "-F", "raw", &disk, &served]);
        // Parts of sectors, several buffers, zeroes.
        let changes =
            ["write -P 7 1000 3001", "write -P 8 1M 3M", "write -z 5M 1M", "write -P 9 7M 70k"];
        io(&scratch, "raw", &served, &changes);
        io(&scratch, "raw", &disk, &changes);
        server.stop();
        let disk = format!("driver=raw,file.driver=file,file.filename={disk}");
        image(&scratch, &["compare", "-q", "--object", &secret, "--image-opts", &disk, &target]);
    }
}

#[test]
fn a_secret_is_encrypted_with_another_one_and_kept_out_of_the_state_file() {
    let scratch = Scratch::new();
    plain(&scratch);
    let server = ServerCommand::new(&scratch).monitor("qmp");
    let server = server.arg("--state").arg(path(&scratch, "state")).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut secret = |rest: Value| {
        let arguments = merged(json!({"qom-type": "secret", "id": "s"}), &rest);
        let answer = qmp.ask("object-add", arguments);
        answer["error"]["desc"].as_str().unwrap_or_default().to_owned()
    };
    assert!(secret(json!({"data": "x"})).contains("would be written to the state file"));
    assert_eq!(secret(json!({})), "Either 'file' or 'data' must be provided");
    // A key of 32 bytes, and what it encrypts to "letmein" with an initialisation vector of zeroes.
    fs::write(scratch.path("key"), "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n")
        .expect("a key");
    let key = json!({"id": "key", "file": path(&scratch, "key"), "format": "base64"});
    assert_eq!(secret(key), "");
    let encrypted = |keyid: &str, iv: &str| json!({"data": "4QTUqTcO3X/wflDFWw3jPw==", "format": "base64", "keyid": keyid, "iv": iv});
    assert_eq!(secret(encrypted("none", "AAAA")), "No secret with id 'none'");
    assert_eq!(secret(encrypted("key", "AAAA")), "IV should be 16 bytes in length not 3");
    assert_eq!(secret(encrypted("key", "AAAAAAAAAAAAAAAAAAAAAA==")), "");
    server.stop();
}

#[test]
fn a_file_is_longer_than_its_data_until_it_is_closed() {
    let scratch = Scratch::new();
    let disk = path(&scratch, "disk.qcow2");
    image(&scratch, &["create", "-q", "-f", "qcow2", &disk, "64M"]);
    let len = || fs::metadata(&disk).expect("an image").len();
    let (mut server, mut qmp) = daemon(&scratch);
    qmp.execute("blockdev-add", {
        let mut node = file(&scratch, "disk.qcow2");
        node["node-name"] = "file".into();
        node
    });
    let mut node = json!({"driver": "preallocate", "node-name": "ahead", "file": "file"});
    node["prealloc-align"] = 1000.into();
    let why = "prealloc-align parameter of preallocate filter is not aligned to 512";
    assert_eq!(qmp.refused("blockdev-add", node.clone()), why);
    node.as_object_mut().expect("options").remove("prealloc-align");
    qmp.execute("blockdev-add", node.clone());
    let disk_node = json!({"driver": "qcow2", "node-name": "disk", "file": "ahead"});
    qmp.execute("blockdev-add", disk_node);
    // As with QSD, nothing else may write to the file or change its size.
    let other = json!({"driver": "qcow2", "node-name": "other", "file": "file"});
    assert!(qmp.refused("blockdev-add", other).contains("Permission conflict on node 'file'"));
    serve(&scratch, &mut qmp, &[("disk", true)]);
    let uri = uri(&scratch, "disk");
    io(&scratch, "raw", &uri, &["write -P 1 0 128k", "flush"]);
    // Without other caches than the page cache, qcow2 itself makes no file longer.
    assert_eq!(len(), 129 << 20);
    node["prealloc-size"] = (256 << 20).into();
    node["prealloc-align"] = (16 << 20).into();
    qmp.execute("blockdev-reopen", json!({"options": [node.clone()]}));
    io(&scratch, "raw", &uri, &["write -P 2 1M 1M", "flush"]);
    assert_eq!(len(), 129 << 20, "there is enough room");
    drop(qmp);
    // The old process does not shorten a file that the new one writes to.
    server.upgrade();
    io(
        &scratch,
        "raw",
        &uri,
        &["write -P 3 2M 1M", "flush", "read -P 1 0 128k", "read -P 2 1M 1M"],
    );
    assert_eq!(len(), 129 << 20);
    server.stop();
    image(&scratch, &["check", "-q", &disk]);

    // A process that did not take the file over cuts off what it has not used.
    let (server, mut qmp) = daemon(&scratch);
    fs::OpenOptions::new()
        .write(true)
        .open(&disk)
        .and_then(|file| file.set_len(8 << 20))
        .expect("shorter");
    node["file"] = file(&scratch, "disk.qcow2");
    node["prealloc-size"] = (4 << 20).into();
    node["prealloc-align"] = 0.into();
    node.as_object_mut().expect("options").remove("node-name");
    let disk_node = json!({"driver": "qcow2", "node-name": "disk", "file": node});
    qmp.execute("blockdev-add", disk_node);
    serve(&scratch, &mut qmp, &[("disk", true)]);
    io(&scratch, "raw", &uri, &["write -P 4 16M 16M", "flush"]);
    assert!(len() > 20 << 20);
    let used = len() - (4 << 20);
    server.stop();
    assert!(len() < used + (2 << 20), "{} bytes, {used} of them used", len());
    io(&scratch, "qcow2", &disk, &["read -P 4 16M 16M", "read -P 3 2M 1M", "read -P 1 0 128k"]);
    image(&scratch, &["check", "-q", &disk]);
}

#[test]
fn a_throttle_node_changes_its_group() {
    let scratch = Scratch::new();
    let (server, mut qmp) = daemon(&scratch);
    qmp.execute(
        "blockdev-add",
        json!({"driver": "null-co", "node-name": "disk", "read-zeroes": true}),
    );
    for (id, limit) in [("fast", 0), ("slow", 1)] {
        let limits = json!({"iops-total": limit});
        qmp.execute(
            "object-add",
            json!({"qom-type": "throttle-group", "id": id, "limits": limits}),
        );
    }
    let mut node = json!({"driver": "throttle", "node-name": "used", "file": "disk", "throttle-group": "slow"});
    qmp.execute("blockdev-add", node.clone());
    serve(&scratch, &mut qmp, &[("used", true)]);
    node["throttle-group"] = "fast".into();
    qmp.execute("blockdev-reopen", json!({"options": [node.clone()]}));
    qmp.execute("object-del", json!({"id": "slow"}));
    assert!(qmp.refused("object-del", json!({"id": "fast"})).contains("active references"));
    // With a request per second this would take minutes.
    let reads: Vec<String> = (0..200).map(|at| format!("read {}k 4k", at * 4)).collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    let began = std::time::Instant::now();
    io(&scratch, "raw", &uri(&scratch, "used"), &reads);
    assert!(began.elapsed().as_secs() < 120);
    node["throttle-group"] = "none".into();
    let why = qmp.refused("blockdev-reopen", json!({"options": [node]}));
    assert_eq!(why, "Throttle group 'none' does not exist");
    server.stop();
}

/// As in QSD: only a user that writes is refused, and a format, which may write by itself.
#[test]
fn a_filter_above_a_node_that_is_read_only_reads() {
    let scratch = Scratch::new();
    image(&scratch, &["create", "-q", "-f", "qcow2", &path(&scratch, "disk"), "1M"]);
    let (server, mut qmp) = daemon(&scratch);
    let mut node = file(&scratch, "disk");
    node["node-name"] = "file".into();
    node["read-only"] = true.into();
    qmp.execute("blockdev-add", node);
    let above = |driver: &str| json!({"driver": driver, "node-name": driver, "file": "file"});
    assert_eq!(qmp.refused("blockdev-add", above("qcow2")), "Block node 'file' is read-only");
    qmp.execute("blockdev-add", above("raw"));
    serve(&scratch, &mut qmp, &[("raw", false)]);
    client_output(&scratch, "nbdinfo", &[&uri(&scratch, "raw")]);
    let export =
        json!({"type": "nbd", "id": "w", "node-name": "raw", "name": "w", "writable": true});
    assert_eq!(qmp.refused("block-export-add", export), "Block node is read-only");
    server.stop();
}

/// `"backing": null`, as backup programs open the image of an increment: the image behind counts again later.
#[test]
fn an_image_that_is_opened_without_its_backing_image_hides_it_where_it_must() {
    let scratch = Scratch::new();
    let [base, disk, zeroed, increment] =
        ["base", "disk.qcow2", "zeroed.qcow2", "increment.qcow2"].map(|name| path(&scratch, name));
    image(&scratch, &["create", "-q", "-f", "qcow2", &base, "4M"]);
    io(&scratch, "qcow2", &base, &["write -P 1 0 4M"]);
    for (overlay, cluster) in [(&disk, "64k"), (&zeroed, "64k"), (&increment, "1M")] {
        let size = format!("cluster_size={cluster}");
        let create =
            ["create", "-q", "-f", "qcow2", "-o", &size, "-F", "qcow2", "-b", &base, overlay];
        image(&scratch, &create);
    }
    let (server, mut qmp) = daemon(&scratch);
    qmp.execute("blockdev-add", qcow2(&scratch, "disk"));
    for name in ["zeroed", "increment"] {
        let mut node = qcow2(&scratch, name);
        node["backing"] = Value::Null;
        qmp.execute("blockdev-add", node);
    }
    let bitmap = json!({"node": "disk", "name": "since", "granularity": 65536});
    qmp.execute("block-dirty-bitmap-add", bitmap);
    serve(&scratch, &mut qmp, &[("disk", true), ("zeroed", true)]);
    io(&scratch, "raw", &uri(&scratch, "zeroed"), &["write -z 0 128k", "write -z 1M 68k"]);
    io(&scratch, "raw", &uri(&scratch, "disk"), &["write -P 2 1280k 64k"]);
    let backup = json!({"job-id": "j", "device": "disk", "target": "increment", "sync": "incremental",
        "bitmap": "since"});
    qmp.execute("blockdev-backup", backup);
    assert_eq!(qmp.wait_for("BLOCK_JOB_COMPLETED").get("error"), None);
    server.stop();
    io(
        &scratch,
        "qcow2",
        &zeroed,
        &["read -P 0 0 128k", "read -P 1 128k 896k", "read -P 0 1M 68k"],
    );
    let reads = ["read -P 1 0 1280k", "read -P 2 1280k 64k", "read -P 1 1344k 2752k"];
    io(&scratch, "qcow2", &increment, &reads);
}
