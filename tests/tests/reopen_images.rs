//! `blockdev-reopen` of image formats and of nodes with connections, beside `qemu-img` and qemu-storage-daemon.

use crate::common;

use common::peers::{Peers, Side, run};
use common::{BLOCKS, Load, MIB, check};
use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    BlkClient, Image, Qmp, Scratch, Server, ServerCommand, eventually, merged, pattern,
};
use serde_json::{Value, json};

/// Adds members to an object.
fn with(base: &Value, more: Value) -> Value {
    merged(base.clone(), &more)
}

fn reopen(qmp: &mut Qmp, options: Value) {
    qmp.execute("blockdev-reopen", json!({"options": [options]}));
}

fn refused(qmp: &mut Qmp, options: Value) -> String {
    qmp.refused("blockdev-reopen", json!({"options": [options]}))
}

fn create(scratch: &Scratch, more: &[&str]) {
    let size = format!("{MIB}M");
    let command = ["create", "-q", "-f", "qcow2"];
    client_output(scratch, "qemu-img", &[&command[..], more, &["disk.qcow2", &size]].concat());
}

/// A daemon with the image `disk.qcow2` as the node `disk`, in the file node `file`, above the node `base`.
fn qcow2_daemon(scratch: &Scratch) -> Server {
    let file = format!("file,node-name=file,filename={}", scratch.path("disk.qcow2").display());
    let command = ServerCommand::new(scratch).monitor("qmp").iothread("io0").iothread("io1");
    let command = command.args(["--object", "throttle-group,id=g"]).arg("--blockdev").arg(file);
    let base =
        format!("file,node-name=base,read-only=on,filename={}", scratch.path("base.img").display());
    let command = command.arg("--blockdev").arg(base);
    let command =
        command.args(["--blockdev", "qcow2,node-name=disk,file=file,backing=base,discard=unmap"]);
    command.export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1").start()
}

/// Checks the image, and that it has the first `log.len()` writes.
fn check_image(scratch: &Scratch, log: &[u64]) {
    let found = client(scratch, "qemu-img", &["check", "-f", "qcow2", "disk.qcow2"]);
    assert!(matches!(found.status.code(), Some(0 | 3)), "{found:?}");
    let convert = ["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", "disk.raw"];
    client_output(scratch, "qemu-img", &convert);
    check(&Image::existing(&scratch.path("disk.raw")), log, log.len());
}

/// The flags of the image's only bitmap.
fn bitmap_flags(scratch: &Scratch) -> Value {
    let info = client_output(scratch, "qemu-img", &["info", "-U", "--output=json", "disk.qcow2"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    info["format-specific"]["data"]["bitmaps"][0]["flags"].clone()
}

#[test]
fn a_qcow2_node_is_reopened_under_a_load_and_killed() {
    let scratch = Scratch::new();
    Image::filled(&scratch, "base.img", MIB);
    create(&scratch, &["-o", "cluster_size=4k", "-b", "base.img", "-F", "raw"]);
    let server = qcow2_daemon(&scratch);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let throttled =
        json!({"driver": "throttle", "node-name": "t", "throttle-group": "g", "file": "file"});
    qmp.execute("blockdev-add", throttled);
    let blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    let load = Load::start(blk, 5);
    let disk = json!({"driver": "qcow2", "node-name": "disk", "file": "file", "backing": "base"});
    for more in [
        json!({}),
        json!({"cache-size": 1 << 20}),
        json!({"l2-cache-size": 8192, "refcount-cache-size": 32768, "cache-clean-interval": 1}),
        json!({"detect-zeroes": "unmap", "discard": "unmap"}),
        json!({"pass-discard-request": true, "discard-no-unref": true}),
        // A filter between the image and its file, and no more.
        json!({"file": "t"}),
        json!({"lazy-refcounts": true, "overlap-check": "all"}),
    ] {
        load.go_on();
        reopen(&mut qmp, with(&disk, more));
    }
    qmp.execute("blockdev-del", json!({"node-name": "t"}));
    // What is refused, before the image is closed and after, changes nothing.
    for (more, why) in [
        (json!({"read-only": true}), "Read-only block node 'disk' cannot support read-write users"),
        (json!({"l2-cache-entry-size": 3}), "L2 cache entry size must be a power of two"),
        (
            json!({"backing": "disk"}),
            "Making 'disk' a backing child of 'disk' would create a cycle",
        ),
    ] {
        let said = refused(&mut qmp, with(&disk, more));
        assert!(said.starts_with(why), "{said}");
        load.go_on();
    }
    reopen(&mut qmp, disk.clone());
    let mut log = load.finish();
    // What is answered now is not flushed, and survives a kill.
    let mut blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    for index in (0..BLOCKS).step_by(37) {
        if index % 5 == 0 {
            reopen(&mut qmp, disk.clone());
        }
        blk.write(index * 8, &pattern::block(index, log.len() as u64 + 1));
        log.push(index);
    }
    server.kill();
    let restarted = qcow2_daemon(&scratch);
    restarted.stop();
    check_image(&scratch, &log);
}

#[test]
fn a_qcow2_image_is_closed_while_it_is_read_only() {
    let scratch = Scratch::new();
    create(&scratch, &[]);
    client_output(&scratch, "qemu-img", &["bitmap", "--add", "disk.qcow2", "daily"]);
    let image = scratch.path("disk.qcow2");
    let file = json!({"driver": "file", "filename": image});
    let disk = json!({"driver": "qcow2", "node-name": "disk", "file": file});
    let start = || {
        let command = ServerCommand::new(&scratch).monitor("qmp");
        let server = nbd_server(command, &scratch, "").start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        qmp.execute("blockdev-add", disk.clone());
        (server, qmp)
    };
    let read_only = with(&disk, json!({"read-only": true}));
    let export = |qmp: &mut Qmp, writable| {
        let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "writable": writable});
        qmp.execute("block-export-add", export);
    };
    let no_export = |qmp: &mut Qmp| {
        qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
        eventually("the end of the export", || {
            (qmp.execute("query-block-exports", json!({})) == json!([])).then_some(())
        });
    };
    let io = |command: &str| {
        let uri = nbd_uri(&scratch, "disk");
        let mode: &[&str] = if command.starts_with("read") { &["-r"] } else { &[] };
        client_output(&scratch, "qemu-io", &[mode, &["-f", "raw", "-c", command, &uri]].concat());
    };
    let (server, mut qmp) = start();
    export(&mut qmp, true);
    io("write -P 1 0 1M");
    let why = refused(&mut qmp, read_only.clone());
    assert_eq!(why, "Read-only block node 'disk' cannot support read-write users");
    io("write -P 2 1M 1M");
    no_export(&mut qmp);
    reopen(&mut qmp, read_only.clone());
    // Closed, and unlocked for readers: what is in the file is all there is.
    assert_eq!(bitmap_flags(&scratch), json!(["auto"]));
    client_output(&scratch, "qemu-img", &["check", "-f", "qcow2", "disk.qcow2"]);
    let read = ["-r", "-f", "qcow2", "-c", "read -P 1 0 1M", "-c", "read -P 2 1M 1M", "disk.qcow2"];
    let read = || client_output(&scratch, "qemu-io", &read);
    read();
    export(&mut qmp, false);
    io("read -P 2 1M 1M");
    let writable =
        json!({"type": "nbd", "id": "w", "node-name": "disk", "name": "w", "writable": true});
    qmp.refused("block-export-add", writable);
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let bitmap = &nodes
        .as_array()
        .expect("a list")
        .iter()
        .find(|n| n["node-name"] == "disk")
        .expect("the node")["dirty-bitmaps"][0];
    assert_eq!((&bitmap["name"], &bitmap["count"]), (&json!("daily"), &json!(2 << 20)));
    server.kill();
    // A kill while it is read-only leaves nothing to repair.
    assert_eq!(bitmap_flags(&scratch), json!(["auto"]));
    client_output(&scratch, "qemu-img", &["check", "-f", "qcow2", "disk.qcow2"]);

    let (server, mut qmp) = start();
    reopen(&mut qmp, read_only.clone());
    export(&mut qmp, false);
    reopen(&mut qmp, disk.clone());
    no_export(&mut qmp);
    export(&mut qmp, true);
    assert_eq!(bitmap_flags(&scratch), json!(["in-use", "auto"]));
    // A reopening that fails after the image was closed.
    let why = refused(&mut qmp, with(&disk, json!({"l2-cache-entry-size": 3})));
    assert!(why.starts_with("L2 cache entry size"), "{why}");
    assert_eq!(bitmap_flags(&scratch), json!(["in-use", "auto"]));
    assert!(!server.log().contains("is lost"), "{}", server.log());
    io("write -P 3 2M 1M");
    server.kill();
    let (server, _) = start();
    server.stop();
    let found = client(&scratch, "qemu-img", &["check", "-f", "qcow2", "disk.qcow2"]);
    assert!(matches!(found.status.code(), Some(0 | 3)), "{found:?}");
    let read =
        ["-r", "-f", "qcow2", "-c", "read -P 2 1M 1M", "-c", "read -P 3 2M 1M", "disk.qcow2"];
    client_output(&scratch, "qemu-io", &read);
    assert_eq!(bitmap_flags(&scratch), json!(["auto"]), "right after the kill");
}

/// The file's node stays open, and its file becomes longer when the image stores its bitmaps.
#[test]
fn an_image_with_a_bitmap_is_reopened_in_the_same_file() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "1M"]);
    let file = json!({"driver": "file", "node-name": "file", "filename": "DIR/disk.qcow2"});
    peers.execute("blockdev-add", file);
    let node = json!({"driver": "qcow2", "node-name": "disk", "file": "file"});
    peers.execute("blockdev-add", node.clone());
    let bitmap = json!({"node": "disk", "name": "b", "persistent": true});
    peers.execute("block-dirty-bitmap-add", bitmap);
    peers.serve("disk");
    for (nth, discard) in ["unmap", "ignore", "unmap"].into_iter().enumerate() {
        peers.io(&[&format!("write {}k 64k", nth * 128)]);
        let options = with(&node, json!({"discard": discard}));
        peers.execute("blockdev-reopen", json!({"options": [options]}));
    }
    peers.execute("block-export-del", json!({"id": "e"}));
    peers.stop();
    let [ours, theirs] = peers.sides().map(|side| {
        let check = ["check", "--output=json", "-f", "qcow2", "DIR/disk.qcow2"];
        assert!(!run("qemu-img", &side.folder, &check).contains("leaks"));
        let info = run("qemu-img", &side.folder, &["info", "--output=json", "DIR/disk.qcow2"]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        info["format-specific"]["data"]["bitmaps"].clone()
    });
    assert_eq!(ours, theirs);
}

/// Again and again, and back when another node of the command cannot be reopened. QSD refuses it without `data-file`.
#[test]
fn an_image_whose_header_names_a_data_file_is_reopened() {
    let scratch = Scratch::new();
    let data = scratch.path("disk.data");
    create(&scratch, &["-o", &format!("data_file={}", data.display())]);
    let server = nbd_server(ServerCommand::new(&scratch).monitor("qmp"), &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let file = json!({"driver": "file", "filename": scratch.path("disk.qcow2")});
    let node = json!({"driver": "qcow2", "node-name": "disk", "file": file});
    let null = json!({"driver": "null-co", "node-name": "null"});
    for node in [&node, &null] {
        qmp.execute("blockdev-add", node.clone());
    }
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk", "writable": true});
    qmp.execute("block-export-add", export);
    let uri = nbd_uri(&scratch, "disk");
    for discard in ["unmap", "ignore", "unmap"] {
        reopen(&mut qmp, with(&node, json!({"discard": discard})));
        client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -P 7 0 64k", &uri]);
        let wrong = with(&null, json!({"size": 1 << 20}));
        let changed = with(&node, json!({"cache": {"no-flush": true}}));
        qmp.refused("blockdev-reopen", json!({"options": [changed, wrong]}));
        client_output(&scratch, "qemu-io", &["-fraw", "-c", "read -P 7 0 64k", &uri]);
        let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let is_disk = |node: &&Value| node["node-name"] == "disk";
        let disk = nodes.as_array().expect("a list").iter().find(is_disk).expect("the disk");
        assert_eq!(disk["cache"]["no-flush"], false);
    }
    server.stop();
}

#[test]
fn an_nbd_node_keeps_its_connection() {
    let (back, scratch) = (Scratch::new(), Scratch::new());
    let image = Image::empty(&back, "disk.img", 1);
    let storage = ServerCommand::new(&back).file("disk", &image, "discard=unmap");
    let storage =
        nbd_export(nbd_server(storage, &back, ",max-connections=1"), "disk", ",writable=on")
            .start();
    let server = json!({"type": "unix", "path": back.path("nbd.sock")});
    let disk = json!({"driver": "nbd", "node-name": "disk", "server": server, "export": "disk"});
    let front = ServerCommand::new(&scratch).monitor("qmp").iothread("io0");
    let front = nbd_server(front, &scratch, "").start();
    let mut qmp = Qmp::connect(&front.socket("qmp"));
    qmp.execute("blockdev-add", disk.clone());
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "iothread": "io0"});
    qmp.execute("block-export-add", export);
    let uri = nbd_uri(&scratch, "disk");
    let io = |arguments: &[&str]| {
        client_output(&scratch, "qemu-io", &[&["-f", "raw"], arguments, &[&*uri]].concat())
    };
    for more in
        [json!({"read-only": true}), json!({"discard": "unmap"}), json!({"detect-zeroes": "on"})]
    {
        reopen(&mut qmp, with(&disk, more));
        io(&["-r", "-c", "read -P 0 0 1M"]);
    }
    let why = refused(&mut qmp, with(&disk, json!({"reconnect-delay": 5})));
    assert_eq!(why, "Cannot change the option 'reconnect-delay'");
    qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    eventually("the end of the export", || {
        (qmp.execute("query-block-exports", json!({})) == json!([])).then_some(())
    });
    reopen(&mut qmp, with(&disk, json!({"discard": "unmap"})));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "writable": true});
    qmp.execute("block-export-add", export);
    io(&[
        "-c",
        "write -P 1 0 1M",
        "-c",
        "discard 0 512k",
        "-c",
        "read -P 0 0 512k",
        "-c",
        "read -P 1 512k 512k",
    ]);
    let why = refused(&mut qmp, with(&disk, json!({"read-only": true})));
    assert_eq!(why, "Read-only block node 'disk' cannot support read-write users");
    front.stop();
    storage.stop();
}

/// Each step, with its outcome, is the same as in qemu-storage-daemon.
#[test]
fn what_can_be_changed_is_what_qemu_storage_daemon_lets_one_change() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for (name, more) in
        [("a", ""), ("base", ""), ("old", "compat=0.10"), ("d", "data_file=DIR/d.raw")]
    {
        let image = format!("DIR/{name}.qcow2");
        let options: &[&str] = if more.is_empty() { &[] } else { &["-o", more] };
        let command = [&["create", "-q", "-f", "qcow2"], options, &[&*image, "4M"]].concat();
        peers.run("qemu-img", &command);
    }
    let top = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "DIR/top.qcow2"];
    peers.run("qemu-img", &top);
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}.qcow2")});
    let named = |name: &str, node: &str| with(&file(name), json!({"node-name": node}));
    let image =
        |node: &str, file: Value| json!({"driver": "qcow2", "node-name": node, "file": file});
    let throttle = |group: &str| json!({"driver": "throttle", "node-name": "t", "file": "n2", "throttle-group": group});
    let blkdebug = json!({"driver": "blkdebug", "node-name": "bd", "image": "n3", "align": 4096,
        "inject-error": [{"event": "none"}]});
    for id in ["g", "h"] {
        peers.execute("object-add", json!({"qom-type": "throttle-group", "id": id}));
    }
    let sized =
        |node: &str, size: u64| json!({"driver": "null-co", "node-name": node, "size": size});
    for node in [
        named("a", "f"),
        image("q", json!("f")),
        image("top", file("top")),
        image("old", file("old")),
        with(
            &image("d", file("d")),
            json!({"data-file": {"driver": "file", "filename": "DIR/d.raw"}}),
        ),
        sized("n1", 8 << 20),
        sized("n2", 2 << 20),
        sized("n3", 4 << 20),
        sized("n4", 4 << 20),
        throttle("g"),
        blkdebug.clone(),
        json!({"driver": "copy-on-read", "node-name": "c", "file": "n4"}),
    ] {
        peers.execute("blockdev-add", node);
    }
    let q = |more: Value| with(&image("q", json!("f")), more);
    let top = |more: Value| with(&image("top", file("top")), more);
    let d = |more: Value| with(&image("d", file("d")), more);
    let bd = |more: Value| with(&blkdebug, more);
    let read_only = json!({"read-only": true});
    let mut differ = Vec::new();
    for options in [
        q(json!({})),
        q(json!({"lazy-refcounts": true})),
        q(json!({"overlap-check": {"template": "none"}})),
        q(json!({"cache-size": 1 << 20})),
        q(json!({"l2-cache-size": 1 << 20, "cache-size": 1 << 19})),
        q(json!({"l2-cache-entry-size": 4095})),
        q(json!({"refcount-cache-size": 1 << 20, "cache-clean-interval": 5})),
        q(json!({"discard": "unmap", "detect-zeroes": "unmap", "cache": {"no-flush": true}})),
        q(json!({"discard-no-unref": true, "auto-read-only": true, "backing": null})),
        q(read_only.clone()),
        named("a", "f"),
        with(&named("a", "f"), read_only.clone()),
        named("a", "f"),
        q(json!({})),
        with(&named("a", "f"), read_only.clone()),
        q(json!({"file": file("a")})),
        q(json!({"file": "nope"})),
        q(json!({"driver": "raw"})),
        image("nope", json!("f")),
        image("", json!("f")),
        image("a b", json!("f")),
        q(json!({"force-share": true})),
        q(json!({"force-share": true, "read-only": true})),
        // The backing image.
        top(json!({})),
        top(json!({"backing": with(&image("other", file("base")), json!({"backing": file("a")}))})),
        top(json!({"backing": image("other", file("base"))})),
        top(json!({"backing": ""})),
        top(json!({"backing": "", "file": "nope"})),
        top(json!({"backing": null})),
        top(json!({})),
        top(json!({"backing": ""})),
        top(json!({"backing": "n1"})),
        top(json!({"backing": ""})),
        top(json!({"backing": "n2"})),
        top(json!({"backing": "top"})),
        top(json!({"backing": "nope"})),
        top(json!({"backing": file("base")})),
        top(json!({"backing": "n2", "file": file("base")})),
        top(json!({"backing": "n2", "file": with(&file("top"), json!({"node-name": "z"}))})),
        top(json!({"backing": "n2", "read-only": true})),
        top(json!({"backing": "n2"})),
        // The data file.
        d(json!({"data-file": {"driver": "file", "filename": "DIR/d.raw"}, "read-only": true})),
        d(json!({"data-file": {"driver": "file", "filename": "DIR/d.raw"}})),
        d(json!({})),
        d(json!({"data-file": "n4"})),
        with(&image("old", file("old")), json!({"lazy-refcounts": true})),
        // Filters.
        throttle("h"),
        throttle("none"),
        with(&throttle("h"), read_only.clone()),
        bd(json!({})),
        bd(json!({"discard": "unmap", "detect-zeroes": "on"})),
        bd(read_only),
        bd(json!({"align": 512})),
        bd(json!({"max-transfer": 65536})),
        bd(json!({"inject-error": [{"event": "none"}, {"event": "none"}]})),
        bd(json!({"inject-error": []})),
        bd(json!({"image": "n1"})),
        bd(json!({"image": {"driver": "null-co"}})),
        json!({"driver": "copy-on-read", "node-name": "c", "file": "n4"}),
    ] {
        let arguments = json!({"options": [options]});
        let [ours, theirs] = peers.sides().map(|side| {
            let answer = side.ask("blockdev-reopen", &arguments);
            answer["error"]["desc"].as_str().map(str::to_owned)
        });
        if ours != theirs {
            differ.push(format!("{options}\n    ours {ours:?}\n    QSD  {theirs:?}"));
        }
        let [ours, theirs] = peers.sides().map(|side| {
            let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
            let nodes = nodes["return"].as_array().expect("a list").clone();
            let given = |node: &&Value| !node["node-name"].as_str().expect("text").starts_with('#');
            let told = |node: &Value| (node["node-name"].to_string(), node["ro"] == true);
            let mut told: Vec<_> = nodes.iter().filter(given).map(told).collect();
            told.sort();
            (told, nodes.len())
        });
        assert_eq!(ours, theirs, "after {options}");
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    peers.stop();
}

/// A backing image that only the header names is named by its generated name.
#[test]
fn a_node_is_reopened_with_a_backing_image_of_its_header() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "4M"]);
    let top = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "DIR/top"];
    peers.run("qemu-img", &top);
    let file = json!({"driver": "file", "filename": "DIR/top"});
    let top = json!({"driver": "qcow2", "node-name": "top", "file": file});
    peers.execute("blockdev-add", top.clone());
    for side in peers.sides() {
        // QSD 10.0 lists no children.
        let generated = |side: &mut Side| {
            let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
            let nodes = nodes["return"].as_array().expect("a list").clone();
            let is_backing = |node: &&Value| {
                node["drv"] == "qcow2" && node["node-name"].as_str().is_some_and(|n| n != "top")
            };
            let backing: Vec<_> = nodes.iter().filter(is_backing).collect();
            backing.iter().map(|node| node["node-name"].clone()).collect::<Vec<_>>()
        };
        let before = generated(side);
        assert_eq!(before.len(), 1, "{before:?}");
        for more in [json!({}), json!({"discard": "unmap"})] {
            let top = with(&with(&top, more), json!({"backing": before[0]}));
            let answer = side.ask("blockdev-reopen", &json!({"options": [top]}));
            assert_eq!(answer["return"], json!({}), "{answer}");
            assert_eq!(generated(side), before);
        }
    }
    peers.stop();
}

/// The backing image that only another image's header names is no node for `blockdev-reopen`.
#[test]
fn the_backing_image_of_another_header_is_refused() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut options = Vec::new();
    for (name, base) in [("a", "base-a"), ("b", "base-b")] {
        run(
            "qemu-img",
            scratch.dir(),
            &["create", "-q", "-f", "qcow2", &format!("DIR/{base}"), "1M"],
        );
        let top =
            ["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", &format!("DIR/{name}")];
        run("qemu-img", scratch.dir(), &top);
        let file = json!({"driver": "file", "filename": scratch.path(name)});
        let node = json!({"driver": "qcow2", "node-name": name, "file": file});
        qmp.execute("blockdev-add", node.clone());
        options.push(node);
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let backing = |base: &str| {
        let is_base = |node: &&Value| {
            node["drv"] == "qcow2" && node["file"].as_str().is_some_and(|file| file.ends_with(base))
        };
        let mut nodes = nodes.as_array().expect("a list").iter();
        nodes.find(is_base).expect("a backing image")["node-name"].clone()
    };
    let (own, other) = (backing("base-a"), backing("base-b"));
    let reopened =
        |backing: &Value| json!({"options": [with(&options[0], json!({"backing": backing}))]});
    let why = qmp.refused("blockdev-reopen", reopened(&other));
    let name = other.as_str().expect("a name");
    assert_eq!(why, format!("Cannot find device='' nor node-name='{name}'"));
    qmp.execute("blockdev-reopen", reopened(&own));
    server.stop();
}
