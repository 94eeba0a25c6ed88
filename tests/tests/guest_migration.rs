//! A guest migrates live from one QEMU to another, and its disk from one daemon to another, on the same image, while
//! the guest writes and reads back with checksums. It sees no error, and finds each block as it wrote it.

use integration::{Guest, Image, Qmp, Scratch, Server, ServerCommand, eventually};
use serde_json::json;

const JOB: &str = "
    verify --do_verify=1
    checked_load 2
    echo ready
    read -r go_on
    while wait_for_requests 200 && echo arrived && read -r again && [ $again != no ]; do :; done
    end_checked_load
    verify --verify_only=1
    md5sum </dev/vda
    dmesg | grep -E 'I/O error|vda.*(timeout|reset)' || true";

fn serve(
    scratch: &Scratch,
    name: &'static str,
    driver: &str,
    image: &Image,
    active: bool,
) -> Server {
    let (path, active) = (image.path().display(), if active { "on" } else { "off" });
    ServerCommand::new(scratch)
        .named(name)
        .monitor(&format!("{name}-qmp"))
        .iothread("io0")
        .iothread("io1")
        .arg("--blockdev")
        .arg(format!(
            "{driver},node-name={name},active={active},file.driver=file,file.filename={path},\
             file.aio=io_uring,file.cache.direct=on"
        ))
        .export(name, "allow-inactive=on,num-queues=2,iothread.0=io0,iothread.1=io1")
        .start()
}

fn migrates(driver: &str, image: &Image, back: bool) -> Vec<String> {
    // Each finds its own socket gone in the end, and no other.
    let scratch = [Scratch::new(), Scratch::new()];
    let servers = [(0, "here"), (1, "there")]
        .map(|(i, name): (usize, _)| serve(&scratch[i], name, driver, image, i == 0));
    let guest = |server: &Server, name| Guest::new().disk(server.socket(name)).queues(2);
    let [here, there] = &servers;
    let set_active = |server: &Server, name: &str, active: bool| {
        let mut qmp = Qmp::connect(&server.socket(&format!("{name}-qmp")));
        qmp.execute("blockdev-set-active", json!({"node-name": name, "active": active}));
    };
    let mut boot = guest(here, "here").boot(JOB);
    boot.expect("ready");
    boot.migrate(&guest(there, "there"), || {
        set_active(here, "here", false);
        set_active(there, "there", true);
    });
    boot.send("there");
    boot.expect("arrived");
    if back {
        // Through the same daemons.
        boot.send("again");
        boot.expect("arrived");
        boot.migrate(&guest(here, "here"), || {
            set_active(there, "there", false);
            set_active(here, "here", true);
        });
    }
    boot.send("no");
    let lines = boot.finish();
    servers.into_iter().for_each(Server::stop);
    lines
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn a_guest_on_a_raw_image_migrates() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let lines = migrates("raw", &image, false);
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())), "{lines:?}");
}

#[test]
fn a_guest_on_a_qcow2_image_migrates_there_and_back() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.qcow2", 0);
    let path = image.path().to_str().expect("UTF-8").to_owned();
    let qemu_img = |arguments: &[&str]| {
        let status =
            std::process::Command::new(integration::tool("qemu-img")).args(arguments).status();
        assert!(status.expect("qemu-img runs").success(), "{arguments:?}");
    };
    qemu_img(&["create", "-q", "-f", "qcow2", &path, "32M"]);
    let lines = migrates("qcow2", &image, true);
    qemu_img(&["check", "-q", &path]);
    let raw = scratch.path("raw");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &path, raw.to_str().expect("UTF-8")]);
    let md5 = Image::existing(&raw).md5();
    assert_eq!(lines.last(), Some(&format!("{md5}  -")), "{lines:?}");
}

/// The guide's recipe: the disk is mirrored to an NBD export of the other daemon, each write to both images, until the guest
/// is paused.
#[test]
fn a_guest_moves_with_its_local_disk() {
    let folder = Scratch::new();
    let images = [Image::filled(&folder, "here.img", 32), Image::empty(&folder, "there.img", 32)];
    let scratch = [Scratch::new(), Scratch::new()];
    let [here, there] = [(0, "here"), (1, "there")]
        .map(|(i, name): (usize, _)| serve(&scratch[i], name, "raw", &images[i], true));
    let mut source = Qmp::connect(&here.socket("here-qmp"));
    let mut target = Qmp::connect(&there.socket("there-qmp"));

    let guest = |server: &Server, name| Guest::new().disk(server.socket(name)).queues(2);
    let mut boot = guest(&here, "here").boot(JOB);
    boot.expect("ready");
    let (nbd, unix) =
        (scratch[1].path("nbd"), |path| json!({"type": "unix", "data": {"path": path}}));
    target.execute("nbd-server-start", json!({"addr": unix(&nbd)}));
    target.execute(
        "block-export-add",
        json!({"type": "nbd", "id": "move", "node-name": "there", "name": "disk", "writable": true}),
    );
    source.execute(
        "blockdev-add",
        json!({
            "driver": "nbd", "node-name": "far", "export": "disk",
            "server": {"type": "unix", "path": &nbd},
        }),
    );
    source.execute(
        "blockdev-mirror",
        json!({
            "job-id": "move", "device": "here", "target": "far", "sync": "full",
            "copy-mode": "write-blocking", "auto-dismiss": false,
        }),
    );
    let reaches = |source: &mut Qmp, wanted: &str| {
        eventually(wanted, || {
            let jobs = source.execute("query-jobs", json!({}));
            assert!(jobs[0]["error"].is_null(), "{jobs}");
            (jobs[0]["status"] == wanted).then_some(())
        });
    };
    reaches(&mut source, "ready");
    let mut ended = None;
    boot.migrate(&guest(&there, "there"), || {
        source.execute("block-job-cancel", json!({"device": "move"}));
        reaches(&mut source, "concluded");
        source.execute("job-dismiss", json!({"id": "move"}));
        source.execute("blockdev-del", json!({"node-name": "far"}));
        target.execute("block-export-del", json!({"id": "move", "mode": "hard"}));
        ended = Some(images.each_ref().map(Image::md5));
    });
    let [before, after] = ended.expect("the images' sums while the guest was paused");
    assert_eq!(before, after);
    boot.send("there");
    boot.expect("arrived");
    boot.send("no");
    let lines = boot.finish();
    assert_eq!(images[0].md5(), before, "the guest still writes to the old image");
    here.stop();
    there.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", images[1].md5())), "{lines:?}");
}
