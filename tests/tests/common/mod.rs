//! Disks under a load that checks what it reads, and jobs.
#![allow(unreachable_pub, reason = "modules of one program")]

pub mod footprint;
pub mod host_guest;
pub mod nginx;
pub mod peers;
pub mod replaced;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use fastrand::Rng;
use integration::{
    BlkClient, Image, Qmp, Scratch, Server, ServerCommand, daemon as program, eventually, pattern,
};
use serde_json::json;

/// Size of the disks.
pub const MIB: u64 = 16;
pub const BLOCKS: u64 = (MIB << 20) / pattern::BLOCK as u64;

pub fn daemon(scratch: &Scratch, image: &Image, options: &str) -> Server {
    ServerCommand::new(scratch)
        .monitor("qmp")
        .iothread("io0")
        .iothread("io1")
        .file("disk", image, options)
        .export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1")
        .start()
}

/// A daemon with the disk `disk0.img`, a client of its monitor, and a load on the disk.
pub fn under_load(scratch: &Scratch, seed: u64) -> (Image, Server, Qmp, Load) {
    let image = Image::filled(scratch, "disk0.img", MIB);
    let server = daemon(scratch, &image, "");
    let qmp = Qmp::connect(&server.socket("qmp"));
    let blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    (image, server, qmp, Load::start(blk, seed))
}

pub fn connect(server: &Server, queues: usize) -> BlkClient {
    BlkClient::connect(&server.socket("disk"), queues, 128).expect("the export serves")
}

/// `ringmill upgrade`.
pub fn upgrade(of: &Path) -> Output {
    Command::new(program()).arg("upgrade").arg(of).output().expect("ringmill can be run")
}

/// `ringmill upgrade` that is refused. Returns the message.
pub fn refused_upgrade(of: &Path) -> String {
    let refused = upgrade(of);
    assert!(!refused.status.success(), "{refused:?}");
    String::from_utf8_lossy(&refused.stderr).into_owned()
}

/// Upgrades a daemon under a load. A slow disk may hold requests for longer than an upgrade waits for them: such an upgrade is
/// given up, and repeated when the load has had an answer.
pub fn upgrade_under(server: &mut Server, load: &Load) {
    const SLOW: [&str; 2] =
        ["requests in flight have not ended within", "has a request that has taken"];
    server.upgrade_by(|server| {
        for _ in 0..100 {
            let written = load.written.load(Ordering::Relaxed);
            let done = upgrade(&server.socket("qmp"));
            if done.status.success() {
                return;
            }
            let why = String::from_utf8_lossy(&done.stderr);
            assert!(SLOW.iter().any(|slow| why.contains(slow)), "{done:?}");
            let is_answered = || load.written.load(Ordering::Relaxed) > written;
            eventually("an answer", || is_answered().then_some(()));
        }
        panic!("the disk was too slow each time:\n{}", server.log());
    });
}

pub fn add_file(qmp: &mut Qmp, node: &str, path: &Path) {
    qmp.execute(
        "blockdev-add",
        json!({"driver": "file", "node-name": node, "filename": path, "discard": "unmap"}),
    );
}

/// Makes a file by a job, and adds a node of it.
pub fn create(qmp: &mut Qmp, node: &str, path: &Path, size: u64) {
    let options = json!({"driver": "file", "filename": path, "size": size});
    qmp.execute("blockdev-create", json!({"job-id": "create", "options": options}));
    wait_for_status(qmp, "create", "concluded");
    assert_eq!(qmp.execute("query-jobs", json!({}))[0].get("error"), None);
    qmp.execute("job-dismiss", json!({"id": "create"}));
    add_file(qmp, node, path);
}

pub fn wait_for_status(qmp: &mut Qmp, id: &str, status: &str) {
    while qmp.wait_for("JOB_STATUS_CHANGE") != json!({"id": id, "status": status}) {}
}

/// Waits until a job has ended without an error.
pub fn wait_for_end(qmp: &mut Qmp, id: &str) {
    let data = qmp.wait_for("BLOCK_JOB_COMPLETED");
    assert_eq!((&data["device"], data.get("error")), (&json!(id), None), "{data}");
}

/// A client that writes, and checks what it reads, until stopped.
pub struct Load {
    stop: Arc<AtomicBool>,
    /// Number of blocks written, earlier loads included.
    pub written: Arc<AtomicU64>,
    /// Returns the blocks written, in order, earlier loads first. A block's generation is its index in the list plus one.
    thread: JoinHandle<Vec<u64>>,
}

impl Load {
    /// Starts a load on a disk of generation 0.
    pub fn start(blk: BlkClient, seed: u64) -> Load {
        Self::start_after(Vec::new(), blk, seed)
    }

    /// Starts a load on a disk after earlier loads. `log` is the result of [`Load::finish`] of the last one.
    pub fn start_after(mut log: Vec<u64>, mut blk: BlkClient, seed: u64) -> Load {
        let stop = Arc::<AtomicBool>::default();
        let written = Arc::new(AtomicU64::new(log.len() as u64));
        let (stopped, count) = (stop.clone(), written.clone());
        let thread = thread::spawn(move || {
            let (mut random, mut model) = (Rng::with_seed(seed), model(&log));
            while !stopped.load(Ordering::Relaxed) {
                let index = random.u64(..BLOCKS);
                let generation = log.len() as u64 + 1;
                blk.write(index * 8, &pattern::block(index, generation));
                log.push(index);
                model.insert(index, generation);
                count.store(generation, Ordering::Relaxed);
                let index = random.u64(..BLOCKS);
                let expected = model.get(&index).copied().unwrap_or(0);
                let found = pattern::generation(index, &blk.read(index * 8, pattern::BLOCK));
                assert_eq!(found, Ok(expected), "block {index}");
            }
            log
        });
        Load { stop, written, thread }
    }

    /// Waits until further blocks are written.
    pub fn go_on(&self) {
        let before = self.written.load(Ordering::Relaxed);
        eventually("writes", || {
            (self.written.load(Ordering::Relaxed) >= before + 50).then_some(())
        });
    }

    pub fn finish(self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("what was read is what was written")
    }
}

/// Returns the last generation of each block in `log`.
fn model(log: &[u64]) -> BTreeMap<u64, u64> {
    log.iter().copied().zip(1..).collect()
}

/// Checks that an image has the contents after the first `count` writes of `log`.
pub fn check(image: &Image, log: &[u64], count: usize) {
    let model = model(&log[..log.len().min(count)]);
    for index in 0..BLOCKS {
        let found =
            pattern::generation(index, &image.read(index * pattern::BLOCK as u64, pattern::BLOCK));
        let expected: u64 = model.get(&index).copied().unwrap_or(0);
        assert_eq!(found, Ok(expected), "block {index} of {}", image.path().display());
    }
}

/// Checks that an image has the contents of one moment, after a number of writes within `moment`.
pub fn check_moment(image: &Image, log: &[u64], moment: RangeInclusive<u64>) {
    let newest = (0..BLOCKS).map(|index| {
        let data = image.read(index * pattern::BLOCK as u64, pattern::BLOCK);
        pattern::generation(index, &data).expect("a whole block")
    });
    let newest = newest.max().unwrap_or(0);
    assert!(moment.contains(&newest), "as of write {newest}, not one of {moment:?}");
    check(image, log, newest as usize);
}
