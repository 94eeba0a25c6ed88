//! `serve --cache-dir`: what is read of an image on a web server is fetched once.

use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use common::nginx::{MIB, Nginx};
use integration::nbd::client_output;
use integration::{BlkClient, Mounted, Scratch, Server, ServerCommand, eventually};
use test_requirements::{Needs, untested};

const SIZE: usize = (MIB as usize) << 20;

/// A user of the image, with an overlay.
struct Disk<'a> {
    scratch: &'a Scratch,
    url: String,
    folder: PathBuf,
}

impl Disk<'_> {
    fn new<'a>(scratch: &'a Scratch, nginx: &Nginx<'_>, path: &str) -> Disk<'a> {
        Disk { scratch, url: nginx.url(path), folder: scratch.path("caches") }
    }

    fn command(&self, name: &str) -> ServerCommand<'_> {
        let path = |name: String| self.scratch.path(&name).display().to_string();
        ServerCommand::other_command(self.scratch, "serve")
            .arg(&self.url)
            .args(["--socket", &path(format!("{name}.sock"))])
            .args(["--overlay", &path(format!("{name}.qcow2"))])
            .args(["--cache-dir", &self.folder.display().to_string()])
    }

    fn connect(&self, name: &str) -> BlkClient {
        let socket = self.scratch.path(&format!("{name}.sock"));
        eventually("the disk", || BlkClient::connect(&socket, 1, 8).ok())
    }

    /// Reads all of the disk.
    fn check(&self, name: &str, content: &[u8]) {
        let mut client = self.connect(name);
        for (at, part) in (0..).step_by(128).zip(content.chunks(64 << 10)) {
            assert!(client.read(at, part.len()) == part, "sector {at}");
        }
    }

    fn cache(&self) -> PathBuf {
        let mut files = fs::read_dir(&self.folder).expect("the folder");
        let file = files.next().expect("a cache").expect("a file").path();
        assert!(files.next().is_none(), "one cache");
        file
    }
}

fn content_of(path: &str) -> Vec<u8> {
    let mut content = fs::read(path).expect("the image");
    content.truncate(SIZE);
    content
}

/// Bytes that the server has sent.
fn sent(web: &Scratch) -> u64 {
    let log = fs::read_to_string(web.path("access.log")).expect("nginx's log");
    let bytes = log.lines().filter_map(|line| line.split("\" 206 ").nth(1)?.split(' ').next());
    bytes.map(|bytes| bytes.parse::<u64>().expect("bytes")).sum()
}

fn check_image(scratch: &Scratch, image: &Path) {
    client_output(scratch, "qemu-img", &["check", "-q", &image.display().to_string()]);
}

fn other_content(nginx: &Nginx<'_>, with: u8) {
    let new = format!("{}.new", nginx.image());
    fs::write(&new, vec![with; SIZE]).expect("another image");
    fs::rename(new, nginx.image()).expect("the image");
}

#[test]
fn each_byte_is_fetched_once_by_all_overlays_and_after_a_kill_and_an_upgrade() {
    let web = Scratch::new();
    let mut nginx = Nginx::new(&web);
    let content = content_of(&nginx.image());
    let template = web.path("web/disk.qcow2").display().to_string();
    client_output(
        &web,
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", &nginx.image(), &template],
    );
    for path in ["/disk.img", "/disk.qcow2"] {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, &nginx, path);
        let before = sent(&web);
        let killed = disk.command("vm1").start();
        disk.check("vm1", &content[..SIZE / 2]);
        disk.connect("vm1").write(0, &[1; 512]);
        killed.kill();
        fs::remove_file(scratch.path("vm1.sock")).expect("its socket");
        let mut server = disk.command("vm2").start();
        disk.check("vm2", &content[..SIZE * 3 / 4]);
        server.upgrade();
        disk.check("vm2", &content);
        eventually("nginx's log", || (sent(&web) > before + SIZE as u64).then_some(()));
        let fetched = sent(&web) - before;
        // Beside the image: its header and tables at each opening, and what was read ahead.
        assert!(fetched < SIZE as u64 * 5 / 4, "{path}: {fetched} bytes");
        nginx.kill();
        disk.check("vm2", &content);
        server.stop();
        nginx.start();
        check_image(&scratch, &disk.cache());
        // Overlays have only what was written.
        let overlay = fs::metadata(scratch.path("vm2.qcow2")).expect("the overlay");
        assert!(overlay.blocks() * 512 < 1 << 20, "{overlay:?}");

        let before = sent(&web);
        let server = disk.command("vm1").start();
        let mut changed = content.clone();
        changed[..512].fill(1);
        disk.check("vm1", &changed);
        server.stop();
        let server = disk.command("vm3").start();
        disk.check("vm3", &content);
        server.stop();
        assert!(sent(&web) - before < 1 << 20, "{path}: {} bytes", sent(&web) - before);
    }
}

#[test]
fn a_cache_has_one_process_at_a_time() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, &nginx, "/disk.img");
    let server = disk.command("vm1").start();
    let (status, log) = disk.command("vm2").run();
    assert!(!status.success() && log.contains("another process uses it"), "{log}");
    other_content(&nginx, 7);
    let (status, log) = disk.command("vm2").run();
    assert!(!status.success() && log.contains("another process uses it"), "{log}");
    assert!(!scratch.path("vm2.qcow2").exists());
    server.stop();
}

#[test]
fn another_content_starts_the_cache_anew_and_is_refused_to_overlays() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let content = content_of(&nginx.image());
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, &nginx, "/disk.img");
    let server = disk.command("vm1").start();
    disk.check("vm1", &content);
    server.stop();
    other_content(&nginx, 7);
    let (status, log) = disk.command("vm1").run();
    assert!(!status.success() && log.contains("The overlay belongs to an image of"), "{log}");
    assert!(log.contains("started anew: it belongs to an image of"), "{log}");
    let server = disk.command("vm2").start();
    disk.check("vm2", &vec![7; SIZE]);
    server.stop();
    check_image(&scratch, &disk.cache());
}

/// Reads all of a disk whose cache cannot have all of it.
fn check_full(disk: &Disk<'_>, content: &[u8], most: &str, why: &str) -> Server {
    let server = disk.command("vm1").args(["--cache-size", most]).start();
    disk.check("vm1", content);
    disk.check("vm1", content);
    let log = server.log();
    assert!(log.contains(why) && log.contains("nothing more is stored"), "{log}");
    server
}

#[test]
fn a_full_cache_lets_no_read_fail() {
    let web = Scratch::new();
    let nginx = Nginx::new(&web);
    let content = content_of(&nginx.image());
    let scratch = Scratch::new();
    let mut disk = Disk::new(&scratch, &nginx, "/disk.img");
    for _ in 0..2 {
        check_full(&disk, &content, "2M", "max-size is reached").stop();
        let cache = fs::metadata(disk.cache()).expect("the cache");
        assert!(cache.blocks() * 512 < 3 << 20, "{cache:?}");
        check_image(&scratch, &disk.cache());
    }

    disk.folder = scratch.path("small");
    let Some(_mounted) = Mounted::new(&disk.folder, "2m") else {
        return untested(Needs::Root, "only root can mount");
    };
    fs::remove_file(scratch.path("vm1.qcow2")).expect("the overlay");
    check_full(&disk, &content, "1G", "No space left on device").kill();
    fs::remove_file(scratch.path("vm1.sock")).expect("its socket");
    let server = check_full(&disk, &content, "1G", "No space left on device");
    server.stop();
    check_image(&scratch, &disk.cache());
}
