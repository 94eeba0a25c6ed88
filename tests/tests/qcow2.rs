//! qcow2 images of a running daemon: with a guest's file system, and with a killed daemon.

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;

use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    Guest, Mounted, Qmp, Scratch, Server, ServerCommand, client as python_client, eventually,
    tied_command, tool,
};
use nix::sys::signal::Signal;

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
