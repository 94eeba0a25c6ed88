//! `ringmill check`: its verdicts, and images that were not closed.

use std::fs;
use std::ops::Range;
use std::process::Command;

use hostile::images::Costly;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::Signal;
use serde_json::json;

use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{Qmp, Scratch, ServerCommand, eventually, tool};

/// Runs the check. Returns exit code and output.
fn check(scratch: &Scratch, arguments: &[&str]) -> (Option<i32>, String) {
    let command = ServerCommand::other_command(scratch, "check")
        .arg(scratch.path("disk.qcow2").display().to_string());
    let (status, output) =
        arguments.iter().fold(command, |command, argument| command.arg(*argument)).run();
    (status.code(), output)
}

fn create(scratch: &Scratch, options: &[&str]) {
    let create = ["create", "-q", "-f", "qcow2"];
    client_output(scratch, "qemu-img", &[&create, options, &["disk.qcow2", "64M"]].concat());
    client_output(scratch, "qemu-io", &["-f", "qcow2", "-c", "write 0 1M", "disk.qcow2"]);
}

/// Changes the reference count of a cluster.
fn set_count(scratch: &Scratch, cluster: usize, count: u8) {
    let path = scratch.path("disk.qcow2");
    let mut image = fs::read(&path).expect("it was made");
    let number = |at: usize| {
        let number = u64::from_be_bytes(image[at..at + 8].try_into().expect("eight bytes"));
        usize::try_from(number).expect("in the file")
    };
    let block = number(number(48));
    image[block + 2 * cluster + 1] = count;
    fs::write(&path, image).expect("writable");
}

#[test]
fn exit_codes_and_texts_are_those_of_qemu_img() {
    let scratch = Scratch::new();
    create(&scratch, &[]);
    // The L1 table is counted too often, then a cluster of data not at all.
    for (counts, expected) in [(&[] as &[(usize, u8)], 0), (&[(3, 3)], 3), (&[(9, 0)], 2)] {
        counts.iter().for_each(|(cluster, count)| set_count(&scratch, *cluster, *count));
        for form in ["human", "json"] {
            let (code, text) = check(&scratch, &["--output", form]);
            assert_eq!(code, Some(expected), "{text}");
            let arguments = ["check", "--output", form, "disk.qcow2"];
            let theirs = client(&scratch, "qemu-img", &arguments);
            assert_eq!(theirs.status.code(), Some(expected));
            let theirs = String::from_utf8_lossy(&theirs.stdout).into_owned();
            for line in
                theirs.lines().filter(|line| !line.contains("\"filename\"") && line.len() > 1)
            {
                // The order of members in JSON is QEMU's hash table's.
                let line = line.trim_end_matches(',');
                assert!(text.contains(line), "{line}\n{text}");
            }
        }
    }
    let (code, text) = check(&scratch, &["--repair", "leaks"]);
    assert_eq!(code, Some(1), "{text}");
    let (code, text) = check(&scratch, &["--repair", "all"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("were found and repaired"), "{text}");
    assert_eq!(client(&scratch, "qemu-img", &["check", "disk.qcow2"]).status.code(), Some(0));
    fs::write(scratch.path("disk.qcow2"), [0; 512]).expect("writable");
    assert_eq!(check(&scratch, &[]).0, Some(63));
    fs::remove_file(scratch.path("disk.qcow2")).expect("it is there");
    assert_eq!(check(&scratch, &[]).0, Some(1));
}

/// A snapshot table with fewer entries than the header says: zeroes follow, which lack data that each entry has to have.
#[test]
fn an_incomplete_snapshot_table_is_repaired_as_by_qemu_img() {
    let scratch = Scratch::new();
    create(&scratch, &[]);
    for name in ["one", "two"] {
        client_output(&scratch, "qemu-img", &["snapshot", "-c", name, "disk.qcow2"]);
    }
    let path = scratch.path("disk.qcow2");
    let mut image = fs::read(&path).expect("it was made");
    // The number of snapshots.
    image[63] += 2;
    fs::write(&path, &image).expect("writable");
    let (code, text) = check(&scratch, &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("ERROR snapshot table entry 3 is incomplete"), "{text}");
    fs::write(scratch.path("theirs.qcow2"), &image).expect("writable");
    let theirs = client_output(&scratch, "qemu-img", &["check", "-r", "all", "theirs.qcow2"]);
    let (code, text) = check(&scratch, &["--repair", "all"]);
    assert_eq!(code, Some(0), "{text}");
    for line in ["    2 corruptions", "Image end offset"] {
        let line = theirs.lines().find(|found| found.starts_with(line)).expect("a line");
        assert!(text.contains(line), "{line}\n{text}");
    }
    // The tables are the same: number and place are in the header.
    let table = |name: &str| {
        let image = fs::read(scratch.path(name)).expect("it is there");
        let at = u64::from_be_bytes(image[64..72].try_into().expect("eight bytes")) as usize;
        (image[60..64].to_vec(), image[at..at + 4096].to_vec())
    };
    assert!(table("disk.qcow2") == table("theirs.qcow2"));
    for image in ["disk.qcow2", "theirs.qcow2"] {
        client_output(&scratch, "qemu-img", &["check", "-q", image]);
    }
    assert_eq!(check(&scratch, &[]).0, Some(0));
}

/// The place of the LUKS header in an image: the data of the header extension.
fn luks_header(image: &[u8]) -> Range<usize> {
    let number = |at: usize, len: usize| {
        image[at..at + len].iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    let mut at = number(100, 4);
    while number(at, 4) != 0x0537_be77 {
        assert_ne!(number(at, 4), 0, "the image is encrypted");
        at += 8 + number(at + 4, 4).next_multiple_of(8);
    }
    let start = number(at + 8, 8);
    start..start + number(at + 16, 8)
}

/// A repair counts the clusters of the LUKS header as in use. Given up as leaks, the next write would
/// destroy all keys of the disk.
#[test]
fn a_repair_keeps_the_luks_header_of_an_encrypted_image() {
    let scratch = Scratch::new();
    let secret = ["--object", "secret,id=s,data=letmein"];
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1";
    let create = ["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "64M"];
    client_output(&scratch, "qemu-img", &[&create[..1], &secret, &create[1..]].concat());
    let opts = "driver=qcow2,encrypt.key-secret=s,file.filename=disk.qcow2";
    let io = |command: &str| {
        let arguments = ["--image-opts", "-c", command, opts];
        let said = client_output(&scratch, "qemu-io", &[&secret[..], &arguments].concat());
        assert!(!said.contains("failed"), "{said}");
    };
    let theirs = |output: &str| {
        let arguments = ["--output", output, "--image-opts", opts];
        client(&scratch, "qemu-img", &[&["check"], &secret[..], &arguments].concat())
    };
    io("write -P 1 0 1M");
    let path = scratch.path("disk.qcow2");
    let before = fs::read(&path).expect("it is there");
    let place = luks_header(&before);
    let clusters = place.start >> 16..place.end.div_ceil(1 << 16);
    assert!(clusters.len() > 30, "{place:?}");
    assert_eq!(check(&scratch, &[]).0, Some(0));
    // A cluster of the header counted too often, then one not at all beside another one.
    for (damage, expected) in
        [(vec![(clusters.start, 2)], 3), (vec![(clusters.end - 1, 0), (clusters.start + 7, 3)], 2)]
    {
        damage.iter().for_each(|(cluster, count)| set_count(&scratch, *cluster, *count));
        let (code, text) = check(&scratch, &["--output", "json"]);
        assert_eq!(code, Some(expected), "{text}");
        let found = theirs("json");
        assert_eq!(found.status.code(), Some(expected));
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        for line in found.lines().filter(|line| !line.contains("\"filename\"") && line.len() > 1) {
            let line = line.trim_end_matches(',');
            assert!(text.contains(line), "{line}\n{text}");
        }
        let (code, text) = check(&scratch, &["--repair", "all"]);
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(theirs("human").status.code(), Some(0));
        // New clusters: those of the header are not among them.
        io("write -P 2 8M 8M");
        let after = fs::read(&path).expect("it is there");
        assert!(after[place.clone()] == before[place.clone()], "the LUKS header is what it was");
        ["read -P 1 0 1M", "read -P 2 8M 8M"].into_iter().for_each(io);
    }
    assert_eq!(theirs("human").status.code(), Some(0));
}

#[test]
fn an_image_in_use_is_not_checked() {
    let scratch = Scratch::new();
    create(&scratch, &[]);
    let path = scratch.path("disk.qcow2");
    let blockdev =
        format!("qcow2,node-name=disk,file.driver=file,file.filename={}", path.display());
    let server = ServerCommand::new(&scratch).arg("--blockdev").arg(blockdev).start();
    for repair in [&[] as &[&str], &["--repair", "all"]] {
        let (code, text) = check(&scratch, repair);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("lock"), "{text}");
    }
    server.stop();
    assert_eq!(check(&scratch, &[]).0, Some(0));
}

/// What a killed daemon has left in its journal is part of the image, and `--repair` writes it.
#[test]
fn the_journal_of_a_killed_daemon_is_not_lost() {
    let scratch = Scratch::new();
    create(&scratch, &[]);
    let path = scratch.path("disk.qcow2");
    let blockdev =
        format!("qcow2,node-name=disk,file.driver=file,file.filename={}", path.display());
    let command = nbd_server(ServerCommand::new(&scratch), &scratch, "");
    let command = command.arg("--blockdev").arg(blockdev);
    let server = nbd_export(command, "disk", ",writable=on").start();
    // Without a flush: only the journal knows where the data is.
    let uri = nbd_uri(&scratch, "disk");
    let write = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); h.pwrite(b'\\x07' * 65536, 8 << 20)";
    client_output(&scratch, "/usr/bin/python3", &["-c", write, &uri]);
    server.kill();
    let before = fs::read(&path).expect("it is there");
    // Without the journal's folder the data would be lost.
    let command = ServerCommand::other_command(&scratch, "check");
    let command = command.env("RUNTIME_DIRECTORY", "/nowhere");
    let (status, text) = command.arg(path.display().to_string()).arg("--repair").arg("all").run();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("is not found"), "{text}");
    assert!(fs::read(&path).expect("it is there") == before, "nothing is written");
    assert_eq!(before[79] & 1, 1, "the image is marked");
    let (code, text) = check(&scratch, &["--output", "json"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\"allocated-clusters\": 17"), "{text}");
    assert!(fs::read(&path).expect("it is there") == before, "a check writes nothing");
    let (code, text) = check(&scratch, &["--repair", "all"]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(fs::read(&path).expect("it is there")[79], 0);
    let read = "read -P 7 8M 64k";
    client_output(&scratch, "qemu-io", &["-f", "qcow2", "-c", read, "disk.qcow2"]);
    assert_eq!(client(&scratch, "qemu-img", &["check", "disk.qcow2"]).status.code(), Some(0));
}

/// A daemon with journals in `run` and the disk, which it exports.
fn journaled<'a>(scratch: &'a Scratch, options: &str) -> ServerCommand<'a> {
    let path = scratch.path("disk.qcow2");
    let file = format!("file.driver=file,file.filename={}", path.display());
    let run = scratch.path("run");
    fs::create_dir_all(&run).expect("a folder");
    let command = ServerCommand::new(scratch).env("RUNTIME_DIRECTORY", run.display().to_string());
    let command = nbd_server(command, scratch, "");
    let command = command.arg("--blockdev").arg(format!("qcow2,node-name=disk,{file}{options}"));
    let writable = if options.contains("read-only") { "" } else { ",writable=on" };
    nbd_export(command, "disk", writable)
}

/// A daemon writes 64 KiB at 8 MiB to a new image without a flush, and is killed.
fn write_and_kill(scratch: &Scratch) {
    create(scratch, &[]);
    let server = journaled(scratch, "").start();
    let write = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); h.pwrite(b'\\x07' * 65536, 8 << 20)";
    client_output(scratch, "/usr/bin/python3", &["-c", write, &nbd_uri(scratch, "disk")]);
    server.kill();
    // The kernel releases the image locks of the daemon once its last requests are done.
    let image = fs::File::options().read(true).write(true).open(scratch.path("disk.qcow2"));
    let whole = libc::flock {
        l_type: libc::F_WRLCK as _,
        l_whence: libc::SEEK_SET as _,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(image.expect("it is there"), FcntlArg::F_OFD_SETLKW(&whole)).expect("a lock");
}

fn journals(scratch: &Scratch) -> Vec<String> {
    let files = fs::read_dir(scratch.path("run/journals")).expect("the folder of journals");
    files.map(|file| file.expect("it").file_name().into_string().expect("ASCII")).collect()
}

/// What another program does to the image after a kill. The next start says that the journal does not apply any more,
/// once, and opens the image as that program has left it.
#[test]
fn a_change_by_another_program_after_a_kill_is_told() {
    const TOLD: &str = "was changed without its journal";
    let program = |program: &'static str, arguments: &'static [&'static str]| {
        move |scratch: &Scratch| drop(client_output(scratch, program, arguments))
    };
    let clear_dirty = |scratch: &Scratch| {
        let mut image = fs::read(scratch.path("disk.qcow2")).expect("it is there");
        image[79] &= !1;
        fs::write(scratch.path("disk.qcow2"), image).expect("writable");
    };
    // What was never written is at the same place as what the daemon wrote: the file's contents tell them apart.
    let (kept, lost, zeroes) = ("read -P 7 8M 64k", "read -P 0 8M 64k", "read -P 0 32M 64k");
    type Change<'a> = &'a dyn Fn(&Scratch);
    let cases: &[(Change<'_>, bool, [&str; 2])] = &[
        (&|_| (), false, [kept, zeroes]),
        (&program("qemu-img", &["info", "disk.qcow2"]), false, [kept, zeroes]),
        (&program("qemu-img", &["check", "disk.qcow2"]), false, [kept, zeroes]),
        (&program("qemu-img", &["check", "-r", "all", "disk.qcow2"]), true, [lost, zeroes]),
        (
            &program("qemu-io", &["-f", "qcow2", "-c", "write -P 9 32M 64k", "disk.qcow2"]),
            true,
            [lost, "read -P 9 32M 64k"],
        ),
        (&program("qemu-img", &["resize", "-q", "disk.qcow2", "128M"]), true, [lost, zeroes]),
        (&program("qemu-img", &["snapshot", "-c", "s", "disk.qcow2"]), true, [lost, zeroes]),
        // Nothing but the dirty bit is changed, by a program that keeps the rest of the header's cluster.
        (&clear_dirty, true, [lost, zeroes]),
    ];
    for (number, (change, is_told, reads)) in cases.iter().enumerate() {
        let scratch = Scratch::new();
        write_and_kill(&scratch);
        change(&scratch);
        let server = journaled(&scratch, "").start();
        let log = server.log();
        assert_eq!(log.matches(TOLD).count(), usize::from(*is_told), "case {number}: {log}");
        server.stop();
        assert!(journals(&scratch).is_empty(), "case {number}");
        let server = journaled(&scratch, "").start();
        assert!(!server.log().contains(TOLD), "case {number}: {}", server.log());
        for read in reads {
            let uri = nbd_uri(&scratch, "disk");
            let said = client_output(&scratch, "qemu-io", &["-f", "raw", "-c", read, &uri]);
            assert!(!said.contains("failed"), "case {number}: {said}");
        }
        server.stop();
        let checked = client(&scratch, "qemu-img", &["check", "disk.qcow2"]);
        assert_eq!(checked.status.code(), Some(0), "case {number}");
    }
}

/// A look at an image that another program has changed says so and leaves the journal, which the next owner removes. A
/// new image in the place of a removed one has nothing to do with that one's journal.
#[test]
fn a_journal_is_told_only_of_its_own_image() {
    const TOLD: &str = "was changed without its journal";
    let scratch = Scratch::new();
    write_and_kill(&scratch);
    let path = scratch.path("disk.qcow2");
    client_output(&scratch, "qemu-img", &["check", "-q", "-r", "all", "disk.qcow2"]);
    for _ in 0..2 {
        let server = journaled(&scratch, ",read-only=on,file.read-only=on").start();
        assert!(server.log().contains(TOLD), "{}", server.log());
        server.stop();
        assert_eq!(journals(&scratch).len(), 1);
    }
    let run = scratch.path("run").display().to_string();
    let check = ServerCommand::other_command(&scratch, "check").env("RUNTIME_DIRECTORY", run);
    let (status, text) = check.arg(path.display().to_string()).args(["--repair", "all"]).run();
    assert!(status.success() && text.contains(TOLD), "{text}");
    assert!(journals(&scratch).is_empty());

    fs::remove_file(&path).expect("it is there");
    write_and_kill(&scratch);
    fs::remove_file(&path).expect("it is there");
    create(&scratch, &[]);
    let server = journaled(&scratch, "").start();
    assert!(!server.log().contains(TOLD), "{}", server.log());
    server.stop();
    assert_eq!(journals(&scratch).len(), 1, "the journal of the removed image");
}

/// QEMU with lazy reference counts is killed: the image is repaired when it is opened for writing.
#[test]
fn a_dirty_image_of_qemu_is_repaired_when_it_is_opened() {
    let scratch = Scratch::new();
    create(&scratch, &["-o", "lazy_refcounts=on"]);
    let kill =
        ["-f", "qcow2", "-c", "write -P 5 4M 1M", "-c", "flush", "-c", "sigraise 9", "disk.qcow2"];
    let killed = Command::new(tool("qemu-io")).args(kill).current_dir(scratch.dir()).output();
    assert!(!killed.expect("qemu-io runs").status.success());
    let path = scratch.path("disk.qcow2");
    assert_eq!(fs::read(&path).expect("it is there")[79] & 1, 1, "the image is dirty");
    assert_ne!(check(&scratch, &[]).0, Some(0));
    let blockdev =
        format!("qcow2,node-name=disk,file.driver=file,file.filename={}", path.display());
    let server = ServerCommand::new(&scratch).arg("--blockdev").arg(&blockdev).start();
    assert!(server.log().contains("not closed cleanly"), "{}", server.log());
    server.stop();
    assert_eq!(client(&scratch, "qemu-img", &["check", "disk.qcow2"]).status.code(), Some(0));
    let read = "read -P 5 4M 1M";
    client_output(&scratch, "qemu-io", &["-f", "qcow2", "-c", read, "disk.qcow2"]);
}

/// 4 Mi entries share an L2 table, which takes seconds to repair. Other commands are executed meanwhile, and the daemon ends.
#[test]
fn a_long_repair_delays_nothing_else() {
    let scratch = Scratch::new();
    let made = Costly::SharedTables.make(scratch.dir(), &mut |_| Ok(()));
    let path = made.expect("writable");
    let file = format!("file,node-name=file,filename={}", path.display());
    let mut server = ServerCommand::new(&scratch)
        .args(["--blockdev", &file])
        .monitor("one")
        .monitor("other")
        .start();
    let mut one = Qmp::connect(&server.socket("one"));
    let mut other = Qmp::connect(&server.socket("other"));
    one.send(
        r#"{"execute": "blockdev-add", "arguments": {"driver": "qcow2", "node-name": "disk", "file": "file"}}"#,
    );
    let size = fs::metadata(&path).expect("it is there").len();
    eventually("the beginning of the repair", || {
        let resize = json!({"node-name": "file", "size": size});
        let answer = other.ask("block_resize", resize).to_string();
        answer.contains("is busy: the image in it is being repaired").then_some(())
    });
    assert!(other.refused("blockdev-del", json!({"node-name": "file"})).contains("is busy"));
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success(), "{}", server.log());
    assert_eq!(fs::read(&path).expect("it is there")[79] & 1, 1, "the image is still dirty");
}

/// Options of QEMU that change nothing are accepted, and the log says so.
#[test]
fn options_without_effect_are_named() {
    let scratch = Scratch::new();
    create(&scratch, &[]);
    let path = scratch.path("disk.qcow2");
    let start = |options: &str| {
        let file = format!("file.driver=file,file.filename={}", path.display());
        let blockdev = format!("qcow2,node-name=disk,{file}{options}");
        let server = ServerCommand::new(&scratch).arg("--blockdev").arg(blockdev).start();
        let log = server.log();
        server.stop();
        log
    };
    for (options, told) in [
        (",lazy-refcounts=on", Some("lazy-refcounts=on has no effect")),
        (",l2-cache-entry-size=4096", Some("l2-cache-entry-size has no effect")),
        (",overlap-check=none", Some("overlap-check protects all metadata")),
        (",overlap-check.template=all", Some("does not protect L2 tables")),
        (",overlap-check.template=cached,overlap-check.active-l1=on", None),
        (",overlap-check=cached,cache-clean-interval=60", None),
    ] {
        let log = start(options);
        match told {
            Some(told) => assert!(log.contains(told), "{options}: {log}"),
            None => assert!(!log.contains("overlap-check"), "{options}: {log}"),
        }
    }
}
