//! Driver `rbd` on a real Ceph cluster of one node.

use crate::common;

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use common::{BLOCKS, Load, MIB, connect, wait_for_status};
use fastrand::Rng;
use integration::nbd::{client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    BlkClient, Ceph, Guest, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand,
    eventually, pattern, request,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// How long the OSD is stopped. Its monitor would say that it is gone after 20 seconds.
const STOPPED: Duration = Duration::from_secs(10);

/// Writes in flight when a daemon is killed.
const DEPTH: u64 = 32;

/// Threads of a daemon, whatever the number of its images.
const THREADS: usize = 25;

/// Creates the image `disk`.
fn create_disk(ceph: &Ceph) {
    ceph.rbd(&["create", "--size", &format!("{MIB}M"), "disk"]);
}

/// Creates the image `disk` with data, which is returned.
fn import_disk(ceph: &Ceph, scratch: &Scratch) -> Image {
    let source = Image::filled(scratch, "source", MIB);
    ceph.rbd(&["import", source.path().to_str().expect("UTF-8"), "disk"]);
    source
}

/// A cluster with the image `disk`.
fn cluster() -> Option<Ceph> {
    Ceph::start().inspect(create_disk)
}

/// A test on a cluster of many, which makes the image `disk`, or none.
type Case = fn(&Ceph);

/// A cluster takes longer to start than each of these.
#[test]
fn one_cluster_serves_many_daemons() {
    let Some(ceph) = Ceph::start() else { return };
    let cases: [(&str, Case); 7] = [
        ("objects", crate::s3::objects_are_read),
        ("copied", an_image_is_copied_mapped_zeroed_and_read_back),
        ("snapshot", a_snapshot_is_read_and_not_written),
        ("resized", images_are_created_resized_and_removed),
        ("key", a_key_comes_from_a_secret),
        ("thirty", thirty_images_share_a_connection_and_its_threads),
        // Leaves an image open.
        ("refused", what_cannot_be_opened_is_an_error_that_says_what_to_do),
    ];
    let mut last = None;
    for (name, case) in cases {
        println!("case {name}");
        if let Some(last) = last.replace(name).filter(|last| !["thirty", "objects"].contains(last))
        {
            ceph.rbd(&["rename", "disk", last]);
        }
        case(&ceph);
    }
}

/// A daemon that serves `disk` on two threads over vhost-user.
fn daemon(ceph: &Ceph, scratch: &Scratch) -> Server {
    ServerCommand::new(scratch)
        .monitor("qmp")
        .iothread("io0")
        .iothread("io1")
        .arg("--blockdev")
        .arg(ceph.node("disk", "disk", ",discard=unmap"))
        .export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1")
        .start()
}

/// A daemon that serves `disk` over NBD.
fn nbd_daemon(ceph: &Ceph, scratch: &Scratch) -> Server {
    let node = ceph.node("disk", "disk", ",discard=unmap");
    let command = ServerCommand::new(scratch).monitor("qmp").arg("--blockdev").arg(node);
    nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on,name=disk").start()
}

/// The contents of `disk`, as a file.
fn export(ceph: &Ceph, scratch: &Scratch) -> Image {
    let path = scratch.path("exported");
    // rbd overwrites no file.
    let _ = std::fs::remove_file(&path);
    ceph.rbd(&["export", "disk", path.to_str().expect("UTF-8")]);
    Image::existing(&path)
}

fn size_of(server: &Server) -> u64 {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let nodes = nodes.as_array().expect("a list");
    let disk = nodes.iter().find(|node| node["node-name"] == "disk").expect("the node");
    disk["image"]["virtual-size"].as_u64().expect("a size")
}

fn an_image_is_copied_mapped_zeroed_and_read_back(ceph: &Ceph) {
    create_disk(ceph);
    let scratch = Scratch::new();
    let server = nbd_daemon(ceph, &scratch);
    let uri = nbd_uri(&scratch, "disk");
    let source = Image::filled(&scratch, "source", MIB);
    let source_path = source.path().to_str().expect("UTF-8");
    let map = client_output(&scratch, "qemu-img", &["map", "-fraw", "--output=json", &uri]);
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let hole = (&map[0]["length"], &map[0]["data"], &map[0]["zero"]);
    assert_eq!(hole, (&json!(MIB << 20), &json!(false), &json!(true)), "{map}");
    client_output(&scratch, "nbdcopy", &["--flush", source_path, &uri]);
    assert_eq!(ceph.md5("disk"), source.md5());
    // A whole object is given back, and parts of others read as zeroes.
    for command in [
        "discard 4M 4M",
        "read -P 0 4M 4M",
        "write -z -u 1M 10k",
        "read -P 0 1M 10k",
        "write -z 2M 1M",
        "read -P 0 2M 1M",
        "write -P 7 1000 10",
        "read -P 7 1000 10",
        "write -f -P 8 3M 64k",
        "flush",
    ] {
        client_output(&scratch, "qemu-io", &["-fraw", "-c", command, &uri]);
    }
    let map = client_output(&scratch, "nbdinfo", &["--map", &uri]);
    let hole = map.lines().map(str::split_whitespace).any(|mut line| {
        line.next() == Some("4194304") && line.next() == Some("4194304") && line.next() == Some("3")
    });
    assert!(hole, "{map}");
    let copy = Image::empty(&scratch, "copy", MIB);
    client_output(&scratch, "nbdcopy", &[&uri, copy.path().to_str().expect("UTF-8")]);
    assert_eq!(ceph.md5("disk"), copy.md5());
    server.stop();
    assert!(ceph.rbd(&["status", "disk"]).contains("Watchers: none"), "the image is closed");
}

fn a_snapshot_is_read_and_not_written(ceph: &Ceph) {
    let scratch = Scratch::new();
    let source = import_disk(ceph, &scratch);
    let server = nbd_daemon(ceph, &scratch);
    let uri = nbd_uri(&scratch, "disk");
    ceph.rbd(&["snap", "create", "disk@before"]);
    client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -P 9 0 16M", &uri]);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut node = json!({"driver": "rbd", "node-name": "snapshot", "pool": "rbd", "image": "disk",
        "conf": ceph.conf(), "user": "vm", "snapshot": "before"});
    let why = qmp.refused("blockdev-add", node.clone());
    assert_eq!(why, "rbd snapshots are read-only");
    node["read-only"] = true.into();
    qmp.execute("blockdev-add", node.clone());
    let export = json!({"type": "nbd", "id": "e", "node-name": "snapshot", "name": "snapshot"});
    qmp.execute("block-export-add", export);
    // It stays open while its options change.
    node["discard"] = "unmap".into();
    qmp.execute("blockdev-reopen", json!({"options": [node.clone()]}));
    node["read-only"] = false.into();
    let why = qmp.refused("blockdev-reopen", json!({"options": [node.clone()]}));
    assert_eq!(why, "Cannot change node 'snapshot' to r/w when using an rbd snapshot");
    node["user"] = "admin".into();
    let why = qmp.refused("blockdev-reopen", json!({"options": [node]}));
    assert_eq!(why, "Cannot change the option 'user'");
    let copy = Image::empty(&scratch, "copy", MIB);
    let copy_path = copy.path().to_str().expect("UTF-8");
    client_output(&scratch, "nbdcopy", &[&nbd_uri(&scratch, "snapshot"), copy_path]);
    assert_eq!(copy.md5(), source.md5());
    drop(qmp);
    server.stop();
    clones_are_decrypted(ceph);
}

fn images_are_created_resized_and_removed(ceph: &Ceph) {
    create_disk(ceph);
    let scratch = Scratch::new();
    let server = daemon(ceph, &scratch);
    let mut blk = connect(&server, 2);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    // Elsewhere: the guest is told.
    ceph.rbd(&["resize", "--size", "64M", "disk"]);
    eventually("the new size", || {
        (blk.config().expect("a configuration").capacity.to_native() == 64 << 11).then_some(())
    });
    blk.write(127 << 10, &pattern::block(1, 1));
    // Here.
    qmp.execute("block_resize", json!({"node-name": "disk", "size": 32 << 20}));
    assert!(ceph.rbd(&["info", "disk"]).contains("size 32 MiB"));
    assert_eq!(size_of(&server), 32 << 20);

    let location = json!({"pool": "rbd", "image": "new", "conf": ceph.conf(), "user": "vm"});
    let create = |size: u64| json!({"driver": "rbd", "location": location, "size": size, "cluster-size": 1 << 20});
    let job = |id: &str, size| json!({"job-id": id, "options": create(size)});
    qmp.execute("blockdev-create", job("create", 8 << 20));
    wait_for_status(&mut qmp, "create", "concluded");
    assert_eq!(qmp.execute("query-jobs", json!({}))[0].get("error"), None);
    let info = ceph.rbd(&["info", "new"]);
    assert!(info.contains("size 8 MiB") && info.contains("1 MiB objects"), "{info}");
    qmp.execute("job-dismiss", json!({"id": "create"}));
    qmp.execute("blockdev-create", job("again", 8 << 20));
    wait_for_status(&mut qmp, "again", "concluded");
    let error = qmp.execute("query-jobs", json!({}))[0]["error"].clone();
    assert_eq!(error, "rbd image rbd/new: error rbd create: File exists");
    qmp.execute("job-dismiss", json!({"id": "again"}));

    let mut node = json!({"driver": "rbd", "node-name": "new"});
    node.as_object_mut().expect("an object").extend(location.as_object().cloned().expect("one"));
    qmp.execute("blockdev-add", node);
    qmp.execute("blockdev-del", json!({"node-name": "new"}));
    // The image is closed: otherwise it has a watcher, and stays.
    ceph.rbd(&["rm", "new"]);
    drop((blk, qmp));
    server.stop();
    an_image_grows_by_writes_past_its_end(ceph);
}

/// As in QSD, the node keeps the image open, and reads what another daemon writes meanwhile.
#[test]
#[ignore = "one of those that .ci/nightly has"]
fn an_inactive_node_reads_what_another_daemon_writes() {
    let Some(ceph) = cluster() else { return };
    let (scratch, there) = (Scratch::new(), Scratch::new());
    let start = || {
        let state = scratch.path("state").display().to_string();
        let server = ServerCommand::new(&scratch)
            .monitor("qmp")
            .args(["--state", &state, "--sandbox", "drivers=rbd"])
            .start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        qmp.execute("query-block-exports", json!({}));
        (server, qmp)
    };
    let io = |scratch: &Scratch, command: &str| {
        let uri = nbd_uri(scratch, "disk");
        integration::nbd::client(scratch, "qemu-io", &["-fraw", "-c", command, &uri])
    };
    let succeeds = |scratch: &Scratch, command: &str| {
        let done = io(scratch, command);
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success() && !text.contains("Pattern"), "{command}: {done:?}");
    };
    let (mut server, mut qmp) = start();
    let node = json!({"driver": "rbd", "node-name": "disk", "pool": "rbd", "image": "disk",
        "conf": ceph.conf(), "user": "vm"});
    qmp.execute("blockdev-add", node);
    let address = json!({"type": "unix", "data": {"path": scratch.path("nbd.sock")}});
    qmp.execute("nbd-server-start", json!({"addr": address}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
        "writable": true, "allow-inactive": true});
    qmp.execute("block-export-add", export);
    succeeds(&scratch, "write -P 1 0 64k");
    qmp.execute("blockdev-set-active", json!({"node-name": "disk", "active": false}));
    let other = nbd_daemon(&ceph, &there);
    let mut written = 1;
    let mut reads_alone = || {
        written += 1;
        succeeds(&there, &format!("write -f -P {written} 0 64k"));
        succeeds(&scratch, &format!("read -P {written} 0 64k"));
        let refused = io(&scratch, "write 0 4k");
        let why = [refused.stdout, refused.stderr].concat();
        let why = String::from_utf8_lossy(&why);
        assert!(why.contains("Operation not permitted"), "{why}");
    };
    reads_alone();
    drop(qmp);
    server.upgrade();
    reads_alone();
    server.kill();
    let (server, mut qmp) = start();
    reads_alone();
    other.stop();
    qmp.execute("blockdev-set-active", json!({"node-name": "disk", "active": true}));
    succeeds(&scratch, "read -P 4 0 64k");
    succeeds(&scratch, "write -P 5 0 64k");
    succeeds(&scratch, "read -P 5 0 64k");
    server.stop();
}

/// The user's key comes from a secret object: no keyring has it.
fn a_key_comes_from_a_secret(ceph: &Ceph) {
    create_disk(ceph);
    let scratch = Scratch::new();
    let keyring = ceph.take_keyring();
    let key = keyring.lines().find_map(|line| line.trim().strip_prefix("key = ")).expect("a key");
    let file = scratch.path("key");
    std::fs::write(&file, key).expect("a key");
    let secret = format!("secret,id=key,format=base64,file={}", file.display());
    let start = |options: &str| {
        let node = ceph.node("disk", "disk", options);
        ServerCommand::new(&scratch).args(["--object", &secret, "--blockdev", &node])
    };
    let (status, said) = start("").run();
    assert!(!status.success() && said.contains("error connecting"), "{said}");
    let (status, said) = start(",key-secret=none").run();
    assert!(!status.success() && said.contains("No secret with id 'none'"), "{said}");
    let server = start(",key-secret=key").monitor("qmp").start();
    assert_eq!(size_of(&server), MIB << 20);
    server.stop();
    ceph.put_keyring(&keyring);
}

/// Removes the export `e`, and its node `disk`.
fn remove(qmp: &mut Qmp) {
    qmp.execute("block-export-del", json!({"id": "e"}));
    eventually("the end of the export", || {
        let answer = qmp.ask("blockdev-del", json!({"node-name": "disk"}));
        answer.get("return").is_some().then_some(())
    });
}

/// An image that is created here encrypted, one that Ceph's tool has encrypted, and wrong passphrases.
#[test]
#[ignore = "one of those that .ci/nightly has"]
fn encrypted_images_are_created_and_read() {
    let Some(ceph) = cluster() else { return };
    let scratch = Scratch::new();
    let passphrase = scratch.path("passphrase");
    std::fs::write(&passphrase, "letmein").expect("a passphrase");
    let passphrase = passphrase.to_str().expect("UTF-8");
    let command = ServerCommand::new(&scratch).monitor("qmp").args(["--sandbox", "drivers=rbd"]);
    let command = command.arg("--object").arg(format!("secret,id=sec0,file={passphrase}"));
    let command = command.args(["--object", "secret,id=other,data=letmeout"]);
    let server = nbd_server(command, &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let source = Image::filled(&scratch, "source", 16);
    let source_path = source.path().to_str().expect("UTF-8");
    for (format, cipher, by_us) in
        [("luks", "aes-256", true), ("luks2", "aes-128", true), ("luks2", "aes-256", false)]
    {
        let name = format!("{format}-{cipher}");
        let location = json!({"pool": "rbd", "image": name, "conf": ceph.conf(), "user": "vm"});
        if by_us {
            let encrypt = json!({"format": format, "key-secret": "sec0", "cipher-alg": cipher});
            let options = json!({"driver": "rbd", "location": location, "size": 16 << 20,
                "encrypt": encrypt});
            qmp.execute("blockdev-create", json!({"job-id": "create", "options": options}));
            wait_for_status(&mut qmp, "create", "concluded");
            assert_eq!(qmp.execute("query-jobs", json!({}))[0].get("error"), None);
            qmp.execute("job-dismiss", json!({"id": "create"}));
        } else {
            ceph.rbd(&["create", "--size", "32M", &name]);
            ceph.rbd(&["encryption", "format", &name, format, passphrase]);
        }
        let node = |secret: &str| {
            let mut node = json!({"driver": "rbd", "node-name": "disk", "discard": "unmap",
                "encrypt": {"format": format, "key-secret": secret}});
            let members = location.as_object().cloned().expect("members");
            node.as_object_mut().expect("an object").extend(members);
            node
        };
        let why = qmp.refused("blockdev-add", node("other"));
        assert!(why.contains("error loading encryption"), "{why}");
        // Without `encrypt`, the node shows what is stored.
        let mut plain = node("sec0");
        plain.as_object_mut().expect("an object").remove("encrypt");
        qmp.execute("blockdev-add", plain);
        assert_eq!(specific(&mut qmp), json!({"encryption-format": format}));
        qmp.execute("blockdev-del", json!({"node-name": "disk"}));
        qmp.execute("blockdev-add", node("sec0"));
        assert_eq!(specific(&mut qmp), json!({}));
        let size = size_of(&server);
        assert_eq!(size, if by_us { 16 << 20 } else { size.clamp(16 << 20, (32 << 20) - 4096) });
        let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
            "writable": true});
        qmp.execute("block-export-add", export);
        let uri = nbd_uri(&scratch, "disk");
        client_output(&scratch, "nbdcopy", &["--flush", source_path, &uri]);
        for command in [
            "write -P 7 1000 10",
            "read -P 7 1000 10",
            "write -z 4M 1M",
            "read -P 0 4M 1M",
            "write -z -u 5M 10k",
            "read -P 0 5M 10k",
            "write -P 9 12M 1M",
            "flush",
        ] {
            client_output(&scratch, "qemu-io", &["-fraw", "-c", command, &uri]);
        }
        let map = client_output(&scratch, "qemu-img", &["map", "-fraw", "--output=json", &uri]);
        let map: Value = serde_json::from_str(&map).expect("JSON");
        assert_eq!(map[0]["start"], 0, "{map}");
        remove(&mut qmp);
        // Longer by one block, and nothing is cut off.
        qmp.execute("blockdev-add", node("sec0"));
        qmp.execute("block_resize", json!({"node-name": "disk", "size": size + 4096}));
        assert_eq!(size_of(&server), size + 4096);
        qmp.execute("blockdev-del", json!({"node-name": "disk"}));
        // The stored image has a header, and not the contents. Opened again, it has the contents.
        let stored = scratch.path("stored");
        let _ = std::fs::remove_file(&stored);
        ceph.rbd(&["export", &name, stored.to_str().expect("UTF-8")]);
        let stored = std::fs::read(&stored).expect("an image");
        assert!(stored.starts_with(b"LUKS\xba\xbe"), "{format}");
        assert!(!stored.windows(4096).any(|window| window.iter().all(|byte| *byte == 9)));
        qmp.execute("blockdev-add", node("sec0"));
        let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk"});
        qmp.execute("block-export-add", export);
        for command in ["read -P 9 12M 1M", "read -P 0 4M 1M", "read -P 7 1000 10"] {
            client_output(&scratch, "qemu-io", &["-r", "-fraw", "-c", command, &uri]);
        }
        remove(&mut qmp);
    }
    drop(qmp);
    assert!(!server.log().contains("refused system call"), "{}", server.log());
    server.stop();
    opens_within_the_sandbox(&ceph, &scratch, "luks2-aes-256", passphrase);
}

/// Serves an encrypted image of the command line. Without a monitor the daemon reaches only what its nodes need.
fn opens_within_the_sandbox(ceph: &Ceph, scratch: &Scratch, image: &str, passphrase: &str) {
    let node = ceph.node("disk", image, ",encrypt.format=luks2,encrypt.key-secret=sec0");
    let secret = format!("secret,id=sec0,file={passphrase}");
    let command = ServerCommand::new(scratch).args(["--object", &secret, "--blockdev", &node]);
    let server = nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on").start();
    let uri = nbd_uri(scratch, "disk");
    client_output(scratch, "qemu-io", &["-fraw", "-c", "read -P 9 12M 1M", &uri]);
    client_output(scratch, "qemu-io", &["-fraw", "-c", "write -P 8 1M 1M", &uri]);
    assert!(!server.log().contains("refused system call"), "{}", server.log());
    server.stop();
}

/// `format-specific` of the only node.
fn specific(qmp: &mut Qmp) -> Value {
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let specific = &nodes[0]["image"]["format-specific"];
    assert_eq!((&specific["type"], &nodes[0]["encrypted"]), (&"rbd".into(), &false.into()));
    specific["data"].clone()
}

/// A clone has another passphrase than its parent; librbd before 18 refuses such options.
fn clones_are_decrypted(ceph: &Ceph) {
    let scratch = Scratch::new();
    for (name, passphrase) in [("a", "secret-of-a"), ("b", "secret-of-b")] {
        std::fs::write(scratch.path(name), passphrase).expect("a passphrase");
    }
    let secret = |name: &str| format!("secret,id={name},file={}", scratch.path(name).display());
    let command = ServerCommand::new(&scratch).monitor("qmp").args(["--sandbox", "drivers=rbd"]);
    let command = command.arg("--object").arg(secret("a")).arg("--object").arg(secret("b"));
    let server = nbd_server(command, &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let path = |name: &str| scratch.path(name).display().to_string();
    let node = |image: &str, encrypt: Value| {
        json!({"driver": "rbd", "node-name": "disk", "pool": "rbd", "image": image,
            "conf": ceph.conf(), "user": "vm", "encrypt": encrypt})
    };
    let any = json!({"format": "luks-any", "key-secret": "a"});
    let layered = json!({"format": "luks2", "key-secret": "b", "parent": any});
    if !ceph.encrypts_clones() {
        for encrypt in [any, layered] {
            let why = qmp.refused("blockdev-add", node("disk", encrypt));
            assert!(why.starts_with("RBD library does not support layered encryption"), "{why}");
        }
        return;
    }
    let uri = nbd_uri(&scratch, "disk");
    let io = |qmp: &mut Qmp, node: Value, command: &str| {
        qmp.execute("blockdev-add", node);
        let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
            "writable": true});
        qmp.execute("block-export-add", export);
        client_output(&scratch, "qemu-io", &["-fraw", "-c", command, &uri]);
        remove(qmp);
    };
    ceph.rbd(&["create", "--size", "32M", "parent"]);
    ceph.rbd(&["encryption", "format", "parent", "luks2", &path("a")]);
    let of_parent = json!({"format": "luks2", "key-secret": "a"});
    io(&mut qmp, node("parent", of_parent.clone()), "write -P 3 1M 1M");
    ceph.rbd(&["snap", "create", "parent@s"]);
    ceph.rbd(&["snap", "protect", "parent@s"]);
    ceph.rbd(&["clone", "parent@s", "clone"]);
    // A clone that is not formatted is encrypted as its parent: any librbd opens it.
    io(&mut qmp, node("clone", of_parent.clone()), "read -P 3 1M 1M");
    io(&mut qmp, node("clone", any), "read -P 3 1M 1M");
    ceph.rbd(&["encryption", "format", "clone", "luks2", &path("b")]);
    io(&mut qmp, node("clone", layered.clone()), "read -P 3 1M 1M");
    io(&mut qmp, node("clone", layered.clone()), "write -P 4 2M 1M");
    io(&mut qmp, node("clone", layered), "read -P 4 2M 1M");
}

/// A qcow2 image lies in an image that is too small for it.
fn an_image_grows_by_writes_past_its_end(ceph: &Ceph) {
    let scratch = Scratch::new();
    let source = Image::filled(&scratch, "source", 12);
    let source = source.path().to_str().expect("UTF-8");
    ceph.rbd(&["create", "--size", "1M", "grows"]);
    let command = ServerCommand::new(&scratch).monitor("qmp");
    let command = command.arg("--blockdev").arg(ceph.node("file", "grows", ""));
    let server = nbd_server(command, &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let stored = || -> u64 {
        let info = ceph.rbd(&["info", "--format", "json", "grows"]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        info["size"].as_u64().expect("a number")
    };
    let options = json!({"driver": "qcow2", "file": "file", "size": 64 << 20});
    qmp.execute("blockdev-create", json!({"job-id": "create", "options": options}));
    wait_for_status(&mut qmp, "create", "concluded");
    assert_eq!(qmp.execute("query-jobs", json!({}))[0].get("error"), None);
    qmp.execute("job-dismiss", json!({"id": "create"}));
    let node = json!({"driver": "qcow2", "node-name": "disk", "file": "file"});
    qmp.execute("blockdev-add", node);
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
        "writable": true});
    qmp.execute("block-export-add", export);
    let uri = nbd_uri(&scratch, "disk");
    client_output(&scratch, "nbdcopy", &["--flush", source, &uri]);
    client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -z 40M 1M", &uri]);
    assert!(stored() > 12 << 20, "{}", stored());
    client_output(&scratch, "qemu-img", &["compare", "-fraw", "-Fraw", source, &uri]);
    qmp.execute("block-export-del", json!({"id": "e"}));
    drop(qmp);
    server.stop();
    let copy = scratch.path("copy");
    let copy = copy.to_str().expect("UTF-8");
    ceph.rbd(&["export", "grows", copy]);
    client_output(&scratch, "qemu-img", &["check", "-fqcow2", copy]);
    client_output(&scratch, "qemu-img", &["compare", "-fraw", "-Fqcow2", source, copy]);
}

#[test]
fn requests_wait_for_an_osd_that_stops_and_a_monitor_that_is_killed() {
    let scratch = Scratch::new();
    let Some(mut ceph) = Ceph::start() else { return };
    import_disk(&ceph, &scratch);
    let mut server = daemon(&ceph, &scratch);
    let mut load = Load::start(connect(&server, 2), 1);
    load.go_on();
    ceph.signal_osd(Signal::SIGSTOP);
    thread::sleep(STOPPED);
    ceph.signal_osd(Signal::SIGCONT);
    load.go_on();
    ceph.kill_mon();
    load.go_on();
    ceph.restart_mon();
    load.go_on();
    let log = load.finish();
    // Another process takes over, with a connection of its own.
    load = Load::start_after(log, connect(&server, 2), 2);
    load.go_on();
    let log = load.finish();
    server.upgrade();
    load = Load::start_after(log, connect(&server, 2), 3);
    load.go_on();
    let log = load.finish();
    server.stop();
    common::check(&export(&ceph, &scratch), &log, log.len());
}

/// A front end that keeps writes in flight, and what is known of each block.
struct Writer {
    blk: BlkClient,
    random: Rng,
    generation: u64,
    /// The last generation that was answered, and the last one that was sent.
    blocks: Vec<(u64, u64)>,
    /// Writes in flight: the request's number, its place in memory, the block.
    in_flight: Vec<(u16, u64, u64)>,
}

impl Writer {
    /// Writes until so many more are answered. Others stay in flight.
    fn write(&mut self, answers: usize) {
        let is_free = |place: &u64| self.in_flight.iter().all(|(_, taken, _)| taken != place);
        let mut free: Vec<_> = (0..DEPTH).filter(is_free).collect();
        let mut answered = 0;
        while answered < answers {
            while let Some(place) = free.pop() {
                self.submit(place);
            }
            for done in self.blk.wait(0).expect("answers") {
                assert_eq!(done.status, 0);
                let at = self.in_flight.iter().position(|(id, ..)| *id == done.id);
                let (_, place, index) = self.in_flight.swap_remove(at.expect("it is in flight"));
                let (last, sent) = &mut self.blocks[index as usize];
                *last = *sent;
                free.push(place);
                answered += 1;
            }
        }
    }

    fn submit(&mut self, place: u64) {
        // Of two writes to a block at a time, the order would not be known.
        let index = loop {
            let index = self.random.u64(..BLOCKS);
            let (last, sent) = self.blocks[index as usize];
            if last == sent {
                break index;
            }
        };
        self.generation += 1;
        self.blocks[index as usize].1 = self.generation;
        self.blk.put(place << 12, &pattern::block(index, self.generation));
        let segments = vec![Segment { at: place << 12, len: 4096, device_writes: false }];
        let id = self.blk.submit(0, &Request { kind: request::OUT, sector: index * 8, segments });
        self.in_flight.push((id, place, index));
    }

    /// Takes over what the image has. Writes that were in flight may have been carried out.
    fn check(&mut self, image: &Image) {
        for (index, (last, sent)) in (0..).zip(&mut self.blocks) {
            let data = image.read(index * pattern::BLOCK as u64, pattern::BLOCK);
            let found = pattern::generation(index, &data).unwrap_or_else(|why| panic!("{why}"));
            assert!([*last, *sent].contains(&found), "{index}: {found}, not {last} or {sent}");
            (*last, *sent) = (found, found);
        }
        self.in_flight.clear();
    }
}

#[test]
fn a_daemon_that_is_killed_loses_nothing_that_was_answered() {
    let scratch = Scratch::new();
    let Some(ceph) = Ceph::start() else { return };
    import_disk(&ceph, &scratch);
    let mut server = daemon(&ceph, &scratch);
    let blocks = vec![(0, 0); BLOCKS as usize];
    let blk = connect(&server, 2);
    let mut writer =
        Writer { blk, random: Rng::with_seed(1), generation: 0, blocks, in_flight: Vec::new() };
    // Each lock of a killed daemon lasts half a minute.
    let kills = if std::env::var_os("RINGMILL_LONG").is_some() { 3 } else { 1 };
    for kill in 0..kills {
        let begun = Instant::now();
        writer.write(1);
        // A killed daemon has the image's lock until the cluster misses it.
        println!("{kill}: the first write took {:?}", begun.elapsed());
        writer.write(500);
        server.kill();
        writer.check(&export(&ceph, &scratch));
        server = daemon(&ceph, &scratch);
        writer.blk = connect(&server, 2);
    }
    only_its_own_command_waits_for_the_lock(&server, kills > 1);
    // Otherwise its end waits for the resize.
    server.kill();
}

/// `block_resize` waits for the lock of the killed daemon. Other commands and the guest's reads go on. `to_the_end`: it
/// is waited for.
fn only_its_own_command_waits_for_the_lock(server: &Server, to_the_end: bool) {
    let [mut waiting, mut other] = [0, 1].map(|_| Qmp::connect(&server.socket("qmp")));
    let size = (MIB + 1) << 20;
    let resize = json!({"node-name": "disk", "size": size});
    let command = json!({"execute": "block_resize", "arguments": resize});
    waiting.send(&command.to_string());
    let mut is_busy = || {
        let why = other.refused("blockdev-del", json!({"node-name": "disk"}));
        (why == "Node 'disk' is busy: it is being resized").then_some(())
    };
    eventually("the resize", &mut is_busy);
    assert_eq!(is_busy(), Some(()));
    let null = json!({"driver": "null-co", "node-name": "null", "size": 1 << 20});
    other.execute("blockdev-add", null);
    other.execute("blockdev-del", json!({"node-name": "null"}));
    assert_eq!(size_of(server), MIB << 20, "it is under way");
    let why = other.refused("block_resize", resize);
    assert_eq!(why, "Node 'disk' is busy: it is being resized");
    let nbd = json!({"type": "nbd", "id": "n", "node-name": "disk"});
    let addr = json!({"type": "unix", "data": {"path": server.socket("nbd")}});
    other.execute("nbd-server-start", json!({"addr": addr}));
    let why = other.refused("block-export-add", nbd);
    assert!(why.starts_with("Permission conflict on node 'disk'"), "{why}");
    let bitmap = json!({"node": "disk", "name": "b"});
    let why = other.refused("block-dirty-bitmap-add", bitmap.clone());
    assert_eq!(why, "Node 'disk' is busy: it is being resized");
    let why = other.refused("x-upgrade", json!({}));
    assert!(why.contains("a command of a monitor waits"), "{why}");
    if to_the_end {
        assert_eq!(waiting.answer()["return"], json!({}));
        assert_eq!(size_of(server), size);
        other.execute("block-dirty-bitmap-add", bitmap);
    }
}

#[test]
fn a_guest_boots_and_verifies_its_disk() {
    let Some(ceph) = cluster() else { return };
    ceph.rbd(&["resize", "--size", "64M", "disk"]);
    let scratch = Scratch::new();
    let server = daemon(&ceph, &scratch);
    let job = "verify --bsrange=4k-64k --size=12m --offset_increment=12m --numjobs=2 --do_verify=1
        verify --bsrange=4k-64k --size=12m --offset_increment=12m --numjobs=2 --verify_only=1
        md5sum </dev/vda";
    let lines = Guest::new().disk(server.socket("disk")).queues(2).run(job);
    server.stop();
    assert_eq!(lines, [format!("{}  -", ceph.md5("disk"))], "the guest's view against the image");
}

fn thirty_images_share_a_connection_and_its_threads(ceph: &Ceph) {
    const IMAGES: usize = 30;
    let scratch = Scratch::new();
    let names: Vec<_> = (0..IMAGES).map(|index| format!("disk{index}")).collect();
    let mut command = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
    for name in &names {
        ceph.rbd(&["create", "--size", "16M", name]);
        command = command.arg("--blockdev").arg(ceph.node(name, name, ""));
        command = command.export(name, "num-queues=2,iothread.0=io0,iothread.1=io1");
    }
    let server = command.start();
    let mut clients: Vec<_> = names
        .iter()
        .map(|name| BlkClient::connect(&server.socket(name), 2, 64).expect("it serves"))
        .collect();
    for (index, client) in (0..).zip(&mut clients) {
        client.write(0, &pattern::block(index, 1));
    }
    for (index, client) in (0..).zip(&mut clients) {
        let found = pattern::generation(index, &client.read(0, pattern::BLOCK));
        assert_eq!(found, Ok(1), "disk{index}");
    }
    let threads = server.threads();
    println!("{IMAGES} images: {threads} threads, {} KiB", server.private_kib());
    assert!(threads <= THREADS, "{threads} threads");
    drop(clients);
    server.stop();
}

fn what_cannot_be_opened_is_an_error_that_says_what_to_do(ceph: &Ceph) {
    create_disk(ceph);
    let scratch = Scratch::new();
    let refused = |node: String| {
        let (status, said) = ServerCommand::new(&scratch).arg("--blockdev").arg(node).run();
        assert!(!status.success());
        said
    };
    let said = refused(ceph.node("disk", "none", ""));
    assert!(said.contains("error reading header from none: No such file or directory"), "{said}");
    let said = refused(ceph.node("disk", "disk", "").replace("user=vm", "user=stranger"));
    assert!(said.contains("error connecting") && said.contains("key of client.stranger"), "{said}");
    let said = refused(ceph.node("disk", "disk", ",namespace=ns"));
    assert!(said.contains("namespace 'ns' does not exist\n"), "{said}");
    ceph.rbd(&["namespace", "create", "rbd/ns"]);
    let said = refused(ceph.node("disk", "disk", ",namespace=ns"));
    assert!(said.contains("error reading header from disk: No such file or directory"), "{said}");
    let said = refused("rbd,node-name=disk,pool=rbd,image=disk,conf=/none/ceph.conf".to_owned());
    assert!(said.contains("error reading conf file /none/ceph.conf"), "{said}");
    // A daemon without such a node has not loaded the library, and cannot any more.
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let node = json!({"driver": "rbd", "node-name": "disk", "pool": "rbd", "image": "disk",
        "conf": ceph.conf(), "user": "vm"});
    let why = qmp.refused("blockdev-add", node.clone());
    assert!(why.starts_with("Ceph's library is not loaded"), "{why}");
    drop(qmp);
    server.stop();
    let command = ServerCommand::new(&scratch).monitor("qmp");
    let server = command.args(["--sandbox", "drivers=rbd"]).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut wrong = node.clone();
    wrong["user"] = "stranger".into();
    let why = qmp.refused("blockdev-add", wrong);
    assert!(why.contains("error connecting") && why.contains("key of client.stranger"), "{why}");
    let mut location = node.clone();
    let members = location.as_object_mut().expect("members");
    members.retain(|name, _| name != "driver" && name != "node-name");
    location["namespace"] = "none".into();
    let options = json!({"driver": "rbd", "location": location, "size": 1 << 20});
    qmp.execute("blockdev-create", json!({"job-id": "create", "options": options}));
    wait_for_status(&mut qmp, "create", "concluded");
    let error = qmp.execute("query-jobs", json!({}))[0]["error"].clone();
    assert_eq!(error, "rbd image rbd/none/disk: namespace 'none' does not exist");
    qmp.execute("job-dismiss", json!({"id": "create"}));
    qmp.execute("blockdev-add", node.clone());
    assert_eq!(size_of(&server), MIB << 20);
    only_its_own_command_waits_for_a_monitor(&server, node);
    // Its end would wait for the library.
    drop(qmp);
    server.kill();
}

/// A monitor of the cluster takes the connection, and says nothing. Other commands go on.
fn only_its_own_command_waits_for_a_monitor(server: &Server, mut node: Value) {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let port = silent.local_addr().expect("an address").port();
    let [mut waiting, mut other] = [0, 1].map(|_| Qmp::connect(&server.socket("qmp")));
    node["server"] = json!([{"host": "127.0.0.1", "port": port.to_string()}]);
    node["node-name"] = "waits".into();
    let command = json!({"execute": "blockdev-add", "arguments": node});
    waiting.send(&command.to_string());
    let _monitor = silent.accept().expect("the library connects");
    other.execute("blockdev-del", json!({"node-name": "disk"}));
    let why = other.refused("x-upgrade", json!({}));
    assert!(why.contains("a command of a monitor waits"), "{why}");
}
