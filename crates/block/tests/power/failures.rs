//! Metadata that went to the file in part, as an operation has failed: whatever comes after that, the image is
//! whole, as the power leaves it and as a process does that is killed.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use block::options::*;
use block::request::Op;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::ring::sim::{Faults, Sim, Verdict};
use event_loop::{IoBufs, LoopConfig};

use crate::common::{Rig, TempFile, blockdev, file_options, filled, tmpfs};
use crate::oracle::Image;

/// Bytes of the disk, and of those what is written before anything fails. One block of reference counts
/// has the first 64 clusters of 512 bytes, which the rest begins in, as in the first L2 table: both
/// need another.
const SIZE: usize = 50 * 1024;
const BEFORE: usize = 24 * 1024;
/// The operation that fails: none.
const NONE: usize = usize::MAX;

fn empty_image() -> &'static [u8] {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let file = TempFile::new(&tmpfs(), "power-failures", 0);
        let empty = CreateQcow2::new(SIZE as u64);
        let create = CreateQcow2 { cluster_size: 512, refcount_bits: 64, ..empty };
        create_qcow2(&file.0, &create).unwrap();
        file.contents()
    })
}

struct Life {
    sim: Sim,
    fd: Arc<OwnedFd>,
    rig: Rig,
}

impl Life {
    fn begin(direct: bool) -> Life {
        let sim = Sim::new(1, Faults::default());
        let fd = sim.file(empty_image()).unwrap();
        let file = FileOptions { locking: Locking::Off, ..file_options(&path_of(&fd), None) };
        let mut file =
            BlockdevOptions { discard: Discard::Unmap, ..blockdev("file", Driver::File(file)) };
        file.cache.direct = direct;
        let driver = Driver::Qcow2(Qcow2Options {
            file: BlockdevRef::Inline(Box::new(file)),
            data_file: None,
            backing: Backing::None,
            pass_discard_request: Some(false),
            discard_no_unref: false,
        });
        let options = BlockdevOptions { discard: Discard::Unmap, ..blockdev("disk", driver) };
        let node = NodeRegistry::new().open(&options).unwrap();
        let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
        Life { sim, fd, rig: Rig::on(event_loop, node) }
    }

    /// Makes requests, whatever comes of them, and has one operation of theirs fail. How many there were.
    fn make(&mut self, requests: &[(Op, Range<usize>)], failing: usize) -> usize {
        let count = Rc::new(Cell::new(0));
        let counted = count.clone();
        self.sim.script(move |_| match counted.replace(counted.get() + 1) {
            n if n == failing => Verdict::Fail(nix::libc::EIO),
            _ => Verdict::Good,
        });
        for (op, range) in requests {
            let bufs = match op {
                Op::Write { .. } => filled(&vec![1; range.len()], 0),
                _ => IoBufs::new(),
            };
            let tag = self.rig.submit(*op, range.start as u64, range.len() as u64, bufs);
            let _ = self.rig.wait(tag);
        }
        self.check(failing as u64);
        count.get()
    }

    /// The image is whole, and has what was flushed before anything failed.
    fn check(&self, seed: u64) {
        let cut = self.sim.cut(&self.fd, seed).unwrap();
        let killed = std::fs::read(path_of(&self.fd)).unwrap();
        for image in [cut, killed] {
            let disk = Image::read(&image, &[]).unwrap();
            assert!(disk[..BEFORE].iter().all(|byte| *byte == 1));
        }
    }
}

fn path_of(fd: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

/// What was written, and is discarded, with a failure each. How many operations they were.
fn course(direct: bool, failing: [usize; 2]) -> [usize; 2] {
    const WRITE: Op = Op::Write { fua: false };
    let mut life = Life::begin(direct);
    life.make(&[(WRITE, 0..BEFORE), (Op::Flush, 0..0)], NONE);
    let first = life.make(&[(WRITE, BEFORE..SIZE), (Op::Flush, 0..0)], failing[0]);
    let second = life.make(&[(Op::Discard, BEFORE..SIZE), (Op::Flush, 0..0)], failing[1]);
    life.make(&[(Op::Flush, 0..0)], NONE);
    [first, second]
}

#[test]
fn whatever_operation_fails_the_image_is_whole() {
    for direct in [false, true] {
        let mut first = 0;
        while first < course(direct, [first, NONE])[0] {
            // Each second one, for the time.
            let mut second = first % 2;
            while second < course(direct, [first, second])[1] {
                second += 2;
            }
            first += 1;
        }
        assert!(first > 8, "{first} operations write no metadata");
    }
}
