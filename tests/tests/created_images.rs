//! `blockdev-create`: images as qemu-storage-daemon creates them, and its errors.

use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::peers::{Peers, Side, run};
use common::wait_for_status;
use integration::{Mounted, Scratch, merged};
use serde_json::{Value, json};
use test_requirements::{Needs, untested};

const DISK: u64 = 1 << 20;
/// The new image, and its data file.
const FILES: [&str; 2] = ["new", "data"];

/// Both daemons, with nodes of two files.
fn peers(scratch: &Scratch) -> Peers {
    let mut peers = Peers::new(scratch);
    let secret = json!({"qom-type": "secret", "id": "sec0", "data": "password"});
    peers.execute("object-add", secret);
    for side in peers.sides() {
        fs::write(side.path("base.raw"), vec![7; DISK as usize]).expect("writable");
    }
    peers
}

/// Gives both files of both sides these contents, and new nodes.
fn begin(peers: &mut Peers, contents: [&[u8]; 2]) {
    for (name, contents) in FILES.into_iter().zip(contents) {
        peers.both("blockdev-del", json!({"node-name": name}));
        for side in peers.sides() {
            fs::write(side.path(name), contents).expect("writable");
        }
        let node = json!({"driver": "file", "node-name": name, "filename": format!("DIR/{name}")});
        peers.execute("blockdev-add", node);
    }
}

/// Creates an image on both sides, and returns the job's error, which is the same.
fn create(peers: &mut Peers, options: &Value) -> Option<String> {
    let [ours, theirs] = peers.sides().map(|side| create_on(side, options));
    assert_eq!(ours, theirs, "{options}");
    ours
}

fn create_on(side: &mut Side, options: &Value) -> Option<String> {
    let answer = side.ask("blockdev-create", &json!({"job-id": "make", "options": options}));
    assert_eq!(answer.get("error"), None, "{options}: {answer}");
    wait_for_status(&mut side.qmp, "make", "concluded");
    let jobs = side.qmp.execute("query-jobs", json!({}));
    side.qmp.execute("job-dismiss", json!({"id": "make"}));
    let error = jobs[0].get("error").map(|error| error.as_str().expect("text").to_owned());
    error.map(|error| error.replace(&side.folder.display().to_string(), "DIR"))
}

fn qcow2(options: &Value) -> Value {
    merged(json!({"driver": "qcow2", "file": "new", "size": DISK}), options)
}

fn luks(options: &Value) -> Value {
    let disk = json!({"driver": "luks", "size": DISK, "key-secret": "sec0", "iter-time": 10});
    merged(disk, options)
}

/// What `qemu-img` says of an image. Places within the file, and its allocated bytes, differ.
fn described(side: &Side, has_data_file: bool) -> Value {
    let json_of = |arguments: &[&str]| -> Value {
        let text = run("qemu-img", &side.folder, &[arguments, &["-U", "DIR/new"]].concat());
        serde_json::from_str(&text).expect("JSON")
    };
    let mut info = json_of(&["info", "--output=json"]);
    for changing in ["actual-size", "children", "filename"] {
        info.as_object_mut().expect("an object").remove(changing);
    }
    let folder = side.folder.display().to_string();
    let info = info.to_string().replace(&folder, "DIR");
    let mut check = json_of(&["check", "--output=json"]);
    for of_layout in ["filename", "image-end-offset"] {
        check.as_object_mut().expect("an object").remove(of_layout);
    }
    let mut map: Vec<Value> = Vec::new();
    for part in json_of(&["map", "--output=json"]).as_array().expect("a list") {
        let mut part = part.clone();
        let members = part.as_object_mut().expect("an object");
        if !has_data_file {
            members.remove("offset");
        }
        if members["present"] == true {
            // Which zeroes are holes is the file system's affair.
            members.remove("zero");
        }
        match map.last_mut() {
            Some(last) if last["present"] == part["present"] && last.get("offset").is_none() => {
                let both = [&*last, &part].map(|part| part["length"].as_u64().expect("a number"));
                last["length"] = both.iter().sum::<u64>().into();
            }
            _ => map.push(part),
        }
    }
    json!([info, check, map])
}

/// The disk's contents.
fn contents(side: &Side) -> Vec<u8> {
    run("qemu-img", &side.folder, &["convert", "-U", "-O", "raw", "DIR/new", "DIR/found"]);
    fs::read(side.path("found")).expect("it was made")
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).expect("a file").blocks() * 512
}

/// All features, alone and together. The image of ringmill is used then.
#[test]
fn qcow2_images_are_as_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let base = json!({"backing-file": "base.raw", "backing-fmt": "raw"});
    let data = json!({"data-file": "data"});
    let mut all = vec![
        json!({"version": "v2"}),
        merged(json!({"version": "v2"}), &base),
        json!({"compression-type": "zstd", "lazy-refcounts": true, "refcount-bits": 64}),
        merged(json!({"compression-type": "zstd"}), &base),
        json!({"cluster-size": 2 << 20, "extended-l2": true}),
        data.clone(),
        merged(base.clone(), &data),
        json!({"data-file": "data", "data-file-raw": true, "compression-type": "zstd"}),
        json!({"data-file": "data", "data-file-raw": true, "lazy-refcounts": true}),
        merged(json!({"preallocation": "metadata", "extended-l2": true}), &base),
        merged(json!({"preallocation": "falloc", "extended-l2": true}), &base),
    ];
    for how in ["metadata", "falloc", "full"] {
        all.extend([
            json!({"preallocation": how}),
            json!({"preallocation": how, "version": "v2"}),
            json!({"preallocation": how, "size": DISK + 512, "refcount-bits": 1}),
            json!({"preallocation": how, "size": 0}),
            json!({"preallocation": how, "extended-l2": true, "cluster-size": 16384}),
            json!({"preallocation": how, "data-file": "data"}),
            json!({"preallocation": how, "data-file": "data", "data-file-raw": true}),
            json!({"preallocation": how, "data-file": "data", "extended-l2": true}),
        ]);
    }
    for options in all {
        begin(&mut peers, [&[], &[]]);
        assert_eq!(create(&mut peers, &qcow2(&options)), None, "{options}");
        let has_data_file = options.get("data-file").is_some();
        let [ours, theirs] = peers.sides();
        assert_eq!(described(ours, has_data_file), described(theirs, has_data_file), "{options}");
        assert_eq!(contents(ours), contents(theirs), "{options}");
        let of_data = if has_data_file { "data" } else { "new" };
        let [our_file, their_file] = [&ours, &theirs].map(|side| side.path(of_data));
        if has_data_file {
            let len = |path: &Path| fs::metadata(path).expect("a file").len();
            assert_eq!(len(&our_file), len(&their_file), "{options}");
        }
        // QSD allocates the first block of a data file, and not all of the L1 table's cluster.
        let cluster = options.get("cluster-size").map_or(65536, |len| len.as_u64().expect("bytes"));
        let differ = allocated(&our_file).abs_diff(allocated(&their_file));
        assert!(differ <= 2 * cluster, "{options}: {differ}");
        use_image(ours, &options);
    }
    peers.stop();
}

/// Writes to the new image with ringmill, and checks it.
fn use_image(side: &mut Side, options: &Value) {
    let node = json!({"driver": "qcow2", "node-name": "image", "file": "new"});
    let more = match options.get("data-file") {
        Some(data_file) => json!({"data-file": data_file}),
        None => json!({}),
    };
    side.qmp.execute("blockdev-add", merged(node, &more));
    let socket = side.path("use.sock");
    let addr = json!({"type": "unix", "data": {"path": socket}});
    side.qmp.execute("nbd-server-start", json!({"addr": addr}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "image", "writable": true});
    side.qmp.execute("block-export-add", export);
    let size = options.get("size").map_or(DISK, |size| size.as_u64().expect("a number"));
    if size > 0 {
        let commands =
            ["write -P 9 66048 512", "write -P 10 131072 65536", "read -P 10 131072 65536"];
        let mut arguments = vec!["-f", "raw", "nbd+unix:///image?socket=DIR/use.sock"];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        run("qemu-io", &side.folder, &arguments);
    }
    side.qmp.execute("nbd-server-stop", json!({}));
    side.qmp.wait_for("BLOCK_EXPORT_DELETED");
    side.qmp.execute("blockdev-del", json!({"node-name": "image"}));
    run("qemu-img", &side.folder, &["check", "-U", "DIR/new"]);
    let found = contents(side);
    if size > 0 {
        let is_raw = options.get("data-file-raw").is_some();
        let below = if options.get("backing-file").is_some() { 7 } else { 0 };
        let mut expected = vec![below; DISK as usize];
        expected.resize(size as usize, 0);
        expected[66048..66560].fill(9);
        expected[131_072..196_608].fill(10);
        assert!(found == expected, "{options}");
        if is_raw {
            assert!(fs::read(side.path("data")).expect("the data file") == expected, "{options}");
        }
    }
}

#[test]
fn errors_are_those_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let backed = json!({"backing-file": "base.raw", "backing-fmt": "raw"});
    let wrong = [
        json!({"size": 1000}),
        json!({"cluster-size": 1000}),
        json!({"refcount-bits": 3}),
        json!({"size": 1u64 << 62}),
        json!({"version": "v2", "lazy-refcounts": true}),
        json!({"version": "v2", "refcount-bits": 8}),
        json!({"version": "v2", "extended-l2": true}),
        json!({"version": "v2", "compression-type": "zstd"}),
        json!({"version": "v2", "data-file": "data"}),
        json!({"extended-l2": true, "cluster-size": 4096}),
        json!({"data-file-raw": true}),
        merged(json!({"data-file": "data", "data-file-raw": true}), &backed),
        merged(json!({"preallocation": "metadata"}), &backed),
        json!({"backing-fmt": "raw"}),
        json!({"encrypt": {"format": "luks"}}),
        json!({"encrypt": {"format": "luks", "key-secret": "none"}}),
    ];
    for (nth, one) in wrong.iter().enumerate() {
        begin(&mut peers, [&[], &[]]);
        assert_ne!(create(&mut peers, &qcow2(one)), None, "{one}");
        // With two errors, the same one is reported.
        for other in &wrong[nth + 1..] {
            assert_ne!(create(&mut peers, &qcow2(&merged(one.clone(), other))), None);
        }
    }
    let read = json!({"driver": "file", "node-name": "read", "filename": "DIR/base.raw", "read-only": true});
    peers.execute("blockdev-add", read);
    let raw = json!({"driver": "raw", "node-name": "small", "file": "new", "size": 65536});
    for wrong in [
        json!({"file": "none"}),
        json!({"data-file": "none"}),
        json!({"file": "read"}),
        json!({"data-file": "read"}),
    ] {
        assert_ne!(create(&mut peers, &qcow2(&wrong)), None, "{wrong}");
    }
    begin(&mut peers, [&[0; 65536], &[0; 65536]]);
    peers.execute("blockdev-add", merged(raw, &json!({"file": "data"})));
    assert_ne!(create(&mut peers, &qcow2(&json!({"data-file": "small"}))), None);
    // The file, which has grown before, is as long as it was.
    let left = fs::metadata(peers.ours.path("new")).expect("the file");
    assert_eq!(left.len(), 65536);
    peers.execute("blockdev-del", json!({"node-name": "small"}));
    // A longer file has no room that can be allocated.
    for how in ["falloc", "full"] {
        begin(&mut peers, [&[1; 2 << 20], &[]]);
        assert_ne!(create(&mut peers, &qcow2(&json!({"preallocation": how}))), None);
    }
    peers.stop();
}

#[test]
fn nodes_may_be_defined_in_place() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let named = |name: &str| merged(file("new"), &json!({"node-name": name}));
    let is_read_only = json!({"read-only": true});
    peers.execute("blockdev-add", merged(file("base.raw"), &json!({"node-name": "taken"})));
    for (options, fails) in [
        (qcow2(&json!({"file": file("new")})), false),
        (qcow2(&json!({"file": named("inside")})), false),
        (qcow2(&json!({"file": {"driver": "raw", "file": file("new")}})), false),
        (qcow2(&json!({"file": file("new"), "data-file": file("data")})), false),
        (luks(&json!({"file": file("new")})), false),
        (luks(&json!({"file": file("data"), "header": file("new")})), false),
        (qcow2(&json!({"file": file("none")})), true),
        (qcow2(&json!({"file": named("taken")})), true),
        (qcow2(&json!({"file": merged(file("new"), &is_read_only)})), true),
        (qcow2(&json!({"file": file("new"), "data-file": file("none")})), true),
        (qcow2(&json!({"file": file("new"), "size": 1000})), true),
        (luks(&json!({"file": file("new"), "key-secret": "none"})), true),
    ] {
        for side in peers.sides() {
            for name in FILES {
                fs::write(side.path(name), []).expect("writable");
            }
        }
        assert_eq!(create(&mut peers, &options).is_some(), fails, "{options}");
        // The nodes go with the job.
        let nodes = peers.ours.qmp.execute("query-named-block-nodes", json!({}));
        assert_eq!(nodes.as_array().expect("a list").len(), 1, "{nodes}");
        let [ours, theirs] = peers.sides();
        match options["driver"] == "qcow2" {
            _ if fails => {
                let left = fs::metadata(ours.path("new")).expect("the file");
                assert_eq!(left.len(), 0, "{options}");
            }
            true => {
                let has_data_file = options.get("data-file").is_some();
                let [ours, theirs] = [ours, theirs].map(|side| described(side, has_data_file));
                assert_eq!(ours, theirs, "{options}");
            }
            false => {
                let [ours, theirs] = [ours, theirs]
                    .map(|side| fs::metadata(side.path("new")).expect("the file").len());
                assert_eq!(ours, theirs, "{options}");
            }
        }
    }
    for wrong in [
        json!({"driver": "file"}),
        json!({"filename": "DIR/new"}),
        json!({"driver": "bogus", "filename": "DIR/new"}),
        merged(file("new"), &json!({"bogus": 1})),
    ] {
        let options = qcow2(&json!({"file": wrong}));
        let answer = peers.both("blockdev-create", json!({"job-id": "make", "options": options}));
        assert!(answer.get("error").is_some(), "{answer}");
    }
    peers.stop();
}

/// The old contents of a node do not become the disk's, as they do in QSD. A raw data file keeps its own.
#[test]
fn a_new_disk_has_no_old_contents() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let old = vec![0x55; 2 << 20];
    for (how, options) in ["off", "metadata", "falloc", "full"].into_iter().flat_map(|how| {
        [
            json!({}),
            json!({"data-file": "data"}),
            json!({"data-file": "data", "data-file-raw": true}),
        ]
        .map(|options| (how, options))
    }) {
        let (has_data_file, is_raw) =
            (options.get("data-file").is_some(), options.get("data-file-raw").is_some());
        for len in [400 << 10, DISK as usize, old.len()] {
            if len > DISK as usize && !has_data_file && ["falloc", "full"].contains(&how) {
                // Refused.
                continue;
            }
            let file = if has_data_file { &[][..] } else { &old[..len] };
            begin(&mut peers, [file, &old[..len]]);
            let options = merged(options.clone(), &json!({"preallocation": how}));
            let (options, ours) = (qcow2(&options), &mut peers.ours);
            assert_eq!(create_on(ours, &options), None);
            run("qemu-img", &ours.folder, &["check", "-q", "-U", "DIR/new"]);
            let found = contents(ours);
            match is_raw {
                true => {
                    let of_old = len.min(DISK as usize);
                    assert!(found[..of_old] == old[..of_old], "{options}: {len}");
                    assert!(found[of_old..].iter().all(|byte| *byte == 0), "{options}: {len}");
                    assert_eq!(create_on(&mut peers.theirs, &options), None);
                    assert_eq!(found, contents(&peers.theirs), "{options}: {len}");
                }
                false => assert!(found == vec![0; DISK as usize], "{options}: {len}"),
            }
        }
    }
    peers.stop();
}

/// A LUKS disk has its size in a node that was longer, too: nothing behind its end becomes the disk's.
#[test]
fn luks_nodes_are_as_long_as_in_qemu_storage_daemon() {
    let long = vec![0x55; 8 << 20];
    let inline = |how| json!({"file": "new", "preallocation": how});
    let detached = |how| json!({"file": "data", "header": "new", "preallocation": how});
    let made = [
        (0, inline("metadata")),
        (1_000_000, inline("falloc")),
        (1_000_000, detached("full")),
        (long.len(), inline("off")),
        (long.len(), detached("off")),
        (long.len(), json!({"header": "new"})),
    ];
    for (len, options) in made {
        // QSD keeps the node `file` of a disk with a header in use.
        let scratch = Scratch::new();
        let mut peers = peers(&scratch);
        begin(&mut peers, [&long[..len], &long[..len]]);
        assert_eq!(create(&mut peers, &luks(&options)), None, "{options} in {len} bytes");
        let [ours, theirs] = peers
            .sides()
            .map(|side| FILES.map(|name| fs::metadata(side.path(name)).expect("a file").len()));
        assert_eq!(ours, theirs, "{options} in {len} bytes");
        if options.get("file").is_none() {
            peers.stop();
            continue;
        }
        let disk = json!({"driver": "luks", "node-name": "disk", "key-secret": "sec0"});
        let mut disk = merged(disk, &options);
        disk.as_object_mut().expect("an object").remove("preallocation");
        peers.execute("blockdev-add", disk);
        for side in peers.sides() {
            let nodes = side.qmp.execute("query-named-block-nodes", json!({}));
            let mut nodes = nodes.as_array().expect("a list").iter();
            let disk = nodes.find(|node| node["node-name"] == "disk").expect("the disk");
            assert_eq!(disk["image"]["virtual-size"], DISK, "{options} in {len} bytes");
        }
        peers.stop();
    }
}

#[test]
fn errors_of_luks_disks_are_those_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut one = peers(&scratch);
    let long = vec![0x55; 8 << 20];
    for how in ["metadata", "falloc", "full"] {
        begin(&mut one, [&long, &[]]);
        assert_ne!(create(&mut one, &luks(&json!({"header": "new", "preallocation": how}))), None);
        if how != "metadata" {
            let refused = create(&mut one, &luks(&json!({"file": "new", "preallocation": how})));
            assert_ne!(refused, None, "{how}");
        }
    }
    let window = json!({"driver": "raw", "node-name": "window", "file": "new", "size": 6 << 20});
    one.execute("blockdev-add", window);
    assert_ne!(create(&mut one, &luks(&json!({"file": "window"}))), None);
    one.stop();
    for how in ["metadata", "falloc"] {
        let scratch = Scratch::new();
        let mut one = peers(&scratch);
        begin(&mut one, [&[], &long]);
        let options = json!({"file": "data", "header": "new", "preallocation": how});
        assert_ne!(create(&mut one, &luks(&options)), None, "{how}");
        one.stop();
    }
}

#[test]
fn files_are_as_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let file = |options: &Value| {
        merged(json!({"driver": "file", "filename": "DIR/file", "size": DISK}), options)
    };
    for options in [
        json!({}),
        json!({"size": 0}),
        json!({"preallocation": "falloc"}),
        json!({"preallocation": "full"}),
        json!({"nocow": true}),
        json!({"extent-size-hint": 0}),
        json!({"extent-size-hint": 65536}),
        json!({"extent-size-hint": 1}),
    ] {
        for side in peers.sides() {
            assert_eq!(create_on(side, &file(&options)), None, "{options}");
        }
        let [ours, theirs] =
            peers.sides().map(|side| fs::metadata(side.path("file")).expect("it was made"));
        assert_eq!((ours.len(), ours.mode()), (theirs.len(), theirs.mode()), "{options}");
        // QSD allocates the first block.
        assert!(ours.blocks().abs_diff(theirs.blocks()) <= 8, "{options}");
    }
    for options in [
        json!({"preallocation": "metadata"}),
        json!({"extent-size-hint": 1u64 << 32}),
        json!({"size": i64::MAX}),
        json!({"size": 1u64 << 62, "preallocation": "falloc"}),
        json!({"filename": "DIR/none/file"}),
        json!({"filename": "DIR"}),
    ] {
        let [ours, theirs] = peers.sides().map(|side| create_on(side, &file(&options)));
        assert!(ours.is_some() && ours == theirs, "{options}: {ours:?}, {theirs:?}");
    }
    peers.stop();
}

/// A creation that the file system has no room for gives back what it took, so that a smaller one has room.
#[test]
fn without_room_a_creation_leaves_the_space_free() {
    let preallocations = ["falloc", "full"];
    let file = json!({"driver": "file", "filename": "DIR/small/new"});
    let data = json!({"data-file": "data"});
    let images = [file, qcow2(&json!({})), qcow2(&data), luks(&json!({"file": "new"}))];
    for options in images.iter().flat_map(|image| {
        preallocations.map(|how| merged(image.clone(), &json!({"preallocation": how})))
    }) {
        // QSD keeps the node of a qcow2 image in use that could not be created.
        let scratch = Scratch::new();
        let mut peers = peers(&scratch);
        let mounts = peers.sides().map(|side| Mounted::new(&side.path("small"), "8m"));
        if mounts.iter().any(Option::is_none) {
            peers.stop();
            return untested(Needs::Root, "only root can mount");
        }
        if options["driver"] != "file" {
            for name in FILES {
                let filename = format!("DIR/small/{name}");
                for side in peers.sides() {
                    fs::write(side.path("small").join(name), []).expect("writable");
                }
                let node = json!({"driver": "file", "node-name": name, "filename": filename});
                peers.execute("blockdev-add", node);
            }
        }
        let large = merged(options.clone(), &json!({"size": 32 << 20}));
        let error = create(&mut peers, &large).expect("there is no room");
        assert!(error.ends_with("No space left on device"), "{options}: {error}");
        for name in FILES {
            let path = peers.ours.path("small").join(name);
            let left = if path.exists() { allocated(&path) } else { 0 };
            assert_eq!(left, 0, "{options}: {name}");
        }
        let small = merged(options.clone(), &json!({"size": DISK}));
        assert_eq!(create_on(&mut peers.ours, &small), None, "{options}");
        peers.stop();
    }
}
