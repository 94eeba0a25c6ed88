//! qcow2 images of a running daemon: with a guest's file system, and with a killed daemon.

use crate::common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use common::peers::{Peers, Side, run};
use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    Guest, Mounted, Qmp, Scratch, Server, ServerCommand, client as python_client, eventually,
    tied_command, tool,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// `--blockdev` for a qcow2 image in the scratch folder, as the node `disk`.
fn qcow2<'a>(command: ServerCommand<'a>, scratch: &Scratch, options: &str) -> ServerCommand<'a> {
    let path = scratch.path("disk.qcow2");
    let blockdev = format!(
        "qcow2,node-name=disk,discard=unmap,file.driver=file,file.filename={}{options}",
        path.display()
    );
    command.arg("--blockdev").arg(blockdev)
}

/// The exit status of `qemu-img check`: 0 for a clean image, 3 for leaked clusters.
fn check(scratch: &Scratch) -> Option<i32> {
    let output = client(scratch, "qemu-img", &["check", "-f", "qcow2", "disk.qcow2"]);
    println!("{}", String::from_utf8_lossy(&output.stdout));
    output.status.code()
}

/// In the working directory, as in QEMU: also if there is a file of that name beside the image.
#[test]
fn a_relative_data_file_is_where_qemu_storage_daemon_looks_for_it() {
    let scratch = Scratch::new();
    for folder in ["images", "work"] {
        fs::create_dir(scratch.path(folder)).expect("a new folder");
    }
    let images = scratch.path("images").display().to_string();
    let create =
        ["create", "-q", "-f", "qcow2", "-o", "data_file=d.raw,data_file_raw=on", "i.qcow2"];
    let create = [&["-C", &images, "qemu-img"][..], &create, &["64k"]].concat();
    client_output(&scratch, "env", &create);
    fs::write(scratch.path("images/d.raw"), [2; 65536]).expect("a file");
    fs::write(scratch.path("work/d.raw"), [1; 65536]).expect("a file");
    let at = ["-C".to_owned(), scratch.path("work").display().to_string()];
    let node = format!("qcow2,node-name=disk,file.driver=file,file.filename={images}/i.qcow2");
    let command = || {
        let command = ServerCommand::new(&scratch).wrapped_by_with("env", &at);
        nbd_server(command.arg("--blockdev").arg(&node), &scratch, "")
    };
    let server = nbd_export(command(), "disk", "").start();
    let uri = nbd_uri(&scratch, "disk");
    let read = |pattern: u8| {
        let read = format!("read -P {pattern} 0 64k");
        let said = client_output(&scratch, "qemu-io", &["-r", "-f", "raw", "-c", &read, &uri]);
        assert!(!said.contains("failed"), "{said}");
    };
    read(1);
    assert!(server.log().contains("d.raw', beside the image, is not used"), "{}", server.log());
    server.stop();
    let qsd = |arguments: &[&str]| {
        let mut command = tied_command(&tool("qemu-storage-daemon"));
        command.current_dir(scratch.path("work")).args(["--blockdev", &node]).args(arguments);
        command
    };
    let socket = format!("addr.type=unix,addr.path={}", scratch.path("nbd.sock").display());
    let export = "type=nbd,id=e,node-name=disk,name=disk";
    let mut theirs = qsd(&["--nbd-server", &socket, "--export", export]).spawn().expect("QSD runs");
    eventually("QSD's socket", || UnixStream::connect(scratch.path("nbd.sock")).ok());
    read(1);
    theirs.kill().expect("our child");
    theirs.wait().expect("our child");
    fs::remove_file(scratch.path("work/d.raw")).expect("our file");
    let (status, log) = command().run();
    let refused = "Could not open 'd.raw': No such file or directory";
    assert!(!status.success() && log.contains(refused), "{log}");
    assert!(log.contains(&format!("data-file.filename={images}/d.raw")), "{log}");
    let theirs = qsd(&[]).output().expect("QSD runs");
    let said = String::from_utf8_lossy(&theirs.stderr).into_owned();
    assert!(!theirs.status.success() && said.contains(refused), "{said}");
}

const FILL: &str = "
    /bin/mke2fs -q -t ext4 /dev/vda
    mount -t ext4 -o discard /dev/vda /mnt
    for i in 1 2 3 4 5 6 7 8; do
        mkdir /mnt/$i
        dd if=/dev/urandom of=/mnt/$i/large bs=64k count=$((i * 5)) 2>/dev/null
        for j in 1 2 3 4 5 6 7 8; do
            head -c $((i * j * 111)) /dev/urandom >/mnt/$i/small$j
        done
    done
    sync
    rm -r /mnt/3 /mnt/7
    cd /mnt
    find . -type f -exec md5sum {} + >/tmp/sums
    mv /tmp/sums /mnt/sums
    cd /
    umount /mnt
    e2fsck -fn /dev/vda 2>/dev/null >/tmp/fsck || { cat /tmp/fsck; exit 1; }";

const LOOK: &str = "
    e2fsck -fn /dev/vda 2>/dev/null >/tmp/fsck || { cat /tmp/fsck; exit 1; }
    mount -t ext4 /dev/vda /mnt
    cd /mnt
    md5sum -c sums >/tmp/sums || { cat /tmp/sums; exit 1; }
    wc -l <sums
    cd /
    umount /mnt";

#[test]
fn a_file_system_survives_on_a_chain_of_images() {
    let scratch = Scratch::new();
    let create = |arguments: &[&str]| {
        client_output(
            &scratch,
            "qemu-img",
            &[&["create", "-q", "-f", "qcow2"], arguments].concat(),
        );
    };
    create(&["base.qcow2", "64M"]);
    create(&["-o", "cluster_size=16k", "-F", "qcow2", "-b", "base.qcow2", "disk.qcow2"]);
    for (below, job, output) in
        [("filled.qcow2", FILL, &[] as &[&str]), ("seen.qcow2", LOOK, &["54"])]
    {
        let command = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
        let server = qcow2(command, &scratch, "")
            .export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1")
            .start();
        let lines = Guest::new().disk(server.socket("disk")).queues(2).run(job);
        server.stop();
        assert_eq!(check(&scratch), Some(0));
        assert_eq!(lines, output);
        // The next image gets this one as its backing file.
        fs::rename(scratch.path("disk.qcow2"), scratch.path(below)).expect("a new name");
        create(&["-F", "qcow2", "-b", below, "disk.qcow2"]);
    }
    let args = ["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", "disk.raw"];
    client_output(&scratch, "qemu-img", &args);
    let fsck = Command::new(tool("e2fsck")).arg("-fn").arg(scratch.path("disk.raw")).output();
    let fsck = fsck.expect("e2fsck runs");
    assert!(fsck.status.success(), "{fsck:?}");
}

/// All answered writes are there, flushed or not, and the image has at most leaked clusters.
#[test]
fn a_daemon_is_killed_under_load() {
    for (seed, options) in [("1", "cluster_size=4k"), ("2", "cluster_size=512"), ("3", "")] {
        let scratch = Scratch::new();
        let options =
            format!("refcount_bits=16{}{options}", if options.is_empty() { "" } else { "," });
        let args = ["create", "-q", "-f", "qcow2", "-o", &options, "disk.qcow2", "64M"];
        client_output(&scratch, "qemu-img", &args);
        fs::write(scratch.path("model"), "{}").expect("a file");
        let script = python_client("killed.py").display().to_string();
        let uri = nbd_uri(&scratch, "disk");
        for round in ["a", "b", "c", "d"] {
            let command = ServerCommand::new(&scratch).named(round).iothread("io0").iothread("io1");
            let command = nbd_server(qcow2(command, &scratch, ""), &scratch, "");
            let export = ",writable=on,iothread.0=io0,iothread.1=io1";
            let server = nbd_export(command, "disk", export).start();
            let look = [&script, &uri, "look", "model"];
            client_output(&scratch, "/usr/bin/python3", &look);
            let (pid, seed) = (server.pid().to_string(), format!("{seed}{}", round.as_bytes()[0]));
            let load = [&script, &uri, "load", &pid, &seed, "model"];
            client_output(&scratch, "/usr/bin/python3", &load);
            drop(server);
            let found = check(&scratch);
            assert!(matches!(found, Some(0 | 3)), "qemu-img check: {found:?}, seed {seed}");
        }
    }
}

/// Makes an image with an unaligned cluster offset in its L2 table.
fn damaged(scratch: &Scratch) {
    client_output(scratch, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
    client_output(scratch, "qemu-io", &["-f", "qcow2", "-c", "write 0 64k", "disk.qcow2"]);
    let path = scratch.path("disk.qcow2");
    let mut image = fs::read(&path).expect("it was made");
    let number = |at: usize| {
        let number = u64::from_be_bytes(image[at..at + 8].try_into().expect("eight bytes"));
        usize::try_from(number & 0x00ff_ffff_ffff_fe00).expect("in the file")
    };
    let l2 = number(number(40));
    image[l2 + 6] |= 2;
    fs::write(&path, &image).expect("writable");
}

#[test]
fn damage_is_reported_once() {
    for read_only in [false, true] {
        let scratch = Scratch::new();
        damaged(&scratch);
        let (node, export) = match read_only {
            true => (",read-only=on", ""),
            false => ("", ",writable=on"),
        };
        let command = nbd_server(ServerCommand::new(&scratch).monitor("qmp"), &scratch, "");
        let mut server = nbd_export(qcow2(command, &scratch, node), "disk", export).start();
        let mut monitor = Qmp::connect(&server.socket("qmp"));
        for _ in 0..2 {
            let uri = nbd_uri(&scratch, "disk");
            let read = ["-r", "-f", "raw", "-c", "read 0 4k", &uri];
            let said = client(&scratch, "qemu-io", &read);
            let said = String::from_utf8_lossy(&said.stdout).into_owned();
            assert!(said.contains("read failed: Input/output error"), "{said}");
        }
        let event = monitor.wait_for("BLOCK_IMAGE_CORRUPTED");
        assert_eq!(event["node-name"], "disk", "{event}");
        assert_eq!(event["device"], "", "{event}");
        assert_eq!(event["fatal"], !read_only, "{event}");
        let log = server.log();
        let told: Vec<_> = log.lines().filter(|line| line.contains("is damaged")).collect();
        assert!(matches!(&*told, [line] if line.contains("'disk'")), "{log}");
        // The last flush fails too, if the image was written to.
        server.signal(Signal::SIGTERM);
        assert_eq!(server.wait().code(), Some(if read_only { 0 } else { 1 }));
        let corrupt = fs::read(scratch.path("disk.qcow2")).expect("it is there")[79] & 2;
        assert_eq!(corrupt, if read_only { 0 } else { 2 });
    }
}

#[test]
fn inconsistent_bitmaps_are_named() {
    let scratch = Scratch::new();
    client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
    for name in ["daily", "weekly"] {
        client_output(&scratch, "qemu-img", &["bitmap", "--add", "disk.qcow2", name]);
    }
    let start = |options: &str| qcow2(ServerCommand::new(&scratch), &scratch, options).start();
    let lines = |server: &Server| {
        let log = server.log();
        let lines = log.lines().filter(|line| line.contains("bitmaps"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    for options in [",read-only=on", "", ""] {
        let server = start(options);
        assert_eq!(lines(&server), [""; 0], "closed, the image has what it had");
        server.stop();
    }
    start("").kill();
    // They survive the kill, unless another program writes to the image before the next start.
    client_output(&scratch, "qemu-io", &["-f", "qcow2", "-c", "write 0 64k", "disk.qcow2"]);
    let server = start("");
    let told = lines(&server);
    assert!(matches!(&*told, [line] if line.contains("\"daily\", \"weekly\"")), "{told:?}");
    server.stop();
    assert_eq!(check(&scratch), Some(0));
}

/// Tables are written out late. A file system that is full by then has room for them all the same.
#[test]
fn on_a_full_file_system_answered_writes_are_in_the_image() {
    let scratch = Scratch::new();
    let Some(_mounted) = Mounted::new(&scratch.path("small"), "8m") else {
        return test_requirements::untested(test_requirements::Needs::Root, "only root can mount");
    };
    let image = scratch.path("small/disk.qcow2").display().to_string();
    for is_compressed in [false, true] {
        let _ = fs::remove_file(&image);
        client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", &image, "1T"]);
        let node = format!("qcow2,node-name=disk,file.driver=file,file.filename={image}");
        let command = ServerCommand::new(&scratch).arg("--blockdev").arg(node);
        let (command, node) = match is_compressed {
            true => {
                (command.arg("--blockdev").arg("compress,node-name=packed,file=disk"), "packed")
            }
            false => (command, "disk"),
        };
        let server =
            nbd_export(nbd_server(command, &scratch, ""), node, ",writable=on,name=disk").start();
        // Each needs another L2 table.
        let at = |nth: usize| format!("{}M", nth * 512);
        let commands: Vec<String> =
            (0..200).map(|nth| format!("write -P {} {} 64k", nth + 1, at(nth))).collect();
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let uri = nbd_uri(&scratch, "disk");
        let output = client(
            &scratch,
            "qemu-io",
            &commands.chain(["-t", "writeback", "-f", "raw", &uri]).collect::<Vec<_>>(),
        );
        let told = String::from_utf8_lossy(&output.stdout);
        let answered: Vec<bool> = told
            .lines()
            .filter(|line| line.starts_with("wrote") || line.starts_with("write failed"))
            .map(|line| line.starts_with("wrote"))
            .collect();
        assert!(answered.len() == 200 && answered.contains(&true), "{output:?}");
        assert!(answered.contains(&false), "the file system is full: {output:?}");
        // The tables are written out now. A failure would be the daemon's exit status.
        server.stop();
        let reads: Vec<String> = (0..200)
            .filter(|nth| answered[*nth])
            .map(|nth| format!("read -P {} {} 64k", nth + 1, at(nth)))
            .collect();
        let reads = reads.iter().flat_map(|command| ["-c", command]);
        let read = client(
            &scratch,
            "qemu-io",
            &reads.chain(["-r", "-f", "qcow2", &image]).collect::<Vec<_>>(),
        );
        assert!(read.status.success(), "{read:?}");
        client_output(&scratch, "qemu-img", &["check", "-q", "-f", "qcow2", &image]);
    }
}

/// Header extensions.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const DATA_FILE_NAME: u32 = 0x4441_5441;
const BITMAPS: u32 = 0x2385_2875;

type Extensions = Vec<(u32, Vec<u8>)>;

fn number(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..at + len].iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// The header extensions of an image of version 3.
fn extensions(image: &[u8]) -> Extensions {
    let (mut at, mut found) = (number(image, 100, 4), Vec::new());
    while number(image, at, 4) != 0 {
        let (kind, len) = (number(image, at, 4) as u32, number(image, at + 4, 4));
        found.push((kind, image[at + 8..at + 8 + len].to_vec()));
        at += 8 + len.next_multiple_of(8);
    }
    found
}

/// Gives an image these header extensions, and this name of a backing file if there is one.
fn put_header(image: &mut [u8], extensions: &[(u32, &[u8])], backing: Option<&[u8]>) {
    let mut header = image[..number(image, 100, 4)].to_vec();
    for (kind, data) in extensions {
        header.extend(kind.to_be_bytes());
        header.extend((data.len() as u32).to_be_bytes());
        header.extend(*data);
        header.resize(header.len().next_multiple_of(8), 0);
    }
    header.extend([0; 8]);
    if let Some(name) = backing {
        let at = header.len() as u64;
        header[8..16].copy_from_slice(&at.to_be_bytes());
        header[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        header.extend(name);
    }
    header.resize(1 << 16, 0);
    image[..1 << 16].copy_from_slice(&header);
}

/// An unusual image: options of `qemu-img create`, and what is done to its bytes. The path is that of its folder.
struct Unusual(&'static str, &'static str, fn(&mut [u8], &Path));

fn backed(image: &mut [u8], formats: &[&[u8]], name: &[u8]) {
    let formats: Vec<_> = formats.iter().map(|format| (BACKING_FORMAT, *format)).collect();
    put_header(image, &formats, Some(name));
}

/// Gives an image with a data file these names of data files, in the folder.
fn data_files(image: &mut [u8], folder: &Path, names: &[&[u8]]) {
    let names: Vec<_> =
        names.iter().map(|name| [folder.as_os_str().as_bytes(), b"/", name].concat()).collect();
    let names: Vec<_> = names.iter().map(|name| (DATA_FILE_NAME, &name[..])).collect();
    put_header(image, &names, None);
}

/// Sets reserved bits of the first L1 entry.
fn reserve(image: &mut [u8], bits: u64) {
    let at = number(image, 40, 8);
    let entry = number(image, at, 8) as u64 | bits;
    image[at..at + 8].copy_from_slice(&entry.to_be_bytes());
}

const DATA_FILE: &str = "data_file=DIR/data";
const UNUSUAL: &[Unusual] = &[
    Unusual("a size within a sector", "", |image, _| {
        image[24..32].copy_from_slice(&((1u64 << 20) + 100).to_be_bytes());
    }),
    Unusual("a size of a sector less a byte", "", |image, _| {
        image[24..32].copy_from_slice(&((1u64 << 20) - 1).to_be_bytes());
    }),
    Unusual("a backing name with NULs", "", |image, _| backed(image, &[b"raw"], b"base\0\0")),
    Unusual("a backing name with text after a NUL", "", |image, _| {
        backed(image, &[b"raw"], b"base\0none");
    }),
    Unusual("a backing name of NULs alone", "", |image, _| backed(image, &[b"raw"], b"\0\0")),
    Unusual("a backing name that is not UTF-8", "", |image, _| {
        backed(image, &[b"raw"], b"b\xffse");
    }),
    Unusual("a backing format with a NUL", "", |image, _| backed(image, &[b"raw\0"], b"base")),
    Unusual("an empty backing format", "", |image, _| backed(image, &[b""], b"base")),
    Unusual("two backing formats", "", |image, _| backed(image, &[b"qcow2", b"raw"], b"base")),
    Unusual("two data files", DATA_FILE, |image, folder| {
        data_files(image, folder, &[b"none", b"data"]);
    }),
    Unusual("a data file's name with a NUL", DATA_FILE, |image, folder| {
        data_files(image, folder, &[b"data\0none"]);
    }),
    Unusual("a data file's name that is not UTF-8", DATA_FILE, |image, folder| {
        let name = OsStr::from_bytes(b"d\xffta");
        fs::rename(folder.join("data"), folder.join(name)).expect("a file");
        data_files(image, folder, &[b"d\xffta"]);
    }),
    Unusual("features' names of odd length", "", |image, _| {
        put_header(image, &[(FEATURE_NAMES, &[b'x'; 50])], None);
    }),
    Unusual("two places of bitmaps", "", |image, _| {
        let all = extensions(image);
        let all = all.iter().chain(all.iter().filter(|(kind, _)| *kind == BITMAPS));
        let all: Vec<_> = all.map(|(kind, data)| (*kind, &data[..])).collect();
        put_header(image, &all, None);
    }),
    Unusual("a low reserved bit of an L1 entry", "", |image, _| reserve(image, 1)),
    Unusual("high reserved bits of an L1 entry", "", |image, _| reserve(image, 0x5a << 56)),
];

/// Makes the image, with data of its own, and its backing files.
fn make_unusual(side: &Side, Unusual(name, options, change): &Unusual) {
    for name in [&b"base"[..], b"b\xffse"] {
        fs::write(side.folder.join(OsStr::from_bytes(name)), vec![7; 1 << 20]).expect("a file");
    }
    let options = ["lazy_refcounts=off", options].join(if options.is_empty() { "" } else { "," });
    let create = ["create", "-q", "-f", "qcow2", "-o", &options, "DIR/disk", "1025k"];
    run("qemu-img", &side.folder, &create);
    run("qemu-io", &side.folder, &["-f", "qcow2", "-c", "write -P 5 64k 64k", "DIR/disk"]);
    if name.contains("bitmaps") {
        run("qemu-img", &side.folder, &["bitmap", "--add", "DIR/disk", "b0"]);
    }
    let mut image = fs::read(side.path("disk")).expect("an image");
    change(&mut image, &side.folder);
    fs::write(side.path("disk"), image).expect("an image");
}

/// What the monitor tells of the node's image.
fn told(side: &mut Side) -> Value {
    let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
    let nodes = nodes["return"].as_array().expect("nodes");
    let node = nodes.iter().find(|node| node["node-name"] == "disk").expect("the node");
    let image = &node["image"];
    let names =
        ["virtual-size", "backing-filename", "backing-filename-format", "full-backing-filename"];
    let data_file = &image["format-specific"]["data"]["data-file"];
    json!([names.map(|name| &image[name]), data_file, image["format-specific"]["data"]["bitmaps"]])
}

#[test]
fn unusual_headers_and_l1_entries_are_read_and_written_as_by_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    for unusual in UNUSUAL {
        let name = unusual.0;
        peers.sides().into_iter().for_each(|side| make_unusual(side, unusual));
        let before = peers.sides().map(|side| fs::read(side.path("disk")).expect("an image"));
        for read_only in [true, false] {
            eprintln!("{name}, {}", if read_only { "read-only" } else { "writable" });
            let file = json!({"driver": "file", "filename": "DIR/disk"});
            let node = json!({"driver": "qcow2", "node-name": "disk", "read-only": read_only, "file": file});
            peers.execute("blockdev-add", node);
            let [ours, theirs] = peers.sides().map(told);
            assert_eq!(ours, theirs, "{name}");
            let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "e", "writable": !read_only});
            peers.execute("block-export-add", export);
            let [ours, theirs] = peers.sides().map(|side| {
                let uri = "nbd+unix:///e?socket=DIR/nbd.sock";
                if !read_only {
                    let write = ["-f", "raw", "-c", "write -P 9 100k 50k", "-c", "flush", uri];
                    run("qemu-io", &side.folder, &write);
                }
                run(
                    "qemu-img",
                    &side.folder,
                    &["convert", "-f", "raw", "-O", "raw", uri, "DIR/out"],
                );
                fs::read(side.path("out")).expect("a file")
            });
            assert!(ours == theirs && ours[64 << 10..100 << 10] == [5; 36 << 10], "{name}");
            assert_eq!(ours[100 << 10] == 9, !read_only);
            peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
            peers.wait_for("BLOCK_EXPORT_DELETED");
            peers.execute("blockdev-del", json!({"node-name": "disk"}));
            if read_only {
                let after =
                    peers.sides().map(|side| fs::read(side.path("disk")).expect("an image"));
                assert!(before == after, "{name}");
            }
        }
        // What the one has written, the other one reads; the checks agree.
        let ours = peers.ours.folder.clone();
        let file = format!("{}/disk", ours.display());
        let theirs = Command::new(tool("qemu-img")).args(["check", "-q", &file]).status();
        let check = ServerCommand::other_command(&scratch, "check").arg(&file);
        let (status, output) = check.run();
        assert_eq!(status.code(), theirs.expect("it can be run").code(), "{name}: {output}");
        run("qemu-img", &ours, &["convert", "-f", "qcow2", "-O", "raw", "DIR/disk", "DIR/again"]);
        assert!(
            fs::read(ours.join("again")).expect("a file")
                == fs::read(ours.join("out")).expect("a file"),
            "{name}"
        );
    }
    peers.stop();
}

/// What QSD refuses is refused; and a name that is not UTF-8 is not put into another header.
#[test]
fn names_in_headers_that_cannot_be_used_are_refused() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let file = json!({"driver": "file", "filename": "DIR/disk"});
    let node = json!({"driver": "qcow2", "node-name": "disk", "file": file});
    for unusual in [
        Unusual("a long format", "", |image, _| {
            backed(image, &[b"raw\0\0\0\0\0\0\0\0\0\0\0\0\0"], b"base")
        }),
        Unusual("no data file", DATA_FILE, |image, _| {
            put_header(image, &[(DATA_FILE_NAME, b"\0")], None)
        }),
    ] {
        peers.sides().into_iter().for_each(|side| make_unusual(side, &unusual));
        let refused = peers.both("blockdev-add", node.clone());
        assert!(refused["error"]["desc"].is_string(), "{}: {refused}", unusual.0);
    }
    let side = &mut peers.ours;
    make_unusual(side, &Unusual("", "", |image, _| backed(image, &[b"raw"], b"b\xffse")));
    run(
        "qemu-img",
        &side.folder,
        &["create", "-q", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "DIR/top"],
    );
    let file = json!({"driver": "file", "filename": "DIR/top"});
    side.ask("blockdev-add", &json!({"driver": "qcow2", "node-name": "top", "file": file}));
    let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
    let nodes = nodes["return"].as_array().expect("nodes");
    let base = nodes.iter().find(|node| node["drv"] == "raw").expect("the backing image");
    let stream = json!({"job-id": "j", "device": "top", "base-node": base["node-name"]});
    let answer = side.ask("block-stream", &stream);
    let desc = answer["error"]["desc"].as_str().expect("it is refused");
    assert!(desc.contains("b\u{fffd}se' of node '") && desc.contains("' is not UTF-8"), "{desc}");
    peers.stop();
}
