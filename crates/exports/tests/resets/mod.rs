//! Checks that nothing accesses guest memory after a reset (docs/decisions/0075-after-a-reset.md).
//!
//! A driver poisons all of its memory after each reset, with 64 requests in flight and all CPUs busy. It checks the
//! poison while the next requests are served. Poison must not reach the disk either.
//!
//! `RINGMILL_RESETS=10000` is the long form. A failure prints the seed; `RINGMILL_SEED=n` repeats the run, as far as
//! the scheduler allows.
#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;
mod guest;
mod held;
mod load;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::node::BlockNode;
use block::options::{
    Aio, Backing, BlockdevOptions, BlockdevRef, Cache, Discard, Driver, FileOptions, Locking,
    Qcow2Options,
};
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use common::{Daemon, Dir, Options, run_on};
use event_loop::RingChoice;
use exports::vhost_user::{Listen, VhostUserExport};
use fastrand::Rng;
use guest::{Guest, Reset};
use load::{DISK, Device};
use nix::unistd::geteuid;

/// The node behind the device, and its I/O method.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    device: Device,
    qcow2: bool,
    aio: Aio,
    ring: RingChoice,
    pin_memory: bool,
}

impl Case {
    fn new(name: &'static str, device: Device) -> Self {
        let (aio, ring) = (Aio::IoUring, RingChoice::default());
        Case { name, device, qcow2: false, aio, ring, pin_memory: false }
    }

    fn qcow2(self) -> Self {
        Case { qcow2: true, ..self }
    }

    fn node(&self, image: &Path, journals: &Path) -> Arc<dyn BlockNode> {
        let file =
            FileOptions { filename: image.to_owned(), aio: Some(self.aio), locking: Locking::Auto };
        let mut file = BlockdevOptions::new(Some("file"), Driver::file(file));
        // The thread pool uses the page cache, which is another path for data than direct I/O.
        file.cache = Cache { direct: self.aio != Aio::Threads, no_flush: false };
        file.discard = Discard::Unmap;
        let mut nodes = NodeRegistry::new().with_journals(journals).unwrap();
        if !self.qcow2 {
            std::fs::File::create(image).unwrap().set_len(DISK).unwrap();
            return nodes.open(&file).unwrap();
        }
        // Small clusters: zeroing frees clusters, and the next write allocates again.
        let create = CreateQcow2 { cluster_size: 4096, ..CreateQcow2::new(DISK) };
        create_qcow2(image, &create).unwrap();
        let qcow2 = Qcow2Options {
            file: BlockdevRef::Inline(Box::new(file)),
            backing: Backing::None,
            ..Qcow2Options::default()
        };
        let options = BlockdevOptions::new(Some("disk"), Driver::from(qcow2));
        nodes.open(&BlockdevOptions { discard: Discard::Unmap, ..options }).unwrap()
    }

    fn run(self) {
        let number = |name| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
        let resets = number("RINGMILL_RESETS").unwrap_or(60);
        let seed = number("RINGMILL_SEED").unwrap_or(resets);
        println!("RINGMILL_SEED={seed}");
        let image = Image::new(self.name);
        let (io_threads, ring) = (2, self.ring);
        let daemon = Daemon::with(Options { io_threads, ring, ..Options::default() });
        let dir = Dir::new();
        let node = self.node(&image.0, &image.0.with_extension("journals"));
        let mut config = daemon.config(Listen::Path(dir.socket()), 2);
        config.pin_memory = self.pin_memory;
        let export = match self.device {
            Device::Blk => daemon.start_with(config, node),
            Device::Scsi => run_on(&daemon.control, move |event_loop| {
                VhostUserExport::scsi(event_loop, config, vec![node])
            }),
        };
        let export = export.unwrap();
        let busy = Busy::begin();
        let mut random = Rng::with_seed(seed);
        let mut guest = Guest::new(dir.socket(), self.device);
        for _ in 0..resets {
            // Memory has to live for some time to be pinned.
            let reset = match self.pin_memory && random.u64(..8) > 0 {
                true => Reset::ALL[random.usize(..3)],
                false => Reset::ALL[random.usize(..Reset::ALL.len())],
            };
            // All requests, some, or none.
            let most = [0, 4, 64][random.usize(..3)];
            let served = random.usize(..=most);
            guest.round(&mut random, reset, served);
        }
        drop(busy);
        guest.check_disk();
        let Guest { interrupted, pinned, .. } = guest;
        println!(
            "{}: {resets} resets, {interrupted} requests in flight, {pinned} pinned",
            self.name
        );
        assert!(interrupted > resets, "few requests were in flight");
        // Users other than root may pin little.
        assert!(!self.pin_memory || pinned > 0 || !geteuid().is_root(), "nothing was pinned");
        drop(guest);
        run_on(&daemon.control, move |_| export.stop()).unwrap();
    }
}

/// An image file on a disk, and its journals. Dropping it removes the files.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let name = format!("resets-{}-{name}", std::process::id());
        Image(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_dir_all(self.0.with_extension("journals"));
    }
}

/// Keeps all CPUs busy until dropped.
struct Busy {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn begin() -> Self {
        let over = Arc::<AtomicBool>::default();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // Long enough to delay a thread at any place, and short enough for the test to make progress.
        const BURST: Duration = Duration::from_micros(500);
        let spin = |over: Arc<AtomicBool>| {
            while !over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                while begun.elapsed() < BURST {
                    std::hint::spin_loop();
                }
                std::thread::yield_now();
            }
        };
        let thread = |_| {
            let over = over.clone();
            std::thread::spawn(move || spin(over))
        };
        Busy { threads: (0..cpus).map(thread).collect(), over }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[test]
fn virtio_blk_on_a_raw_image() {
    Case::new("blk-raw", Device::Blk).run();
}

#[test]
fn virtio_blk_on_a_raw_image_by_linux_aio() {
    Case { aio: Aio::Native, ..Case::new("blk-native", Device::Blk) }.run();
}

#[test]
fn virtio_blk_on_a_raw_image_by_threads() {
    Case { aio: Aio::Threads, ..Case::new("blk-threads", Device::Blk) }.run();
}

#[test]
fn virtio_blk_on_a_raw_image_without_io_uring() {
    let (aio, ring) = (Aio::Threads, RingChoice::Epoll);
    Case { aio, ring, ..Case::new("blk-epoll", Device::Blk) }.run();
}

#[test]
fn virtio_blk_in_pinned_memory() {
    Case { pin_memory: true, ..Case::new("blk-pinned", Device::Blk) }.run();
}

#[test]
fn virtio_blk_on_a_qcow2_image() {
    Case::new("blk-qcow2", Device::Blk).qcow2().run();
}

#[test]
fn virtio_blk_on_a_qcow2_image_without_io_uring() {
    let (aio, ring) = (Aio::Threads, RingChoice::Epoll);
    Case { aio, ring, ..Case::new("blk-qcow2-epoll", Device::Blk) }.qcow2().run();
}

#[test]
fn virtio_scsi_on_a_raw_image() {
    Case::new("scsi-raw", Device::Scsi).run();
}

#[test]
fn virtio_scsi_on_a_raw_image_by_linux_aio() {
    Case { aio: Aio::Native, ..Case::new("scsi-native", Device::Scsi) }.run();
}

#[test]
fn virtio_scsi_on_a_raw_image_without_io_uring() {
    let (aio, ring) = (Aio::Threads, RingChoice::Epoll);
    Case { aio, ring, ..Case::new("scsi-epoll", Device::Scsi) }.run();
}

#[test]
fn virtio_scsi_in_pinned_memory() {
    Case { pin_memory: true, ..Case::new("scsi-pinned", Device::Scsi) }.run();
}

#[test]
fn virtio_scsi_on_a_qcow2_image() {
    Case::new("scsi-qcow2", Device::Scsi).qcow2().run();
}
