//! The default sandbox: the state of a daemon's threads, and what is denied. `crates/sandbox/tests` tests the calls of
//! each kind of thread.

use crate::kernel;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use integration::nbd::{nbd_export, nbd_server, nbd_uri};
use integration::{
    BlkClient, Image, MEMORY_AT, Qmp, Request, Scratch, Segment, Server, ServerCommand, eventually,
    pattern, request, tool,
};
use serde_json::json;
use test_requirements::{Needs, untested};

use kernel::landlock_of_the_kernel;

/// A capability that a daemon with a monitor keeps.
const IPC_LOCK: u64 = 1 << 14;
/// A capability that root's daemon keeps.
const DAC_OVERRIDE: u64 = 1 << 1;
/// The capabilities of root's daemon, with `CAP_NET_BIND_SERVICE`.
const KEPT: u64 = DAC_OVERRIDE | 1 << 10 | IPC_LOCK;

/// A thread according to /proc.
struct Thread {
    name: String,
    status: String,
}

impl Thread {
    fn field(&self, name: &str) -> &str {
        let value = self.status.lines().find_map(|line| line.strip_prefix(name));
        value.unwrap_or_else(|| panic!("no {name} of {}", self.name)).trim()
    }

    fn capabilities(&self) -> u64 {
        let sets = ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"];
        sets.iter()
            .map(|set| u64::from_str_radix(self.field(set), 16).expect("a set"))
            .fold(0, |a, b| a | b)
    }
}

fn threads(server: &Server) -> Vec<Thread> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    server
        .tasks()
        .map(|task| Thread {
            name: read(task.join("comm")).trim().to_owned(),
            status: read(task.join("status")),
        })
        // A thread that has ended meanwhile has no status.
        .filter(|thread| !thread.status.is_empty())
        .collect()
}

/// Waits for the log line that reports the sandbox, which comes after the sockets.
fn in_force(server: &Server) -> String {
    eventually("a line that says what is in force", || {
        let log = server.log();
        log.lines().find(|line| line.contains("sandbox:")).map(str::to_owned)
    })
}

/// Asserts that all threads are confined, and that threads with these names exist. Waits, as a pool's thread confines
/// itself first, under its creator's name.
fn are_confined(server: &Server, names: &[&str], kept: u64) {
    let expected: BTreeSet<&str> = names.iter().copied().collect();
    let is_confined = |thread: &Thread| {
        let may_have = match thread.name.as_str() {
            "ringmill" => kept,
            // Sockets may belong to other users.
            "nbd-connect" => kept & DAC_OVERRIDE,
            _ => 0,
        };
        thread.field("Seccomp:") == "2"
            && thread.field("NoNewPrivs:") == "1"
            && thread.capabilities() & !may_have == 0
    };
    let what = format!("{names:?}, confined");
    eventually(&what, || {
        let threads = threads(server);
        let found: BTreeSet<&str> = threads.iter().map(|thread| thread.name.as_str()).collect();
        (found == expected && threads.iter().all(is_confined)).then_some(())
    });
}

#[test]
fn each_thread_is_confined() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let command =
        ServerCommand::new(&scratch).arg("--object").arg("iothread,id=io0,thread-pool-min=2");
    let command = command.file("disk", &image, "aio=threads").export("disk", "iothread=io0");
    let command = nbd_export(nbd_server(command, &scratch, ""), "disk", "");
    let server = command.monitor("qmp").start();
    let line = in_force(&server);
    for part in ["no_new_privs", "capabilities", "seccomp (control ", "ring restrictions"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.read(8, pattern::BLOCK);
    let names = ["ringmill", "io", "io0", "io0-pool"];
    are_confined(&server, &names, KEPT);
    // And threads started later.
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "late", "thread-pool-min": 1}));
    let unix = json!({"type": "unix", "path": scratch.path("nbd.sock")});
    let nbd = json!({"driver": "nbd", "node-name": "n", "server": unix, "export": "disk", "read-only": true});
    qmp.execute("blockdev-add", nbd);
    let names = ["ringmill", "io", "io0", "io0-pool", "late", "late-pool", "nbd-connect"];
    are_confined(&server, &names, KEPT);
    qmp.execute("blockdev-del", json!({"node-name": "n"}));
    drop((client, qmp));
    server.stop();
}

/// QMP reports the same as the log line.
#[test]
fn qmp_reports_the_sandbox() {
    let scratch = Scratch::new();
    let folder = scratch.path("images");
    fs::create_dir(&folder).expect("a folder");
    let paths = format!("on,paths={}", folder.display());
    for option in ["on", paths.as_str(), "log", "off"] {
        let command = ServerCommand::new(&scratch).arg("--sandbox").arg(option).iothread("io0");
        let server = command.monitor("qmp").start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let told = qmp.execute("x-query-sandbox", json!({}));
        drop(qmp);
        let line = in_force(&server);
        server.stop();
        let mode = option.split(',').next().expect("a mode");
        assert_eq!(told["mode"], mode, "{told}");
        let is_on = mode != "off";
        assert_eq!(told["no-new-privs"], is_on, "{told}");
        assert_eq!(told["ring-restrictions"] == true, line.contains(", ring restrictions"));
        assert_eq!(told["not-in-force"] == json!([]), is_on && !line.contains("not in force"));
        let calls = told.get("seccomp").map(|calls| {
            let number = |kind: &str| calls[kind].as_u64().expect("a number");
            let [control, io, pool] = ["control", "io", "pool"].map(number);
            format!("seccomp (control {control} calls, I/O {io}, pools {pool}")
        });
        assert_eq!(calls.is_some(), line.contains("seccomp (control"), "{told}");
        assert!(line.contains(&calls.unwrap_or_default()), "{told}: {line}");
        let landlock = told.get("landlock");
        let expected = mode == "on" && landlock_of_the_kernel() > 0;
        assert_eq!(landlock.is_some(), expected, "{told}");
        assert_eq!(line.contains("Landlock ABI"), expected, "{line}");
        if let Some(landlock) = landlock {
            assert!(line.contains(&format!("Landlock ABI {} ", landlock["abi"])), "{told}");
            let folder = json!(folder);
            let paths = landlock["paths"].as_array();
            assert_eq!(paths.is_some_and(|paths| paths.contains(&folder)), option != "on");
        }
        for name in told["capabilities"].as_array().into_iter().flatten() {
            assert!(line.contains(name.as_str().expect("a name")), "{told}: {line}");
        }
    }
}

#[test]
fn without_a_sandbox_nothing_is_confined() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).arg("--sandbox").arg("off").iothread("io0").start();
    assert!(server.log().contains("sandbox: off"), "{}", server.log());
    for thread in threads(&server) {
        assert_eq!((thread.field("Seccomp:"), thread.field("NoNewPrivs:")), ("0", "0"));
    }
    server.stop();
}

/// Whether Landlock is in force. If the kernel has it, it must be; otherwise the log says that it is not.
fn has_landlock(server: &Server) -> bool {
    let log = in_force(server);
    let has = landlock_of_the_kernel() > 0;
    let expected = if has { "Landlock ABI" } else { "not in force: Landlock" };
    assert!(log.contains(expected), "{log}");
    has
}

#[test]
fn a_monitor_s_paths_are_narrowed_by_option() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (inside, outside) = (scratch.path("inside"), scratch.path("outside"));
    for folder in [&inside, &outside] {
        fs::create_dir(folder).expect("a folder");
        fs::write(folder.join("a.img"), [0; 4096]).expect("an image");
    }
    fs::write(inside.join("link.img"), "").expect("a file");
    fs::remove_file(inside.join("link.img")).expect("it goes");
    std::os::unix::fs::symlink(outside.join("a.img"), inside.join("link.img")).expect("a link");
    let node = |name: &str, path: &std::path::Path| json!({"driver": "file", "node-name": name, "filename": path});
    let paths = |mode| format!("{mode},paths={}", inside.display());
    for (option, narrows) in [("on".to_owned(), false), (paths("on"), true), (paths("log"), false)]
    {
        let command = ServerCommand::new(&scratch).file("disk", &image, "").monitor("qmp");
        let server = command.arg("--sandbox").arg(option).start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        qmp.execute("blockdev-add", node("in", &inside.join("a.img")));
        let socket = json!({"type": "unix", "path": inside.join("e.sock")});
        qmp.execute(
            "nbd-server-start",
            json!({"addr": {"type": "unix", "data": {"path": inside.join("n.sock")}}}),
        );
        let export =
            json!({"type": "vhost-user-blk", "id": "e", "node-name": "in", "addr": socket});
        qmp.execute("block-export-add", export);
        // Files of the command line can be opened again.
        let options = node("disk", image.path());
        qmp.execute("blockdev-reopen", json!({"options": [options]}));
        if !narrows || !has_landlock(&server) {
            qmp.execute("blockdev-add", node("out", &outside.join("a.img")));
        } else {
            for path in [outside.join("a.img"), inside.join("link.img")] {
                let why = qmp.refused("blockdev-add", node("out", &path));
                assert!(why.contains("Permission denied") && why.contains("--sandbox"), "{why}");
            }
            let socket = json!({"type": "unix", "path": outside.join("e.sock")});
            let export =
                json!({"type": "vhost-user-blk", "id": "o", "node-name": "in", "addr": socket});
            let why = qmp.refused("block-export-add", export);
            assert!(why.contains("Permission denied") && why.contains("--sandbox"), "{why}");
        }
        drop(qmp);
        server.stop();
        // The NBD server's socket stays, as with qemu-storage-daemon.
        assert!(!inside.join("e.sock").exists());
    }
}

/// An inactive node reads its rules again when activated.
#[test]
fn rules_of_blkdebug_stay_within_reach() {
    let scratch = Scratch::new();
    let (inside, rules) = (scratch.path("inside"), scratch.path("rules.conf"));
    fs::create_dir(&inside).expect("a folder");
    fs::write(&rules, "[inject-error]\nevent = \"read_aio\"\n").expect("rules");
    let node =
        format!("blkdebug,node-name=n,active=off,config={},image.driver=null-co", rules.display());
    let command = ServerCommand::new(&scratch).args(["--blockdev", &node]).monitor("qmp");
    let server = command.args(["--sandbox", &format!("on,paths={}", inside.display())]).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    if has_landlock(&server) {
        let file = json!({"driver": "file", "node-name": "f", "filename": rules});
        let file = json!({"driver": "raw", "node-name": "r", "file": file});
        // The path itself is permitted; files next to it are not.
        qmp.execute("blockdev-add", file);
        let beside = scratch.path("beside.img");
        fs::write(&beside, [0; 4096]).expect("an image");
        let file = json!({"driver": "file", "node-name": "o", "filename": beside});
        let why = qmp.refused("blockdev-add", file);
        assert!(why.contains("Permission denied"), "{why}");
    }
    qmp.execute("blockdev-set-active", json!({"node-name": "n", "active": true}));
    drop(qmp);
    server.stop();
}

/// Root's daemon opens files, listens, and then changes its user.
#[test]
fn a_daemon_becomes_a_user_once_it_has_opened_everything() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let command = || {
        let command = ServerCommand::new(&scratch).arg("--user").arg("65533:65532");
        let at = |name: &str| format!("addr.type=unix,addr.path={}", scratch.path(name).display());
        command
            .file("disk", &image, "")
            .export("disk", "")
            .monitor("qmp")
            .args(["--blockdev", "null-co,node-name=null"])
            .args(["--export", &format!("vfio-user-nvme,id=v,node-name=null,{}", at("nvme.sock"))])
            .args(["--nbd-server", &at("nbd.sock"), "--metrics", &at("metrics.sock")])
    };
    if !nix::unistd::geteuid().is_root() {
        // Only root can.
        let (status, log) = command().run();
        assert!(!status.success() && log.contains("only root can change the user"), "{log}");
        return;
    }
    let server = command().start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
    for thread in threads(&server) {
        assert_eq!(thread.field("Uid:"), "65533\t65533\t65533\t65533", "{}", thread.name);
        assert_eq!(thread.field("Gid:"), "65532\t65532\t65532\t65532", "{}", thread.name);
        assert_eq!(thread.field("Groups:"), "65532", "{}", thread.name);
        // A command may request pinned memory.
        let kept = if thread.name == "ringmill" { IPC_LOCK } else { 0 };
        assert_eq!(thread.capabilities() & !kept, 0, "{}", thread.name);
    }
    // Processes of that user may connect.
    for name in ["disk", "qmp", "nvme", "nbd", "metrics"] {
        let made = fs::metadata(server.socket(name)).expect("a socket");
        assert_eq!((made.uid(), made.gid()), (65533, 65532), "{name}");
        assert_ne!(made.mode() & 0o200, 0, "{name}");
    }
    // The daemon may only open what its user may.
    let secret = scratch.path("secret.img");
    fs::write(&secret, [0; 4096]).expect("an image");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(&secret, mode).expect("it is ours");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let node = json!({"driver": "file", "node-name": "s", "filename": secret});
    assert!(qmp.refused("blockdev-add", node).contains("Permission denied"));
    // No other process keeps the dropped privileges.
    assert_eq!(server.spawner(), None);
    let why = qmp.refused("x-upgrade", json!({}));
    assert!(why.contains("with --user"), "{why}");
    drop((client, qmp));
    // The daemon cannot write to the sockets' folder.
    server.kill();
}

/// Journals of qcow2 images belong to that user, for images of the command line and of commands. After a kill, the next
/// daemon gets the images by commands. A daemon that ends leaves no journal.
#[test]
fn a_daemon_that_becomes_a_user_has_journals() {
    const USER: u32 = 65531;
    if !nix::unistd::geteuid().is_root() {
        return untested(Needs::Root, "only root can change the user");
    }
    let scratch = Scratch::new();
    let give = |path: &Path| std::os::unix::fs::chown(path, Some(USER), None).expect("we are root");
    give(scratch.dir());
    let runtime = scratch.path("run");
    fs::create_dir(&runtime).expect("a folder");
    let in_memory = PathBuf::from(format!("/dev/shm/ringmill-{USER}"));
    let names = ["early", "late"];
    let path = |name: &str| scratch.path(&format!("{name}.qcow2"));
    for (runtime, folder) in
        [(runtime.as_path(), runtime.join("journals")), ("".as_ref(), in_memory)]
    {
        for path in names.map(path) {
            let mut create = Command::new(tool("qemu-img"));
            create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("1M");
            assert!(create.status().expect("qemu-img runs").success());
            give(&path);
        }
        let command = || {
            let command = ServerCommand::new(&scratch).monitor("qmp");
            let command = command.env("RUNTIME_DIRECTORY", runtime.to_str().expect("UTF-8"));
            let paths = scratch.dir().display();
            command.args([
                "--user",
                &format!("{USER}:{USER}"),
                "--sandbox",
                &format!("on,paths={paths}"),
            ])
        };
        let owners = || -> Vec<u32> {
            let entries = fs::read_dir(&folder).expect("a folder");
            entries
                .map(|entry| entry.expect("a file").metadata().expect("it is there").uid())
                .collect()
        };
        let add = |server: &Server, name: &str| {
            let mut qmp = Qmp::connect(&server.socket("qmp"));
            let file = json!({"driver": "file", "filename": path(name)});
            qmp.execute(
                "blockdev-add",
                json!({"driver": "qcow2", "node-name": name, "file": file}),
            );
            let addr = json!({"type": "unix", "path": server.socket(name)});
            let mut export = json!({"type": "vhost-user-blk", "id": name, "node-name": name});
            (export["addr"], export["writable"]) = (addr, json!(true));
            qmp.execute("block-export-add", export);
        };
        let connect = |server: &Server, name: &str| {
            BlkClient::connect(&server.socket(name), 1, 16).expect("a device")
        };

        let early = format!(
            "qcow2,node-name=early,file.driver=file,file.filename={}",
            path("early").display()
        );
        let server = command().args(["--blockdev", &early]).export("early", "").start();
        in_force(&server);
        add(&server, "late");
        for name in names {
            connect(&server, name).write(8, &pattern::block(1, 5));
        }
        assert_eq!(owners(), [USER; 2], "{}", server.log());
        let sockets = names.map(|name| server.socket(name));
        server.kill();
        // Files stay locked until the kernel has finished the killed process's last requests.
        for path in names.map(path) {
            eventually("the image is unlocked", || {
                let mut info = Command::new(tool("qemu-img"));
                let info = info.arg("info").arg(&path).output().expect("qemu-img runs");
                info.status.success().then_some(())
            });
        }

        assert_eq!(owners(), [USER; 2]);
        // A socket that belongs to root is in the way.
        sockets.iter().for_each(|socket| fs::remove_file(socket).expect("a socket"));
        let server = command().start();
        in_force(&server);
        for name in names {
            add(&server, name);
            let found = connect(&server, name).read(8, pattern::BLOCK);
            assert_eq!(pattern::generation(1, &found), Ok(5), "{name}");
        }
        server.stop();
        assert_eq!(owners(), [0; 0]);
        let log = fs::read_to_string(scratch.path("daemon.log")).expect("a log");
        assert!(!log.contains("journal"), "{log}");
        fs::remove_dir(&folder).expect("it is empty");
    }
}

/// Only the groups change, not the user.
#[test]
fn a_daemon_takes_another_group_without_another_user() {
    let scratch = Scratch::new();
    let uid = nix::unistd::geteuid();
    let command = ServerCommand::new(&scratch).arg("--user").arg(format!("{uid}:65532"));
    if !uid.is_root() {
        let (status, log) = command.run();
        assert!(!status.success() && log.contains("only root can change the user"), "{log}");
        return;
    }
    let server = command.iothread("io0").start();
    in_force(&server);
    for thread in threads(&server) {
        assert_eq!(thread.field("Gid:"), "65532\t65532\t65532\t65532", "{}", thread.name);
        assert_eq!(thread.field("Groups:"), "65532", "{}", thread.name);
        assert_eq!(thread.capabilities(), 0, "{}", thread.name);
    }
    server.stop();
}

#[test]
fn a_missing_user_is_an_error() {
    let scratch = Scratch::new();
    for (user, why) in
        [("nobody-here", "there is no user 'nobody-here'"), ("root:none-here", "no group")]
    {
        let (status, log) = ServerCommand::new(&scratch).arg("--user").arg(user).run();
        assert!(!status.success() && log.contains(why), "{log}");
    }
}

/// A daemon that reads an image over NBD from another one, each in a sandbox. The other one is restarted, and the first
/// connects again, which its I/O threads may not do themselves.
#[test]
fn connections_are_made_anew_from_within() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let storage = || {
        let command = ServerCommand::new(&scratch).named("storage").file("disk", &image, "");
        nbd_export(nbd_server(command, &scratch, ""), "disk", "").start()
    };
    let first = storage();
    let blockdev = format!(
        "nbd,node-name=far,server.type=unix,server.path={},export=disk,read-only=on,reconnect-delay=60",
        scratch.path("nbd.sock").display()
    );
    let server = ServerCommand::new(&scratch).arg("--blockdev").arg(blockdev);
    let server = server.iothread("io0").export("far", "writable=off,iothread=io0").start();
    let mut client = BlkClient::connect(&server.socket("far"), 1, 16).expect("a device");
    assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
    // Their sockets share a folder, which an orderly end expects to be empty.
    first.kill();
    let second = storage();
    assert_eq!(pattern::generation(2, &client.read(16, pattern::BLOCK)), Ok(0));
    drop(client);
    server.kill();
    let info = Command::new(tool("qemu-img"))
        .args(["info", &nbd_uri(&scratch, "disk")])
        .stdout(Stdio::null())
        .status();
    assert!(info.expect("qemu-img runs").success());
    second.kill();
}

/// Two guests on one I/O thread, whose memory is registered with one ring. An address of one guest is no memory of the
/// other, and an address that both have is each guest's own memory.
#[test]
fn a_queue_reaches_its_own_guest_s_memory_and_no_other() {
    let scratch = Scratch::new();
    let images = ["a", "b"].map(|name| Image::filled(&scratch, &format!("{name}.img"), 1));
    for pin in ["off", "on"] {
        let options = format!("iothread=io0,pin-memory={pin}");
        let mut command = ServerCommand::new(&scratch).iothread("io0");
        for (name, image) in ["a", "b"].iter().zip(&images) {
            command = command.file(name, image, "").export(name, &options);
        }
        let server = command.start();
        let mark = vec![0xa5; pattern::BLOCK];
        let connect_at = |name: &str, at| {
            BlkClient::connect_at(&server.socket(name), 1, 16, at).expect("a device")
        };
        let mut a = connect_at("a", MEMORY_AT);
        a.put(0, &mark);
        // The same address in both: data arrives at the right guest, and only there.
        let mut b = connect_at("b", MEMORY_AT);
        let segments = vec![Segment { at: 0, len: pattern::BLOCK, device_writes: true }];
        b.submit(0, &Request { kind: request::IN, sector: 8, segments });
        b.wait(0).expect("an answer");
        assert_eq!(pattern::generation(1, &b.get(0, pattern::BLOCK)), Ok(0));
        assert_eq!(a.get(0, pattern::BLOCK), mark);
        drop(b);
        // An address that only the other guest has.
        let below = MEMORY_AT >> 1;
        let mut b = connect_at("b", below);
        let segments =
            vec![Segment { at: MEMORY_AT - below, len: pattern::BLOCK, device_writes: true }];
        b.submit(0, &Request { kind: request::IN, sector: 8, segments });
        eventually("a word about it", || server.log().contains("is not memory").then_some(()));
        assert_eq!(a.get(0, pattern::BLOCK), mark);
        assert_eq!(pattern::generation(2, &a.read(16, pattern::BLOCK)), Ok(0), "it goes on");
        drop((a, b));
        server.stop();
    }
}

/// The new process has access to the paths of the first command line, whatever its own command line has.
#[test]
fn an_upgrade_keeps_the_paths() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let [inside, outside] = ["inside", "outside"].map(|name| {
        let folder = scratch.path(name);
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("a.img"), [0; 4096]).expect("an image");
        folder
    });
    let command = ServerCommand::new(&scratch).file("disk", &image, "").monitor("qmp");
    let paths = format!("on,paths={}", inside.display());
    let mut server = command.arg("--sandbox").arg(paths).start();
    let told =
        |server: &Server| Qmp::connect(&server.socket("qmp")).execute("x-query-sandbox", json!({}));
    let before = told(&server);
    for _ in 0..2 {
        server.upgrade();
        assert_eq!(told(&server), before);
    }
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let node = |folder: &Path| json!({"driver": "file", "node-name": "a", "filename": folder.join("a.img")});
    if has_landlock(&server) {
        let why = qmp.refused("blockdev-add", node(&outside));
        assert!(why.contains("Permission denied") && why.contains("--sandbox"), "{why}");
    }
    qmp.execute("blockdev-add", node(&inside));
    drop(qmp);
    server.stop();
}
