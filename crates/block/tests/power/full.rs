//! Operations of several steps on a store that becomes full at one of the steps: the image stays usable and loses
//! nothing.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::node::{BackingName, BlockNode, SnapshotChange};
use block::options::*;
use block::request::Op;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::LoopConfig;
use event_loop::ring::sim::{Faults, Sim, SimOp, Verdict};
use nix::errno::Errno;
use nix::libc;

use crate::common::{Rig, TempFile, blockdev, file_options, tmpfs};
use crate::power::journal::Folder;
use crate::power::oracle::{Found, Image};
use crate::power::path_of;

const SECTOR: u64 = 512;
/// More steps than any operation has.
const NEVER: usize = usize::MAX;

/// Which steps fail, from one on, until there is room again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fails {
    /// Those that need a block that the file does not have, as on most file systems.
    Allocations,
    /// The same, and one alone: another program frees the space at once.
    OneAllocation,
    /// All that write, as on a file system that copies blocks on writes.
    Writes,
}

/// A store of which an operation can take so much.
struct Store {
    fails: Fails,
    /// Sectors that have blocks.
    blocks: RefCell<BTreeSet<u64>>,
    /// Steps so far, and the first that fails.
    steps: Cell<usize>,
    failing: Cell<usize>,
}

impl Store {
    fn judge(&self, op: &SimOp) -> Verdict {
        let (offset, len, frees) = match *op {
            SimOp::Write { offset, len, .. } => (offset, len, false),
            SimOp::Fallocate { mode, offset, len } => {
                (offset, len, mode & libc::FALLOC_FL_PUNCH_HOLE != 0)
            }
            SimOp::Read { .. } | SimOp::Fsync => return Verdict::Good,
        };
        let sectors = offset / SECTOR..(offset + len).div_ceil(SECTOR);
        let blocks = &mut *self.blocks.borrow_mut();
        if frees {
            blocks.retain(|sector| !sectors.contains(sector));
            return Verdict::Good;
        }
        let is_new = sectors.clone().any(|sector| !blocks.contains(&sector));
        let is_step = is_new || self.fails == Fails::Writes;
        let step = self.steps.get();
        self.steps.set(step + usize::from(is_step));
        let has_failed = match self.fails {
            Fails::OneAllocation => step == self.failing.get(),
            Fails::Allocations | Fails::Writes => step >= self.failing.get(),
        };
        if is_step && has_failed {
            return Verdict::Fail(libc::ENOSPC);
        }
        blocks.extend(sectors);
        Verdict::Good
    }
}

/// What is done.
#[derive(Debug, Clone)]
enum Step {
    Write(std::ops::Range<usize>, u8),
    Discard(std::ops::Range<usize>),
    Resize(usize),
    MakeSnapshot,
    DeleteSnapshot,
    Name,
}

const UNMAP: block::options::Discard = block::options::Discard::Unmap;

use Step::{DeleteSnapshot, Discard, MakeSnapshot, Name, Resize, Write};

impl Step {
    /// What the disk has, and its snapshots, after the step.
    fn apply(&self, found: &mut Found) {
        let Found { contents, snapshots, .. } = found;
        match self {
            Write(range, byte) => contents[range.clone()].fill(*byte),
            Discard(range) => contents[range.clone()].fill(0),
            Resize(size) => contents.resize(*size, 0),
            MakeSnapshot => snapshots.push(contents.clone()),
            DeleteSnapshot => drop(snapshots.pop()),
            Name => {}
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    cluster: u32,
    size: usize,
    journals: bool,
    fails: Fails,
    /// By `qemu-img`, whose file ends with the last entry of the L1 table.
    by_qemu: bool,
}

struct Life {
    fd: Arc<OwnedFd>,
    node: Arc<dyn BlockNode>,
    rig: Rig,
    store: Rc<Store>,
    journals: Option<Folder>,
    /// The guest's disk and the snapshots.
    found: Found,
}

impl Life {
    fn begin(case: &Case) -> Life {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("power-full-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let file = TempFile::new(&tmpfs(), &name, 0);
        let empty = CreateQcow2::new(case.size as u64);
        // Blocks that count few clusters.
        let create = CreateQcow2 { cluster_size: case.cluster, refcount_bits: 64, ..empty };
        if case.by_qemu {
            let options = format!("cluster_size={},refcount_bits=64", case.cluster);
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-o", &options]).arg(&file.0);
            let created = create.arg(case.size.to_string()).status();
            assert!(created.expect("qemu-img (scripts/setup-tests.sh)").success());
            assert_ne!(file.contents().len() % case.cluster as usize, 0);
        } else {
            create_qcow2(&file.0, &create).unwrap();
        }
        Life::of(case, &file.contents(), case.journals.then(Folder::new))
    }

    fn of(case: &Case, image: &[u8], journals: Option<Folder>) -> Life {
        let sim = Sim::new(1, Faults::default());
        let fd = sim.file(image).unwrap();
        let file = FileOptions { locking: Locking::Off, ..file_options(&path_of(&fd), None) };
        let file = BlockdevOptions { discard: UNMAP, ..blockdev("file", Driver::file(file)) };
        let driver = Driver::from(Qcow2Options {
            file: BlockdevRef::Inline(Box::new(file)),
            backing: Backing::None,
            ..Qcow2Options::default()
        });
        let options = BlockdevOptions { discard: UNMAP, ..blockdev("disk", driver) };
        let mut registry = journals.as_ref().map_or_else(NodeRegistry::new, Folder::registry);
        let node = registry.open(&options).unwrap();
        let rig = Rig::on(sim.event_loop(LoopConfig::default()).unwrap(), node.clone());
        let store = Rc::new(Store {
            fails: case.fails,
            blocks: RefCell::new((0..(image.len() as u64).div_ceil(SECTOR)).collect()),
            steps: Cell::new(0),
            failing: Cell::new(NEVER),
        });
        let judge = store.clone();
        sim.script(move |op| judge.judge(op));
        let mut whole = std::fs::read(path_of(&fd)).unwrap();
        journals.iter().for_each(|journals| drop(journals.replay(&mut whole)));
        let found = Image::read_all(&whole, &[], None).unwrap();
        Life { fd, node, rig, store, journals, found }
    }

    fn carry_out(&mut self, step: &Step) -> Result<(), Errno> {
        let Life { rig, node, .. } = self;
        let node = node.clone();
        match step {
            Write(range, byte) => rig.write(range.start as u64, &vec![*byte; range.len()], 0),
            Discard(range) => rig.op(Op::Discard, range.start as u64, range.len() as u64),
            Resize(size) => {
                let resizing = node.resize(*size as u64, &rig.event_loop);
                let resized = rig.event_loop.block_on(resizing).unwrap();
                resized.map_err(|error| match error {
                    block::node::ResizeError::Os { errno, .. } => errno,
                    other => panic!("{other}"),
                })
            }
            MakeSnapshot | DeleteSnapshot => {
                let change = match step {
                    MakeSnapshot => SnapshotChange::Make("s".to_owned()),
                    _ => SnapshotChange::Delete(node.snapshots().unwrap()[0].id.clone()),
                };
                let changing = node.change_snapshots(change, &rig.event_loop);
                let changed = rig.event_loop.block_on(changing).unwrap();
                changed.map_err(|error| match error {
                    block::node::SnapshotError::Os(errno) => errno,
                    other => panic!("{other:?}"),
                })
            }
            Name => {
                let name = BackingName { filename: "b".repeat(200), format: None };
                let renaming =
                    node.child().unwrap_or(node).set_backing_name(Some(name), &rig.event_loop);
                rig.event_loop.block_on(renaming).unwrap()
            }
        }
    }

    /// Does what has to succeed.
    fn make(&mut self, step: &Step) {
        assert_eq!(self.carry_out(step), Ok(()), "{step:?}");
        step.apply(&mut self.found);
    }

    /// The file as a kill leaves it.
    fn killed(&self) -> Vec<u8> {
        let mut image = std::fs::read(path_of(&self.fd)).unwrap();
        let before = image.clone();
        if let Some(journals) = &self.journals {
            journals.replay(&mut image).unwrap();
        }
        let old = before.chunks(SECTOR as usize).map(Some).chain(std::iter::repeat(None));
        for ((number, new), old) in (0..).zip(image.chunks(SECTOR as usize)).zip(old) {
            let is_backed = || self.store.blocks.borrow().contains(&number);
            assert!(old == Some(new) || is_backed(), "the next start needs sector {number}");
        }
        image
    }

    fn read(&mut self) -> Vec<u8> {
        let size = self.node.geometry().size as usize;
        self.rig.read(0, size, 0).unwrap()
    }
}

/// Carries the steps out, of which the last one fails at that step of its own, and goes on. Returns whether it has failed.
fn fails(case: &Case, before: &[Step], step: &Step, failing: usize, last: bool) -> bool {
    let why = format!("{case:?}, {step:?} fails at {failing}");
    let mut life = Life::begin(case);
    before.iter().for_each(|step| life.make(step));
    let (old, found) = (life.found.contents.clone(), life.found.snapshots.clone());
    let steps = life.store.steps.get();
    life.store.failing.set(steps + failing);
    let result = life.carry_out(step);
    let has_failed = life.store.steps.get() > steps + failing;
    assert!(has_failed || result == Ok(()), "{why}: {result:?}");
    if let Err(errno) = result {
        assert_eq!(errno, Errno::ENOSPC, "{why}");
    }
    let mut after = Found {
        contents: old.clone(),
        snapshots: found.clone(),
        bitmaps: Vec::new(),
        compressed: 0,
    };
    step.apply(&mut after);
    let is_right = |now: &[u8], what: &str| {
        let (len, old_len) = (now.len(), old.len());
        assert!(len == after.contents.len() || len == old_len, "{why}: {what} has {len} bytes");
        for (at, sector) in (0..).step_by(SECTOR as usize).zip(now.chunks(SECTOR as usize)) {
            let is_one =
                |of: &[u8]| of.get(at..at + SECTOR as usize).is_none_or(|one| one == sector);
            assert!(is_one(&old) || is_one(&after.contents), "{why}: {what}: byte {at}");
        }
    };
    let is_left = |image: &[u8], what: &str| {
        let left = Image::read_all(image, &[], None);
        let left = left.unwrap_or_else(|error| panic!("{why}: {what}: {error}"));
        is_right(&left.contents, what);
        assert!(left.snapshots == found || left.snapshots == after.snapshots, "{why}: {what}");
    };
    is_right(&life.read(), "the disk");
    is_left(&life.killed(), "a kill");
    let flushed = life.rig.op(Op::Flush, 0, 0);
    if case.fails != Fails::Writes {
        assert_eq!(flushed, Ok(()), "{why}: what was answered is in the file");
        let here = life.read()[..SECTOR as usize].to_vec();
        let overwritten = life.rig.write(0, &here, 0);
        assert_eq!(overwritten, Ok(()), "{why}");
        assert_eq!(life.rig.op(Op::Flush, 0, 0), Ok(()), "{why}");
    }
    is_left(&life.killed(), "a kill later");
    // What a process of its own makes of it.
    let journals = life.journals.as_ref().map(Folder::left);
    let next = Life::of(case, &std::fs::read(path_of(&life.fd)).unwrap(), journals);
    is_right(&next.found.contents, "the next process");
    drop(next);
    life.store.failing.set(NEVER);
    assert_eq!(life.rig.op(Op::Flush, 0, 0), Ok(()), "{why}: with room");
    if result.is_err() {
        assert_eq!(life.carry_out(step), Ok(()), "{why}: with room");
    }
    assert!(life.read() == after.contents, "{why}: with room");
    assert_eq!(life.rig.op(Op::Flush, 0, 0), Ok(()), "{why}: with room");
    let Life { fd, node, rig, .. } = life;
    drop((rig, node));
    let image = std::fs::read(path_of(&fd)).unwrap();
    let left = Image::read_all(&image, &[], None).unwrap();
    assert!(left.contents == after.contents && left.snapshots == after.snapshots, "{why}: closed");
    if last || failing.is_multiple_of(7) {
        qemu_img_check(&image, &why);
    }
    has_failed
}

/// Leaks are allowed.
fn qemu_img_check(image: &[u8], why: &str) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("power-full-judged-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let file = TempFile::new(&tmpfs(), &name, 0);
    std::fs::write(&file.0, image).unwrap();
    let path = file.0.display().to_string();
    let image =
        r#"json:{"driver":"qcow2","backing":null,"file":{"driver":"file","filename":"FILE"}}"#;
    let image = image.replace("FILE", &path);
    let check = Command::new("qemu-img").args(["check", &image]).output();
    let check = check.expect("qemu-img (scripts/setup-tests.sh)");
    let said = String::from_utf8_lossy(&[check.stdout, check.stderr].concat()).into_owned();
    assert!(matches!(check.status.code(), Some(0 | 3)), "{why}: {said}");
}

/// Every operation with more than one step, at each of its steps.
fn all(cluster: u32, size: usize) {
    let data = size / 4..size / 4 + 24 * cluster as usize;
    let first = Write(0..8 * cluster as usize, 1);
    let second = Write(data.clone(), 2);
    let more = Write(0..8 * cluster as usize, 3);
    let operations = [
        (vec![first.clone()], second.clone()),
        (vec![first.clone(), second.clone()], Resize(size + 512)),
        (vec![first.clone(), second.clone()], Resize(3 * size)),
        (vec![first.clone(), second.clone()], Resize(data.start + 512)),
        (vec![first.clone(), second.clone()], MakeSnapshot),
        (vec![first.clone(), second.clone(), MakeSnapshot], more.clone()),
        (vec![first.clone(), second.clone(), MakeSnapshot], Discard(data.clone())),
        (vec![first.clone(), second.clone(), MakeSnapshot], Resize(size + 512)),
        (vec![first.clone(), second, MakeSnapshot, more], DeleteSnapshot),
        (vec![first], Name),
    ];
    each(cluster, size, false, &operations);
}

fn each(cluster: u32, size: usize, by_qemu: bool, operations: &[(Vec<Step>, Step)]) {
    for journals in [false, true] {
        for how in [Fails::Allocations, Fails::OneAllocation, Fails::Writes] {
            let case = Case { cluster, size, journals, fails: how, by_qemu };
            for (before, step) in operations {
                let mut failing = 0;
                while fails(&case, before, step, failing, false) {
                    failing += 1;
                }
                fails(&case, before, step, NEVER / 2, true);
            }
        }
    }
}

#[test]
fn a_store_that_is_full_at_any_step_with_small_clusters() {
    all(512, 256 << 10);
}

#[test]
fn a_store_that_is_full_at_any_step() {
    all(4096, 512 << 10);
}

#[test]
fn an_l1_table_grows_to_more_clusters_on_a_full_store() {
    let size = 2 << 20;
    let written = Write(0..8 * 512, 1);
    each(512, size, false, &[(vec![written], Resize(size + 512))]);
}

#[test]
fn an_l1_table_grows_where_it_is_on_a_full_store() {
    let written = Write(0..8 * 4096, 1);
    each(4096, 512 << 10, true, &[(vec![written], Resize(3 << 20))]);
}
