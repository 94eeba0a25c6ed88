//! `serve --localize`: an image on a web server arrives in the overlay, until the overlay needs the server no more.

use crate::common;

use std::fs;
use std::path::Path;

use common::nginx::Nginx;
use integration::nbd::{client, client_output};
use integration::{BlkClient, Scratch, Server, ServerCommand, daemon, eventually, words};

const ARRIVED: &str = "needs the server no more";

struct Disk<'a> {
    scratch: &'a Scratch,
    url: String,
    speed: &'static str,
    /// What the disk has to contain.
    content: Vec<u8>,
}

impl Disk<'_> {
    fn command(&self, overlay: &str) -> ServerCommand<'_> {
        let path = |name: &str| self.scratch.path(name).display().to_string();
        ServerCommand::other_command(self.scratch, "serve")
            .arg(&self.url)
            .args(["--socket", &path("disk.sock")])
            .args(["--overlay", &path(overlay)])
            .args(["--localize-speed", self.speed])
    }

    /// Writes a sector, and reads others.
    fn use_it(&mut self, sector: u64) {
        let mut client = self.connect();
        let data = vec![sector as u8 | 1; 512];
        client.write(sector, &data);
        let at = sector as usize * 512;
        self.content[at..at + 512].copy_from_slice(&data);
        self.check(&mut client, at - 512);
    }

    fn connect(&self) -> BlkClient {
        let socket = self.scratch.path("disk.sock");
        eventually("the disk", || BlkClient::connect(&socket, 1, 8).ok())
    }

    fn check(&self, client: &mut BlkClient, at: usize) {
        assert!(client.read(at as u64 / 512, 4096) == self.content[at..at + 4096], "at {at}");
    }

    /// Compares an image that no daemon has open.
    fn compare(&self, overlay: &str) {
        let path = |name: &str| self.scratch.path(name).display().to_string();
        fs::write(path("expected"), &self.content).expect("a file");
        let pair = [&*path("expected"), &path(overlay)];
        client_output(
            self.scratch,
            "qemu-img",
            &[&["compare", "-fraw", "-Fqcow2"], &pair[..]].concat(),
        );
        client_output(self.scratch, "qemu-img", &["check", "-q", &path(overlay)]);
    }
}

fn arrived(server: &Server) {
    eventually("the whole image", || server.log().contains(ARRIVED).then_some(()));
}

/// Bytes that a file takes up.
fn taken(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or(0, |file| file.blocks() * 512)
}

fn content_of(path: &str) -> Vec<u8> {
    let mut content = fs::read(path).expect("the image");
    content.resize(content.len().next_multiple_of(512), 0);
    content
}

#[test]
fn an_image_arrives_under_writes_kills_and_upgrades_and_needs_no_server_then() {
    let web = Scratch::new();
    let mut nginx = Nginx::new(&web);
    let template = web.path("web/disk.qcow2").display().to_string();
    client_output(
        &web,
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", &nginx.image(), &template],
    );
    // Blocks that neither image has: another template would fill them.
    client_output(&web, "qemu-img", &["resize", "-q", &template, "9M"]);
    for name in ["disk.qcow2", "disk.img"] {
        let scratch = Scratch::new();
        let mut content = content_of(&nginx.image());
        if name == "disk.qcow2" {
            content.resize(9 << 20, 0);
        }
        let url = nginx.url(&format!("/{name}"));
        let mut disk = Disk { scratch: &scratch, url, speed: "1M", content };
        let overlay = scratch.path("vm.qcow2");
        let killed = disk.command("vm.qcow2").start();
        disk.use_it(10_000);
        // More than what the client has read and written.
        eventually("a part of the image", || (taken(&overlay) > 1 << 20).then_some(()));
        disk.use_it(9_000);
        assert!(!killed.log().contains(ARRIVED));
        killed.kill();

        let mut server = disk.command("vm.qcow2").start();
        disk.use_it(8_000);
        let before = taken(&overlay);
        eventually("another part", || (taken(&overlay) > before).then_some(()));
        server.upgrade();
        assert!(!server.log().contains(ARRIVED));
        disk.use_it(20);
        arrived(&server);
        // The next process finds that there is nothing to do.
        nginx.kill();
        server.upgrade();
        let mut client = disk.connect();
        for at in (0..disk.content.len() - 4096).step_by(1 << 20) {
            disk.check(&mut client, at);
        }
        drop(client);
        server.stop();
        disk.compare("vm.qcow2");
        let info = client_output(&scratch, "qemu-img", &["info", &overlay.display().to_string()]);
        assert!(!info.contains("backing file"), "{info}");

        // Without a server, and without its options.
        let server = disk.command("vm.qcow2").start();
        eventually("a line of the log", || server.log().contains("no more").then_some(()));
        disk.use_it(30);
        server.stop();
        disk.compare("vm.qcow2");
        nginx.start();
    }
}

/// Without its image, an overlay would read as zeroes where it has nothing: neither a disk nor a source.
fn unfinished_is_no_disk(scratch: &Scratch, overlay: &Path) {
    let name = overlay.display().to_string();
    let socket = scratch.path("alone.sock").display().to_string();
    let alone = ["--socket", &socket];
    let (status, log) = ServerCommand::other_command(scratch, "serve").arg(&name).args(alone).run();
    assert!(!status.success() && log.contains("unfinished overlay") && log.contains("--overlay"));
    let img = |arguments: &[&str]| {
        let mut words = vec!["img"];
        words.extend(arguments);
        client(scratch, &daemon().display().to_string(), &words)
    };
    let copied = img(&["convert", "-O", "raw", &name, "copied"]);
    let words = String::from_utf8_lossy(&copied.stderr);
    assert!(!copied.status.success() && words.contains("unfinished overlay"), "{words}");
    assert!(img(&["info", &name]).status.success() && img(&["check", &name]).status.success());
    // Where the user says so.
    let alone = format!("driver=qcow2,backing=,file.driver=file,file.filename={name}");
    let copied = img(&["convert", "--image-opts", "-O", "raw", &alone, "copied"]);
    assert!(copied.status.success(), "{copied:?}");
}

/// An image on a server does not take the place of what a disk has, or has behind it.
#[test]
fn disks_and_overlays_of_files_are_no_overlays_of_a_server() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let disk = Disk { scratch: &scratch, url: nginx.url("/disk.img"), speed: "0", content: vec![] };
    for line in [
        "qemu-img create -q -f raw base.raw 8M",
        "qemu-img create -q -f qcow2 -b base.raw -F raw above.qcow2",
        "qemu-img create -q -f qcow2 own.qcow2 8M",
        "qemu-io -c write~0~4k own.qcow2",
        "qemu-img create -q -f qcow2 snapshot.qcow2 8M",
        "qemu-img snapshot -c s snapshot.qcow2",
        "qemu-img create -q -f qcow2 empty.qcow2 8M",
    ] {
        let words = words(line);
        let words = words.iter().map(String::as_str).collect::<Vec<_>>();
        client_output(&scratch, words[0], &words[1..]);
    }
    for name in ["above.qcow2", "own.qcow2", "snapshot.qcow2"] {
        let before = fs::read(scratch.path(name)).expect("an image");
        let (status, log) = disk.command(name).run();
        assert!(!status.success() && log.contains("it is a disk of its own"), "{name}: {log}");
        assert!(fs::read(scratch.path(name)).expect("an image") == before, "{name}");
    }
    let server = disk.command("empty.qcow2").start();
    arrived(&server);
    server.stop();
}

#[test]
fn another_image_on_the_server_stops_the_copy_and_the_overlay_stays_as_it_is() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let (url, content) = (nginx.url("/disk.img"), content_of(&nginx.image()));
    let mut disk = Disk { scratch: &scratch, url, speed: "512k", content };
    let overlay = scratch.path("vm.qcow2");
    let server = disk.command("vm.qcow2").start();
    disk.use_it(10_000);
    eventually("a part of the image", || (taken(&overlay) > 1 << 20).then_some(()));
    fs::rename(nginx.image(), web.path("before")).expect("the image");
    fs::write(nginx.image(), vec![7; disk.content.len()]).expect("another image");
    eventually("the end of the copy", || server.log().contains("localizing stops: ").then_some(()));
    let log = server.log();
    assert!(log.contains("the image on the server has changed") && !log.contains(ARRIVED), "{log}");
    server.stop();
    let (status, log) = disk.command("vm.qcow2").run();
    assert!(!status.success() && log.contains("The overlay belongs to an image of"), "{log}");
    unfinished_is_no_disk(&scratch, &overlay);
    // The one that it belongs to.
    fs::rename(web.path("before"), nginx.image()).expect("the image");
    disk.speed = "0";
    let server = disk.command("vm.qcow2").start();
    disk.use_it(11_000);
    arrived(&server);
    server.stop();
    disk.compare("vm.qcow2");
    let (status, log) = disk.command("vm.qcow2").args(["--read-only"]).run();
    assert!(!status.success() && log.contains("--overlay"), "{log}");
}
