//! `serve --localize`: an image on a web server arrives in the overlay, until the overlay needs the server no more.

use crate::common;

use std::fs;
use std::path::Path;

use common::nginx::Nginx;
use integration::nbd::client_output;
use integration::{BlkClient, Scratch, Server, ServerCommand, eventually};

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
