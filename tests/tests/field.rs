//! Guests of the QEMUs that operators have, on the trees of `scripts/setup-field.sh`: each release of Debian has another
//! one, and each sends its messages in another order.
//!
//! A guest writes and reads back with checksums, while it is stopped, saved and restored, migrated, its daemon killed
//! and upgraded, its driver unbound, and it is reset and rebooted. It sees no error, and finds each block as written.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use integration::{
    Boot, Guest, Image, Qmp, Scratch, Server, ServerCommand, client, eventually, python,
    repository, tied_command,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

const JOB: &str = "
    echo ready
    while read -r step; do
        case $step in
            write) verify --do_verify=1 ;;
            verify) verify --verify_only=1 ;;
            load) checked_load 2 ;;
            more) wait_for_requests 200 ;;
            end) end_checked_load ;;
            rebind)
                driver=/sys/bus/virtio/drivers/$driver
                device=$(basename $driver/virtio*)
                echo $device >$driver/unbind
                [ ! -e /sys/block/$disk ]
                echo $device >$driver/bind
                until [ -b /dev/$disk ]; do sleep 0.1; done
                ;;
            reboot) reboot -f ;;
            touch)
                fio --minimal --name=touch --filename=/dev/$disk --direct=1 --rw=randrw --bs=4k --size=1m --number_ios=8 \\
                    --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split >/dev/null
                ;;
            sum) md5sum </dev/$disk ;;
            leave) break ;;
        esac
        echo \"done: $step\"
    done
    dmesg | grep -E \"I/O error|$disk.*(timeout|reset)\" || true";

#[derive(Clone, Copy, PartialEq)]
enum Device {
    Blk,
    Scsi,
}

/// A QEMU.
#[derive(Clone, Copy)]
struct Release {
    /// Its Debian release; `None`: this machine's.
    debian: Option<&'static str>,
    /// `reconnect`, in seconds, was removed after `reconnect-ms` had come.
    reconnect: &'static [&'static str],
    /// Whether vhost-user-scsi takes a socket with `reconnect`.
    scsi_reconnects: bool,
    /// Whether vhost-user-blk with `packed=on` leaves the choice of rings to the back end. Otherwise it acknowledges packed
    /// rings for one that does not offer them.
    blk_asks_for_packed: bool,
    /// Whether a guest without KVM survives a live migration while it is busy. Before, also guests with QEMU's own virtio-blk
    /// lose writes to their memory now and then: their kernels crash.
    migrates_busy: bool,
    /// QEMU's machine. No guest of 5.2 comes back from a reset with q35, with whatever devices.
    machine: &'static str,
}

const SECONDS: &str = "reconnect=1";
const MILLISECONDS: &str = "reconnect-ms=20";

const QEMU_5_2: Release =
    Release { debian: Some("bullseye"), machine: "pc", blk_asks_for_packed: false, ..QEMU_7_2 };
const QEMU_7_2: Release = Release {
    debian: Some("bookworm"),
    reconnect: &[SECONDS],
    scsi_reconnects: false,
    migrates_busy: false,
    blk_asks_for_packed: true,
    machine: "q35",
};
const QEMU_10_0_2: Release = Release { debian: None, ..QEMU_10_0 };
const QEMU_10_0: Release = Release {
    debian: Some("trixie"),
    reconnect: &[MILLISECONDS, SECONDS],
    scsi_reconnects: true,
    migrates_busy: true,
    blk_asks_for_packed: true,
    machine: "q35",
};
const QEMU_NEWEST: Release =
    Release { debian: Some("sid"), reconnect: &[MILLISECONDS], ..QEMU_10_0 };

/// A device of a guest.
#[derive(Clone, Copy)]
struct Disk {
    release: Release,
    device: Device,
    /// Number of queues and processors.
    queues: u32,
    /// Options of QEMU's device.
    options: &'static str,
    /// Options of its socket; empty: the guest loses the disk with the daemon.
    reconnect: &'static str,
}

impl Disk {
    fn guest(&self, server: &Server, name: &str) -> Guest {
        let guest = Guest::new().qemu_of(self.release.debian).queues(self.queues);
        let guest = guest.machine(self.release.machine).chardev_options(self.reconnect).reboots();
        let socket = server.socket(name);
        match self.device {
            Device::Blk => guest.disk_with(socket, self.options),
            Device::Scsi => guest.scsi_with(socket, self.options),
        }
    }

    fn serve(&self, scratch: &Scratch, name: &'static str, image: &Image, active: bool) -> Server {
        let active = if active { "on" } else { "off" };
        let options = format!("aio=io_uring,cache.direct=on,active={active}");
        let command = ServerCommand::new(scratch).named(name).monitor(&format!("{name}-qmp"));
        let command = command.iothread("io0").iothread("io1").file(name, image, &options);
        let threads = "allow-inactive=on,num-queues=2,iothread.0=io0,iothread.1=io1";
        match self.device {
            Device::Blk => command.export(name, threads).start(),
            Device::Scsi => command.export_scsi(name, &[name], threads).start(),
        }
    }

    fn job(&self) -> String {
        let (disk, driver) = match self.device {
            Device::Blk => ("vda", "virtio_blk"),
            Device::Scsi => ("sda", "virtio_scsi"),
        };
        format!("disk={disk} driver={driver}\n{JOB}")
    }
}

/// Has the job do a step.
fn step(boot: &mut Boot, step: &str) {
    boot.send(step);
    boot.expect(&format!("done: {step}"));
}

/// Ends the guest, which must have seen no error. Returns the checksum of its disk.
fn end(mut boot: Boot) -> String {
    boot.send("sum");
    let sum = boot.line();
    boot.expect("done: sum");
    boot.send("leave");
    let lines = boot.finish();
    assert_eq!(lines.last().map(String::as_str), Some("done: sum"), "{lines:?}");
    sum
}

/// All that may happen to a guest on one host.
fn lives(disk: &Disk) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let mut server = disk.serve(&scratch, "disk", &image, true);
    let guest = disk.guest(&server, "disk");
    let mut boot = guest.boot(&disk.job());
    boot.expect("ready");
    step(&mut boot, "write");
    step(&mut boot, "load");
    eprintln!("stop and cont");
    let mut qmp = boot.qmp();
    qmp.execute("stop", json!({}));
    qmp.execute("cont", json!({}));
    drop(qmp);
    step(&mut boot, "more");
    if !disk.reconnect.is_empty() {
        eprintln!("kill");
        server.kill();
        server = disk.serve(&scratch, "disk", &image, true);
        step(&mut boot, "more");
    }
    eprintln!("upgrade");
    server.upgrade();
    step(&mut boot, "more");
    eprintln!("save and restore");
    boot.save_and_restore(&disk.guest(&server, "disk"), true, || ());
    step(&mut boot, "more");
    eprintln!("save it while it runs");
    boot.save_and_restore(&disk.guest(&server, "disk"), false, || ());
    step(&mut boot, "more");
    step(&mut boot, "end");
    step(&mut boot, "verify");
    eprintln!("unbind and bind the driver");
    step(&mut boot, "rebind");
    step(&mut boot, "verify");
    step(&mut boot, "load");
    eprintln!("reset");
    boot.qmp().execute("system_reset", json!({}));
    boot.expect("ready");
    step(&mut boot, "verify");
    step(&mut boot, "load");
    eprintln!("reboot");
    boot.send("reboot");
    boot.expect("ready");
    step(&mut boot, "verify");
    let sum = end(boot);
    let log = server.log();
    server.stop();
    assert_eq!(sum, format!("{}  -", image.md5()));
    assert!(!log.contains("closed the connection"), "{log}");
}

/// A guest migrates live to another QEMU, and its disk to another daemon.
fn migrates(disk: &Disk) {
    let scratch = [Scratch::new(), Scratch::new()];
    let image = Image::filled(&scratch[0], "disk.img", 32);
    let here = disk.serve(&scratch[0], "here", &image, true);
    let there = disk.serve(&scratch[1], "there", &image, false);
    let set_active = |server: &Server, name: &str, active: bool| {
        let mut qmp = Qmp::connect(&server.socket(&format!("{name}-qmp")));
        qmp.execute("blockdev-set-active", json!({"node-name": name, "active": active}));
    };
    let mut boot = disk.guest(&here, "here").boot(&disk.job());
    boot.expect("ready");
    step(&mut boot, "write");
    step(&mut boot, "load");
    if !disk.release.migrates_busy {
        step(&mut boot, "end");
    }
    boot.migrate(&disk.guest(&there, "there"), || {
        set_active(&here, "here", false);
        set_active(&there, "there", true);
    });
    if !disk.release.migrates_busy {
        step(&mut boot, "load");
    }
    step(&mut boot, "more");
    step(&mut boot, "end");
    step(&mut boot, "verify");
    let sum = end(boot);
    let logs = [&here, &there].map(|server| server.log());
    for server in [here, there] {
        server.stop();
    }
    assert_eq!(sum, format!("{}  -", image.md5()));
    for log in logs {
        assert!(!log.contains("closed the connection"), "{log}");
    }
}

/// Runs `scenario` with each way in which a device may be described.
fn with_each(release: Release, device: Device, scenario: impl Fn(&Disk)) {
    let ways: &[(u32, &str)] = match device {
        Device::Blk => {
            &[(1, ""), (2, ""), (1, "queue-size=1024"), (2, "queue-size=1024"), (2, "packed=on")]
        }
        // With packed=on, QEMU's vhost-user-scsi acknowledges packed rings for a back end that does not offer them.
        Device::Scsi => &[(1, ""), (2, ""), (1, "virtqueue_size=1024"), (2, "virtqueue_size=1024")],
    };
    let reconnect = match device {
        Device::Scsi if !release.scsi_reconnects => &[""],
        _ => release.reconnect,
    };
    for (&reconnect, &(queues, options)) in reconnect.iter().cycle().zip(ways) {
        if options == "packed=on" && !release.blk_asks_for_packed {
            continue;
        }
        eprintln!("{queues} queues, {reconnect} {options}");
        scenario(&Disk { release, device, queues, options, reconnect });
    }
}

/// The recorder of messages between QEMU and a daemon.
struct Recorder {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Recorder {
    fn start(listen: &Path, back_end: &Path, output: &Path) -> Self {
        let mut command = tied_command(&python());
        command.arg(client("vhost_user_recorder.py")).args([listen, back_end, output]);
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("Python runs");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut recorder = Recorder { process, answers };
        recorder.wait();
        recorder
    }

    fn wait(&mut self) {
        let mut line = String::new();
        assert_eq!(self.answers.read_line(&mut line).expect("the recorder runs"), 1, "{line}");
    }

    fn mark(&mut self, what: &str) {
        let stdin = self.process.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{what}").expect("the recorder runs");
        self.wait();
    }

    fn end(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().expect("our child").success());
    }
}

/// Records the messages of a QEMU with two queues.
fn record_to(output: &Path, release: Release, device: Device) {
    let reconnect = release.reconnect[0];
    let disk = Disk { release, device, queues: 2, options: "", reconnect };
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let mut server = disk.serve(&scratch, "disk", &image, true);
    let (socket, back_end) = (server.socket("recorded"), server.socket("disk"));
    let mut recorder = Recorder::start(&socket, &back_end, output);
    let guest = disk.guest(&server, "recorded");
    let there = disk.guest(&server, "recorded");
    let io = |boot: &mut Boot, recorder: &mut Recorder, next: &str| {
        step(boot, "touch");
        recorder.mark("io");
        recorder.mark(next);
    };
    recorder.mark("boot");
    let mut boot = guest.boot(&disk.job());
    boot.expect("ready");
    io(&mut boot, &mut recorder, "unbind and bind the driver");
    step(&mut boot, "rebind");
    io(&mut boot, &mut recorder, "stop");
    let mut qmp = boot.qmp();
    let version = qmp.execute("query-version", json!({}));
    qmp.execute("stop", json!({}));
    recorder.mark("cont");
    qmp.execute("cont", json!({}));
    drop(qmp);
    io(&mut boot, &mut recorder, "kill the back end");
    server.kill();
    server = disk.serve(&scratch, "disk", &image, true);
    io(&mut boot, &mut recorder, "save");
    boot.save_and_restore(&there, true, || recorder.mark("restore"));
    io(&mut boot, &mut recorder, "migrate");
    boot.save_and_restore(&there, false, || recorder.mark("arrive"));
    io(&mut boot, &mut recorder, "reset");
    boot.qmp().execute("system_reset", json!({}));
    boot.expect("ready");
    io(&mut boot, &mut recorder, "end");
    boot.send("leave");
    boot.finish();
    recorder.end();
    fs::remove_file(socket).expect("the recorder's socket");
    server.stop();
    let text = fs::read_to_string(output).expect("the recording");
    let version = version["package"].as_str().filter(|package| !package.is_empty());
    let version = version.expect("Debian's QEMU says its package");
    fs::write(output, format!("# QEMU {version}, two queues\n{text}")).expect("the recording");
}

/// fio with libblkio, from the tree of `scripts/setup-peers.sh`, by that tree's loader.
fn fio_blkio() -> Command {
    let tree = std::env::var_os("RINGMILL_PEERS");
    let tree = PathBuf::from(tree.unwrap_or_else(|| "/var/tmp/ringmill-peers".into()));
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let mut command = tied_command(&libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries).arg(tree.join("usr/local/bin/fio-blkio"));
    command
}

/// Records the messages of libblkio with two queues: three times fio, which opens the device twice before it begins.
fn record_libblkio_to(output: &Path) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let disk =
        Disk { release: QEMU_NEWEST, device: Device::Blk, queues: 2, options: "", reconnect: "" };
    let server = disk.serve(&scratch, "disk", &image, true);
    let (socket, back_end) = (server.socket("recorded"), server.socket("disk"));
    let mut recorder = Recorder::start(&socket, &back_end, output);
    let mut qmp = Qmp::connect(&server.socket("disk-qmp"));
    let mut reads = || {
        let stats = qmp.execute("query-blockstats", json!({}));
        stats[0]["stats"]["rd_operations"].as_u64().expect("a number")
    };
    for _ in 0..3 {
        recorder.mark("start");
        let before = reads();
        let mut fio = fio_blkio();
        fio.args(["--name=load", "--thread=1", "--numjobs=2", "--rw=randread", "--bs=4k"]);
        fio.args(["--size=32m", "--time_based", "--runtime=600", "--ioengine=libblkio"]);
        fio.arg("--libblkio_driver=virtio-blk-vhost-user");
        fio.arg(format!("--libblkio_path={}", socket.display())).stdout(Stdio::null());
        let mut fio = fio.spawn().expect("fio of scripts/setup-peers.sh");
        eventually("fio reads", || (reads() > before + 1000).then_some(()));
        recorder.mark("io");
        recorder.mark("stop");
        kill(Pid::from_raw(fio.id() as i32), Signal::SIGINT).expect("our child");
        fio.wait().expect("our child");
    }
    recorder.mark("end");
    recorder.end();
    fs::remove_file(socket).expect("the recorder's socket");
    server.stop();
    let version = fio_blkio().arg("--version").output().expect("fio of scripts/setup-peers.sh");
    let version = String::from_utf8(version.stdout).expect("text");
    let text = fs::read_to_string(output).expect("the recording");
    let title = format!("# {} with Debian sid's libblkio, two queues\n", version.trim());
    fs::write(output, title + &text).expect("the recording");
}

/// Records each QEMU and libblkio anew, for the test `recordings` of `crates/exports`.
#[test]
#[ignore = "writes to the source"]
fn record() {
    let folder = repository().join("crates/exports/tests/recordings");
    let wanted = std::env::var("RINGMILL_RECORD").unwrap_or_default();
    let releases = [
        ("qemu-5.2", QEMU_5_2),
        ("qemu-7.2", QEMU_7_2),
        ("qemu-10.0.2", QEMU_10_0_2),
        ("qemu-10.0.13", QEMU_10_0),
        ("qemu-11.1", QEMU_NEWEST),
    ];
    for (name, release) in releases {
        for (kind, device) in [("blk", Device::Blk), ("scsi", Device::Scsi)] {
            let name = format!("{name}-{kind}");
            if name.starts_with(&wanted) {
                record_to(&folder.join(format!("{name}.txt")), release, device);
            }
        }
    }
    if "libblkio-blk".starts_with(&wanted) {
        record_libblkio_to(&folder.join("libblkio-blk.txt"));
    }
}

macro_rules! releases {
    ($($name:ident: $release:ident,)*) => { $(
        mod $name {
            use super::*;

            #[test]
            #[ignore = "needs the trees of scripts/setup-field.sh"]
            fn a_blk_disk_lives() {
                with_each($release, Device::Blk, lives);
            }

            #[test]
            #[ignore = "needs the trees of scripts/setup-field.sh"]
            fn a_blk_disk_migrates() {
                with_each($release, Device::Blk, migrates);
            }

            #[test]
            #[ignore = "needs the trees of scripts/setup-field.sh"]
            fn a_scsi_disk_lives() {
                with_each($release, Device::Scsi, lives);
            }

            #[test]
            #[ignore = "needs the trees of scripts/setup-field.sh"]
            fn a_scsi_disk_migrates() {
                with_each($release, Device::Scsi, migrates);
            }
        }
    )* };
}

releases! {
    qemu_5_2: QEMU_5_2,
    qemu_7_2: QEMU_7_2,
    qemu_10_0_2: QEMU_10_0_2,
    qemu_10_0: QEMU_10_0,
    qemu_newest: QEMU_NEWEST,
}
