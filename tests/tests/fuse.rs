//! Exports over FUSE: a node as a file, for programs that know nothing of ringmill.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fastrand::Rng;
use integration::nbd::client_output;
use integration::{
    Image, Qmp, Scratch, Server, ServerCommand, can_mount, daemon, eventually, start_qsd,
    tied_command, tool,
};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Whence, lseek};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A file to mount on.
fn mountpoint(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.path(name);
    // Not opened if it is there: it may be a dead mount.
    if !is_mounted(&path) {
        fs::write(&path, "").expect("a file");
    }
    path
}

fn export(node: &str, mountpoint: &Path, options: &str) -> String {
    format!("fuse,id=e,node-name={node},mountpoint={}{options}", mountpoint.display())
}

/// A daemon with an image as a file.
fn serve(scratch: &Scratch, image: &Image, options: &str) -> (Server, PathBuf) {
    let file = mountpoint(scratch, "file");
    let command = ServerCommand::new(scratch).monitor("qmp").file("disk", image, "discard=unmap");
    let command = command.arg("--export").arg(export("disk", &file, options));
    (command.start(), file)
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap_or_else(|error| {
        panic!("{}: {error}", path.display());
    })
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    mounts.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("an error").raw_os_error().expect("an errno")
}

fn zero(file: &File, mode: FallocateFlags, offset: u64, len: u64) -> nix::Result<()> {
    fallocate(file, mode, offset.cast_signed(), len.cast_signed())
}

fn seek(file: &File, offset: u64, whence: Whence) -> nix::Result<i64> {
    lseek(file, offset.cast_signed(), whence)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The daemon would wait for itself: as QSD does, for ever.
#[test]
fn a_daemons_own_export_is_not_opened() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, file) = serve(&scratch, &image, ",writable=on");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let own = json!({"driver": "file", "filename": file});
    for node in [
        json!({"driver": "file", "node-name": "n", "filename": file, "read-only": true}),
        json!({"driver": "raw", "node-name": "n", "file": own}),
    ] {
        let why = qmp.refused("blockdev-add", node);
        assert!(why.contains("on the mount of this daemon's own export 'e'"), "{why}");
    }
    // Files beside the mount are not concerned.
    let other = Image::empty(&scratch, "other.img", 1);
    let node = json!({"driver": "file", "node-name": "n", "filename": other.path()});
    qmp.execute("blockdev-add", node);
    server.stop();
}

/// Images name files on the mount, new images are to be made there, and an image is opened again below its mount.
#[test]
fn no_way_leads_to_a_daemons_own_export() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let over = Image::filled(&scratch, "over.img", 1);
    let file = mountpoint(&scratch, "file");
    let names = |name: &str, format: &str, backing: &str| {
        let path = scratch.path(name).display().to_string();
        let create =
            ["create", "-q", "-u", "-f", "qcow2", "-F", format, "-b", backing, &path, "1M"];
        client_output(&scratch, "qemu-img", &create);
        path
    };
    let link = scratch.path("link");
    std::os::unix::fs::symlink(&file, &link).expect("a link");
    let in_json = json!({"driver": "file", "filename": file}).to_string();
    let plain = names("plain.qcow2", "raw", text(&file));
    let relative = names("relative.qcow2", "raw", "file");
    let linked = names("linked.qcow2", "raw", text(&link));
    let as_json = names("json.qcow2", "raw", &format!("json:{in_json}"));
    let above = names("above.qcow2", "qcow2", &plain);
    let data = scratch.path("data.qcow2").display().to_string();
    let option = format!("data_file={}", scratch.path("data.raw").display());
    let create = ["create", "-q", "-f", "qcow2", "-o", &option, &data, "1M"];
    client_output(&scratch, "qemu-img", &create);
    fs::remove_file(scratch.path("data.raw")).expect("the data file");
    std::os::unix::fs::symlink(&file, scratch.path("data.raw")).expect("a link");

    // One export on a file, another on the very image.
    let command = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "");
    let command = command.file("over", &over, "").arg("--export").arg(export("disk", &file, ""));
    let second = format!("fuse,id=over,node-name=over,mountpoint={}", over.path().display());
    let server = command.arg("--export").arg(second).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let is_own =
        |why: &str| assert!(why.contains("the mount of this daemon's own export"), "{why}");

    for image in [plain, relative, linked, data] {
        let file = json!({"driver": "file", "filename": image});
        let node = json!({"driver": "qcow2", "node-name": "n", "file": file, "read-only": true});
        is_own(&qmp.refused("blockdev-add", node));
    }
    // Names in JSON are not followed at all.
    let file = json!({"driver": "file", "filename": as_json});
    let why =
        qmp.refused("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": file}));
    assert!(why.contains("is not a file"), "{why}");
    let file_above = json!({"driver": "file", "filename": above});
    let node = json!({"driver": "qcow2", "node-name": "n", "file": file_above});
    is_own(&qmp.refused("blockdev-add", node));

    let sync = |mode: &str| json!({"node-name": "disk", "snapshot-file": link, "snapshot-node-name": "top", "mode": mode});
    for mode in ["existing", "absolute-paths"] {
        is_own(&qmp.refused("blockdev-snapshot-sync", sync(mode)));
    }
    let new = json!({"driver": "file", "filename": link, "size": 512});
    qmp.execute("blockdev-create", json!({"job-id": "make", "options": new}));
    let ended = eventually("the job's end", || {
        let jobs = qmp.execute("query-jobs", json!({}));
        (jobs[0]["status"] == "concluded").then(|| jobs[0].clone())
    });
    is_own(ended["error"].as_str().unwrap_or_default());

    // The mount hides the image's own path.
    let again =
        json!({"driver": "file", "node-name": "over", "filename": over.path(), "read-only": true});
    is_own(&qmp.refused("blockdev-reopen", json!({"options": [again]})));
    qmp.execute("block-export-del", json!({"id": "over"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    qmp.execute("blockdev-reopen", json!({"options": [again]}));
    server.stop();
}

/// The mount of a killed daemon goes with the test's folder.
#[test]
fn a_scratch_folder_is_removed_with_what_is_mounted_in_it() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, file) = serve(&scratch, &image, "");
    server.kill();
    assert!(is_mounted(&file), "a dead mount");
    let folder = scratch.dir().to_owned();
    drop(scratch);
    assert!(!is_mounted(&file));
    assert!(!folder.exists());
}

#[test]
fn a_file_has_what_the_image_has_and_takes_writes_of_any_size() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let copy = scratch.path("copy");
    fs::copy(image.path(), &copy).expect("a copy");
    let (server, path) = serve(&scratch, &image, ",writable=on");
    let same = ["compare", "-Uf", "raw", "-F", "raw", text(&path), text(&copy)];
    client_output(&scratch, "qemu-img", &same);
    let metadata = fs::metadata(&path).expect("a file");
    assert_eq!((metadata.len(), metadata.mode()), (8 * MIB, libc::S_IFREG | 0o600));
    let (file, expected) = (open(&path), open(&copy));
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
    let direct = direct.expect("O_DIRECT");
    // Larger than a request, odd, across sectors and pages.
    let mut random = Rng::with_seed(7);
    for (offset, len) in [(0, 3 * MIB + 17), (5, 1), (511, 2), (4095, 4098), (8 * MIB - 9, 9)] {
        let data: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
        file.write_all_at(&data, offset).expect("a write");
        expected.write_all_at(&data, offset).expect("a write");
        for file in [&file, &direct] {
            let mut back = vec![0; data.len()];
            file.read_exact_at(&mut back, offset).expect("a read");
            assert!(back == data, "at {offset}");
        }
    }
    file.sync_all().expect("fsync");
    // The end of the file.
    assert_eq!(file.read_at(&mut [0; 100], 8 * MIB - 10).expect("a read"), 10);
    assert_eq!(file.read_at(&mut [0; 100], 9 * MIB).expect("a read"), 0);
    assert_eq!(errno(file.write_at(&[1], 8 * MIB)), libc::ENOSPC);
    assert_eq!(file.write_at(&[1; 10], 8 * MIB - 4).expect("a write"), 4);
    expected.write_at(&[1; 4], 8 * MIB - 4).expect("a write");
    client_output(&scratch, "qemu-img", &same);
    drop((file, direct));
    server.stop();
    assert!(!is_mounted(&path));
    assert!(fs::read(&path).expect("the file below") == b"", "as it was before");
    let same = ["compare", "-f", "raw", "-F", "raw", text(image.path()), text(&copy)];
    client_output(&scratch, "qemu-img", &same);
}

#[test]
fn ranges_are_zeroed_freed_and_found() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let (server, path) = serve(&scratch, &image, ",writable=on");
    let file = open(&path);
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    zero(&file, punch, MIB, MIB).expect("punched");
    zero(&file, FallocateFlags::FALLOC_FL_ZERO_RANGE, 4 * MIB + 1, 1000).expect("zeroed");
    // To the end, and no further.
    zero(&file, punch, 7 * MIB, 100 * MIB).expect("punched");
    for (offset, len) in [(MIB, MIB), (4 * MIB + 1, 1000), (7 * MIB, MIB)] {
        let mut data = vec![1; usize::try_from(len).expect("a length")];
        file.read_exact_at(&mut data, offset).expect("a read");
        assert!(data.iter().all(|byte| *byte == 0), "at {offset}");
    }
    assert_eq!(fs::metadata(&path).expect("a file").len(), 8 * MIB);
    assert_eq!(seek(&file, 0, Whence::SeekHole), Ok(MIB.cast_signed()));
    assert_eq!(seek(&file, MIB, Whence::SeekData), Ok((2 * MIB).cast_signed()));
    assert_eq!(seek(&file, 2 * MIB, Whence::SeekData), Ok((2 * MIB).cast_signed()));
    assert_eq!(seek(&file, 7 * MIB, Whence::SeekData), Err(nix::Error::ENXIO));
    assert_eq!(seek(&file, 7 * MIB, Whence::SeekHole), Ok((7 * MIB).cast_signed()));
    assert_eq!(seek(&file, 9 * MIB, Whence::SeekHole), Err(nix::Error::ENXIO));
    assert!(image.allocated() < 7 * MIB, "{} bytes are left", image.allocated());
    let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    assert_eq!(zero(&file, keep, 0, 512), Err(nix::Error::EOPNOTSUPP));
    drop(file);
    server.stop();
}

#[test]
fn a_growable_file_grows_and_shrinks() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, path) = serve(&scratch, &image, ",writable=on,growable=on");
    let file = open(&path);
    let size = || fs::metadata(&path).expect("a file").len();
    file.write_all_at(&[7; 1000], 2 * MIB).expect("a write past the end");
    // Whole sectors.
    assert_eq!(size(), 2 * MIB + 1024);
    let mut data = [1; 1024];
    file.read_exact_at(&mut data, 2 * MIB).expect("a read");
    assert_eq!((data[..1000].to_vec(), data[1000..].to_vec()), (vec![7; 1000], vec![0; 24]));
    file.read_exact_at(&mut data, MIB).expect("a read");
    assert_eq!(data, [0; 1024]);
    zero(&file, FallocateFlags::empty(), size(), MIB).expect("more room");
    assert_eq!(size(), 3 * MIB + 1024);
    file.set_len(512).expect("a smaller size");
    assert_eq!((size(), fs::metadata(image.path()).expect("the image").len()), (512, 512));
    file.set_len(4 * MIB).expect("a larger size");
    file.read_exact_at(&mut data, 2 * MIB).expect("a read");
    assert_eq!(data, [0; 1024], "what was cut off is gone");
    // Several at once: none undoes what another has done.
    std::thread::scope(|scope| {
        for n in 0..8 {
            let file = &file;
            scope.spawn(move || {
                for i in (0..16).rev() {
                    let offset = 4 * MIB + (i * 8 + n) * 4096;
                    file.write_all_at(&[n as u8 + 1; 4096], offset).expect("a write");
                }
            });
        }
    });
    assert_eq!(size(), 4 * MIB + 128 * 4096);
    for block in 0..128 {
        let mut data = [0; 4096];
        file.read_exact_at(&mut data, 4 * MIB + block * 4096).expect("a read");
        assert_eq!(data, [(block % 8) as u8 + 1; 4096], "block {block}");
    }
    drop(file);
    server.stop();
}

/// The file of a monitor's export of a new node called `name`.
fn export_by(
    qmp: &mut Qmp,
    scratch: &Scratch,
    name: &str,
    mut node: Value,
    growable: bool,
) -> PathBuf {
    let file = mountpoint(scratch, name);
    node["node-name"] = name.into();
    qmp.execute("blockdev-add", node);
    let export = json!({"type": "fuse", "id": name, "node-name": name, "mountpoint": file,
        "writable": true, "growable": growable});
    qmp.execute("block-export-add", export);
    file
}

/// `cp`, `dd` and shells open the file with `O_TRUNC`. A disk that is not growable keeps its size then, and the rest of
/// its data. A growable one is cut to size 0, as by QSD 11.1. QSD 10.0 keeps the size of both.
#[test]
fn programs_change_a_disk_as_they_change_that_of_qsd() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    fs::write(scratch.path("small"), [7; 5000]).expect("a file");
    let source = Image::filled(&scratch, "source", 1);
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let (mut qsd, mut theirs) = start_qsd(&scratch.path("qsd"));
    let mut ours = Qmp::connect(&server.socket("qmp"));
    // With the sizes afterwards, of a disk that is not growable and of one that is.
    let commands = [
        ("cp small FILE", MIB, 5120),
        ("cp --sparse=always small FILE", MIB, 5120),
        ("head -c 3000 small >FILE", MIB, 3072),
        (": >FILE", MIB, 0),
        ("dd if=small of=FILE bs=512 count=3", MIB, 1536),
        ("truncate -s 1M FILE", MIB, MIB),
        ("dd if=small of=FILE bs=512 seek=9 conv=notrunc", MIB, MIB),
        ("truncate -s 4096 FILE", 4096, 4096),
        ("truncate -s 2M FILE", 2 * MIB, 2 * MIB),
        ("truncate -s 5000 FILE", 5120, 5120),
        ("dd if=/dev/zero of=FILE bs=1M seek=1 count=0", MIB, MIB),
    ];
    for growable in [false, true] {
        let images = ["ours", "theirs"].map(|whose| scratch.path(&format!("{whose}-{growable}")));
        for image in &images {
            fs::copy(source.path(), image).expect("a copy");
        }
        let name = format!("disk-{growable}");
        let node = |image: &Path| json!({"driver": "file", "filename": image});
        let files = [
            export_by(&mut ours, &scratch, &name, node(&images[0]), growable),
            export_by(&mut theirs, &scratch, &format!("{name}-qsd"), node(&images[1]), growable),
        ];
        for (command, fixed, grown) in commands {
            let sizes = files.each_ref().map(|file| {
                let arguments = ["-c".to_owned(), command.replace("FILE", text(file))];
                client_output(&scratch, "sh", &arguments.each_ref().map(String::as_str));
                fs::metadata(file).expect("a file").len()
            });
            let expected = if growable { grown } else { fixed };
            assert_eq!(sizes[0], expected, "{command}, growable: {growable}");
            if !growable {
                assert_eq!(sizes[1], expected, "{command}, QSD");
                let [ours, theirs] = files.each_ref().map(|file| fs::read(file).expect("a disk"));
                assert!(ours == theirs, "{command}");
            }
        }
    }
    theirs.execute("quit", json!({}));
    qsd.wait().expect("QSD ends");
    drop(ours);
    server.stop();
}

/// `du`, `cp` and `tar -S` go by `st_blocks`, which is that of the image.
#[test]
fn a_sparse_disk_is_a_sparse_file_as_with_qsd() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let (mut qsd, mut theirs) = start_qsd(&scratch.path("qsd"));
    let mut ours = Qmp::connect(&server.socket("qmp"));
    for (whose, qmp) in [("ours", &mut ours), ("theirs", &mut theirs)] {
        for format in ["raw", "qcow2"] {
            let name = format!("{whose}-{format}");
            let image = scratch.path(&format!("{name}.img"));
            let create = ["create", "-q", "-f", format, text(&image), "16M"];
            client_output(&scratch, "qemu-img", &create);
            let below = json!({"driver": "file", "filename": image, "discard": "unmap"});
            let node = json!({"driver": format, "file": below, "discard": "unmap"});
            let path = export_by(qmp, &scratch, &name, node, false);
            let file = open(&path);
            let blocks = |path: &Path| fs::metadata(path).expect("a file").blocks();
            let check = |what: &str| assert_eq!(blocks(&path), blocks(&image), "{name}, {what}");
            check("empty");
            file.write_all_at(&vec![7; 2 << 20], 4 * MIB).expect("a write");
            file.sync_all().expect("fsync");
            check("written");
            assert!((4096..8192).contains(&blocks(&path)), "{name}: {}", blocks(&path));
            let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            zero(&file, punch, 4 * MIB, MIB).expect("punched");
            file.sync_all().expect("fsync");
            check("punched");
            // Another answer that has the number of blocks.
            fs::set_permissions(&path, PermissionsExt::from_mode(0o400)).expect("chmod");
            check("chmod");
            let copy = scratch.path(&format!("{name}.copy"));
            client_output(&scratch, "cp", &[text(&path), text(&copy)]);
            assert!(blocks(&copy) < 4096, "{name}: {}", blocks(&copy));
        }
        // No file tells.
        let null = json!({"driver": "null-co", "size": 16 * MIB, "read-zeroes": true});
        let path = export_by(qmp, &scratch, &format!("{whose}-null"), null, false);
        assert_eq!(fs::metadata(&path).expect("a file").blocks(), 16 * MIB / 512);
    }
    theirs.execute("quit", json!({}));
    qsd.wait().expect("QSD ends");
    drop(ours);
    assert!(!server.log().contains("refused system call"), "{}", server.log());
    server.stop();
}

#[test]
fn a_read_only_export_takes_no_writes() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, path) = serve(&scratch, &image, "");
    assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o400);
    assert_eq!(errno(OpenOptions::new().write(true).open(&path)), libc::EROFS);
    assert_eq!(errno(fs::set_permissions(&path, PermissionsExt::from_mode(0o600))), libc::EROFS);
    assert_eq!(fs::read(&path).expect("the disk"), fs::read(image.path()).expect("the image"));
    server.stop();
}

#[test]
fn owner_and_mode_are_kept_until_the_end() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, path) = serve(&scratch, &image, ",writable=on,allow-other=off");
    let mode = |mode| fs::set_permissions(&path, PermissionsExt::from_mode(mode));
    let is = || fs::metadata(&path).expect("a file").mode() & 0o777;
    // Before the first look, the kernel takes root for the owner.
    assert_eq!(is(), 0o600);
    mode(0o400).expect("chmod");
    assert_eq!(is(), 0o400);
    // Nobody else reaches the file.
    assert_eq!(errno(mode(0o440)), libc::EPERM);
    assert_eq!(errno(fs::remove_file(&path)), libc::EBUSY);
    server.stop();
}

#[test]
fn monitors_add_and_delete_exports() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = mountpoint(&scratch, "file");
    let server = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let add = |path: &Path, id: &str| json!({"type": "fuse", "id": id, "node-name": "disk", "mountpoint": path, "writable": true});
    let refused = qmp.refused("block-export-add", add(scratch.dir(), "e"));
    assert!(refused.ends_with("is not a regular file"), "{refused}");
    let refused = qmp.refused("block-export-add", add(&scratch.path("none"), "e"));
    assert!(refused.ends_with("none': No such file or directory"), "{refused}");
    qmp.execute("block-export-add", add(&path, "e"));
    let exports = qmp.execute("query-block-exports", json!({}));
    let expected =
        json!([{"id": "e", "type": "fuse", "node-name": "disk", "shutting-down": false}]);
    assert_eq!(exports, expected);
    let refused = qmp.refused("block-export-add", add(&path, "f"));
    assert!(refused.starts_with("There already is a FUSE export on"), "{refused}");
    // `block_resize` shows.
    qmp.execute("block_resize", json!({"node-name": "disk", "size": 2 * MIB}));
    eventually("the new size", || {
        (fs::metadata(&path).expect("a file").len() == 2 * MIB).then_some(())
    });
    let file = open(&path);
    let refused = qmp.refused("block-export-del", json!({"id": "e"}));
    assert_eq!(refused, "export 'e' still in use");
    file.write_all_at(b"last", 100).expect("a write");
    qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    assert!(!is_mounted(&path));
    assert_eq!(errno(file.read_at(&mut [0], 0)), libc::ENOTCONN);
    assert_eq!(image.read(100, 4), b"last");
    drop(file);
    // In its place, and with a file that was closed just before.
    qmp.execute("block-export-add", add(&path, "e"));
    drop(open(&path));
    qmp.execute("block-export-del", json!({"id": "e"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    server.stop();
}

#[test]
fn the_next_start_removes_a_killed_daemons_mount() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, path) = serve(&scratch, &image, ",writable=on");
    let file = open(&path);
    file.write_all_at(b"written", 0).expect("a write");
    server.kill();
    eventually("the end of the connection", || {
        (errno(file.read_at(&mut [0], 0)) == libc::ENOTCONN).then_some(())
    });
    assert!(is_mounted(&path));
    assert_eq!(errno(fs::metadata(&path)), libc::ENOTCONN);
    let (server, path) = serve(&scratch, &image, ",writable=on");
    let mut data = [0; 7];
    open(&path).read_exact_at(&mut data, 0).expect("a read");
    assert_eq!(&data, b"written");
    drop(file);
    server.stop();
    assert!(!is_mounted(&path));
}

#[test]
fn a_second_daemon_does_not_mount_over_the_first() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (server, path) = serve(&scratch, &image, "");
    let other = Scratch::new();
    let second = Image::filled(&other, "other.img", 1);
    let command = ServerCommand::new(&other).file("disk", &second, "");
    let (status, log) = command.arg("--export").arg(export("disk", &path, "")).run();
    assert!(!status.success() && log.contains("is mounted on already"), "{log}");
    assert_eq!(fs::metadata(&path).expect("the first").len(), MIB);
    server.stop();
}

#[test]
fn a_qcow2_image_is_a_raw_file_to_others() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let source = Image::filled(&scratch, "source.img", 16);
    let qcow2 = scratch.path("disk.qcow2");
    let convert = ["convert", "-O", "qcow2", text(source.path()), text(&qcow2)];
    client_output(&scratch, "qemu-img", &convert);
    let path = mountpoint(&scratch, "file");
    let node = format!("qcow2,node-name=disk,file.driver=file,file.filename={}", text(&qcow2));
    let command = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
    let command = command.arg("--blockdev").arg(node).arg("--export");
    let options = ",writable=on,iothread.0=io0,iothread.1=io1";
    let server = command.arg(export("disk", &path, options)).start();
    let same = ["compare", "-Uf", "raw", "-F", "raw", text(&path), text(source.path())];
    client_output(&scratch, "qemu-img", &same);
    // Both threads, many requests, each read checked.
    let fio = [
        "--name=verify",
        &format!("--filename={}", text(&path)),
        "--ioengine=libaio",
        "--direct=1",
        "--rw=randwrite",
        "--bsrange=512-256k",
        "--blockalign=512",
        "--iodepth=32",
        "--size=16M",
        "--verify=crc32c",
        "--end_fsync=1",
    ];
    client_output(&scratch, "fio", &fio);
    server.stop();
    client_output(&scratch, "qemu-img", &["check", text(&qcow2)]);
}

#[test]
fn an_upgrade_keeps_files_open() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 16);
    let path = mountpoint(&scratch, "file");
    let command = ServerCommand::new(&scratch).monitor("qmp").iothread("io0").iothread("io1");
    let command = command.file("disk", &image, "");
    let options = ",writable=on,growable=on,iothread.0=io0,iothread.1=io1";
    let mut server = command.arg("--export").arg(export("disk", &path, options)).start();
    let file = open(&path);
    fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).expect("chmod");
    let mut load = tied_command(&tool("fio"))
        .args(["--name=load", "--ioengine=libaio", "--direct=1", "--rw=randrw", "--bs=4k"])
        .args(["--iodepth=16", "--size=16M", "--verify=crc32c", "--time_based", "--runtime=4"])
        .arg(format!("--filename={}", text(&path)))
        .current_dir(scratch.dir())
        .stdout(Stdio::null())
        .spawn()
        .expect("fio");
    for round in 0..3_u8 {
        server.upgrade();
        file.write_all_at(&[round; 100], 16 * MIB + u64::from(round) * 512).expect("a write");
    }
    assert!(load.wait().expect("fio").success());
    assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o700);
    let mut data = [0; 100];
    file.read_exact_at(&mut data, 16 * MIB + 1024).expect("a read");
    assert_eq!(data, [2; 100]);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    assert_eq!(
        qmp.refused("block-export-del", json!({"id": "e"})),
        "export 'e' still in use",
        "the new process knows of it"
    );
    drop((file, qmp));
    server.stop();
    assert!(!is_mounted(&path));
}

#[test]
fn the_sandbox_says_where_monitors_may_mount() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (inside, outside) = (scratch.path("inside"), mountpoint(&scratch, "outside"));
    fs::create_dir(&inside).expect("a folder");
    let path = inside.join("file");
    fs::write(&path, "").expect("a file");
    let sandbox = format!("on,paths={}", inside.display());
    let command = ServerCommand::new(&scratch).args(["--sandbox", &sandbox]).monitor("qmp");
    let server = command.file("disk", &image, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let add =
        |path: &Path| json!({"type": "fuse", "id": "e", "node-name": "disk", "mountpoint": path});
    let refused = qmp.refused("block-export-add", add(&outside));
    assert!(refused.contains("nor beneath --sandbox paths"), "{refused}");
    // Nor by another name.
    let link = inside.join("link");
    std::os::unix::fs::symlink(&outside, &link).expect("a link");
    let refused = qmp.refused("block-export-add", add(&link));
    assert!(refused.contains("nor beneath --sandbox paths"), "{refused}");
    qmp.execute("block-export-add", add(&path));
    assert_eq!(fs::metadata(&path).expect("a file").len(), MIB);
    server.stop();
    assert!(!is_mounted(&path));
}

#[test]
fn mount_is_the_short_way() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let path = mountpoint(&scratch, "file");
    let mut mounted = tied_command(daemon())
        .args(["mount", text(&image), text(&path), "--size", "4M"])
        .current_dir(scratch.dir())
        .spawn()
        .expect("ringmill");
    eventually("the mount", || is_mounted(&path).then_some(()));
    let file = open(&path);
    assert_eq!(file.metadata().expect("a file").len(), 4 * MIB);
    file.write_all_at(b"hello", MIB).expect("a write");
    drop(file);
    kill(Pid::from_raw(mounted.id().cast_signed()), Signal::SIGTERM).expect("a signal");
    assert!(mounted.wait().expect("ringmill").success());
    assert!(!is_mounted(&path));
    let raw = scratch.path("raw");
    let convert = ["convert", "-O", "raw", text(&image), text(&raw)];
    client_output(&scratch, "qemu-img", &convert);
    let mut data = [0; 5];
    open(&raw).read_exact_at(&mut data, MIB).expect("a read");
    assert_eq!(&data, b"hello");
}
