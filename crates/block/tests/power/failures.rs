//! Partial writes of metadata after a failed operation: the image stays consistent afterwards, after a power cut and
//! after a kill, and has all answered writes.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use block::options::*;
use block::request::Op;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::ring::sim::{Faults, Sim, Verdict};
use event_loop::{IoBufs, LoopConfig};

use crate::common::{Rig, TempFile, blockdev, file_options, filled, tmpfs};
use crate::power::journal::Folder;
use crate::power::oracle::Image;
use crate::power::path_of;

/// No operation fails.
const NONE: usize = usize::MAX;

/// An image that is tried. One block of reference counts has as many clusters as an L2 table, and the first of
/// each is full soon after `before`: both need another.
struct Case {
    cluster: u32,
    /// Bytes of the disk. The first `before` of them are written before the failure.
    size: usize,
    before: usize,
    journals: bool,
    /// After a failure, every operation with a multiple of this number fails too.
    step: usize,
}

const SMALL: Case =
    Case { cluster: 512, size: 100 * 512, before: 48 * 512, journals: false, step: 2 };
const WITH_JOURNAL: Case =
    Case { cluster: 4096, size: 524 * 4096, before: 500 * 4096, journals: true, step: 13 };

impl Case {
    /// With `before` written.
    fn image(&self) -> Vec<u8> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("power-failures-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let file = TempFile::new(&tmpfs(), &name, 0);
        let empty = CreateQcow2::new(self.size as u64);
        let create = CreateQcow2 { cluster_size: self.cluster, refcount_bits: 64, ..empty };
        create_qcow2(&file.0, &create).unwrap();
        let mut life = Life::begin(self, &file.contents(), false);
        let written = self.before..self.before;
        (life.kept, life.flushed) = (0, 0);
        life.make(&[(WRITE, 0..self.before), (Op::Flush, written)], NONE);
        let Life { fd, rig, journals, .. } = life;
        drop(rig);
        let image = std::fs::read(path_of(&fd)).unwrap();
        drop(journals);
        image
    }
}

const WRITE: Op = Op::Write { fua: false };

struct Life<'a> {
    case: &'a Case,
    sim: Sim,
    fd: Arc<OwnedFd>,
    rig: Rig,
    journals: Option<Folder>,
    /// Bytes whose write was answered, and flushed.
    kept: usize,
    flushed: usize,
}

impl Life<'_> {
    fn begin<'a>(case: &'a Case, image: &[u8], direct: bool) -> Life<'a> {
        let sim = Sim::new(1, Faults::default());
        let fd = sim.file(image).unwrap();
        let file = FileOptions { locking: Locking::Off, ..file_options(&path_of(&fd), None) };
        let mut file =
            BlockdevOptions { discard: Discard::Unmap, ..blockdev("file", Driver::file(file)) };
        file.cache.direct = direct;
        let driver = Driver::from(Qcow2Options {
            file: BlockdevRef::Inline(Box::new(file)),
            backing: Backing::None,
            pass_discard_request: Some(false),
            ..Qcow2Options::default()
        });
        let options = BlockdevOptions { discard: Discard::Unmap, ..blockdev("disk", driver) };
        let journals = case.journals.then(Folder::new);
        let mut registry = journals.as_ref().map_or_else(NodeRegistry::new, Folder::registry);
        let node = registry.open(&options).unwrap();
        let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
        let rig = Rig::on(event_loop, node);
        Life { case, sim, fd, rig, journals, kept: case.before, flushed: case.before }
    }

    /// Makes requests, of which one operation fails. Returns the number of operations.
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
            if *op == Op::Discard {
                (self.kept, self.flushed) = (self.case.before, self.case.before);
            }
            let tag = self.rig.submit(*op, range.start as u64, range.len() as u64, bufs);
            let (result, _) = self.rig.wait(tag);
            match op {
                Op::Write { .. } if result.is_ok() => self.kept = range.end,
                Op::Flush if result.is_ok() && failing == NONE => self.flushed = self.kept,
                _ => {}
            }
        }
        self.check(failing as u64);
        count.get()
    }

    /// Checks that the image is consistent and has all flushed or answered writes.
    fn check(&self, seed: u64) {
        let cut = self.sim.cut(&self.fd, seed).unwrap();
        let mut killed = std::fs::read(path_of(&self.fd)).unwrap();
        self.check_image(&cut, self.flushed);
        self.check_image(&killed, self.flushed);
        if let Some(journals) = &self.journals {
            journals.replay(&mut killed).unwrap();
        }
        self.check_image(&killed, self.kept);
    }

    fn check_image(&self, image: &[u8], written: usize) {
        let disk = Image::read(image, &[]).unwrap();
        let lost = disk[..written].iter().position(|byte| *byte != 1);
        assert!(lost.is_none(), "byte {lost:?} of {written}");
    }
}

/// Writes and then discards, with one failure each. Returns the numbers of operations.
fn course(case: &Case, image: &[u8], direct: bool, failing: [usize; 2]) -> [usize; 2] {
    let Case { size, before, .. } = *case;
    let mut life = Life::begin(case, image, direct);
    let first = life.make(&[(WRITE, before..size), (Op::Flush, 0..0)], failing[0]);
    let second = life.make(&[(Op::Discard, before..size), (Op::Flush, 0..0)], failing[1]);
    life.make(&[(Op::Flush, 0..0)], NONE);
    [first, second]
}

fn whatever_operation_fails(case: &Case) {
    let image = case.image();
    for direct in [false, true] {
        let mut first = 0;
        while first < course(case, &image, direct, [first, NONE])[0] {
            let mut second = first % case.step;
            while second < course(case, &image, direct, [first, second])[1] {
                second += case.step;
            }
            first += 1;
        }
        assert!(first > 8, "{first} operations write no metadata");
    }
}

#[test]
fn the_image_is_consistent_after_any_failed_operation() {
    whatever_operation_fails(&SMALL);
}

#[test]
fn image_and_journal_are_consistent_after_any_failed_operation() {
    whatever_operation_fails(&WITH_JOURNAL);
}

/// The metadata that the write depends on may be in the file and not on stable storage, without a copy in memory.
#[test]
fn a_durable_write_covers_unflushed_metadata_of_a_killed_process() {
    let (image, new) = (SMALL.image(), SMALL.before..SMALL.before + 512);
    for direct in [false, true] {
        let write = |life: &mut Life<'_>, fua, byte| {
            let bufs = filled(&vec![byte; new.len()], 0);
            let op = Op::Write { fua };
            let tag = life.rig.submit(op, new.start as u64, new.len() as u64, bufs);
            life.rig.wait(tag).0.unwrap();
        };
        let mut killed = Life::begin(&SMALL, &image, direct);
        write(&mut killed, false, 1);
        let unflushed = killed.sim.storage().unflushed(&killed.fd).unwrap();
        let left = std::fs::read(path_of(&killed.fd)).unwrap();
        let mut next = Life::begin(&SMALL, &left, direct);
        next.sim.storage().replace(&next.fd, &unflushed).unwrap();
        write(&mut next, true, 2);
        for seed in 0..100 {
            let cut = next.sim.cut(&next.fd, seed).unwrap();
            let disk = Image::read(&cut, &[]).unwrap();
            assert!(disk[new.clone()].iter().all(|byte| *byte == 2), "O_DIRECT: {direct}");
        }
    }
}
