//! Internal snapshots of the image that a guest uses.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use block::node::{BlockNode, SnapshotChange, SnapshotError};
use block::options::*;
use block::request::Op;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::ring::sim::{Faults, Sim, Verdict};
use event_loop::{EventLoop, LoopConfig, oneshot};
use fastrand::Rng;
use nix::errno::Errno;

use crate::common::{Rig, TempFile, blockdev, file_options, filled, tmpfs};
use crate::power::oracle::{Found, Image};
use crate::power::path_of;

/// The contents of the snapshots that an image has to have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshots {
    now: Vec<Vec<u8>>,
    /// Those that it may have instead: a change is under way, or has failed.
    after: Option<Vec<Vec<u8>>>,
}

impl Snapshots {
    pub(crate) fn new(found: &[Vec<u8>]) -> Snapshots {
        Snapshots { now: found.to_vec(), after: None }
    }

    /// Checks those of an image that was left.
    pub(crate) fn check(&self, found: &[Vec<u8>]) -> Result<(), String> {
        if self.now == found || self.after.as_deref() == Some(found) {
            return Ok(());
        }
        let wrong = self.now.iter().zip(found).position(|(one, other)| one != other);
        let (now, found) = (self.now.len(), found.len());
        let after = self.after.as_ref().map(Vec::len);
        Err(format!("{found} snapshots, not {now} or {after:?}; the first wrong one: {wrong:?}"))
    }

    /// Removes the mark of damage from an image: a change that was cut short leaves one.
    pub(crate) fn unmark(&self, image: &mut [u8]) {
        if self.after.is_some() {
            unmark(image);
        }
    }

    /// Begins to make a snapshot of a disk with these contents, or to delete one. `None`: no other change can begin.
    pub(crate) fn begin(
        &mut self,
        node: &Arc<dyn BlockNode>,
        event_loop: &EventLoop,
        contents: &[u8],
        random: &mut Rng,
    ) -> Option<Changing> {
        if self.after.is_some() {
            return None;
        }
        let mut after = self.now.clone();
        let change = match after.len() {
            len @ 1.. if random.usize(..4) < len => {
                let at = random.usize(..len);
                after.remove(at);
                SnapshotChange::Delete(node.snapshots()?[at].id.clone())
            }
            _ => {
                after.push(contents.to_vec());
                SnapshotChange::Make(format!("s{}", random.u16(..)))
            }
        };
        self.after = Some(after);
        let (done, result) = oneshot::channel();
        let changed = node.clone().change_snapshots(change, event_loop);
        event_loop.spawn(async move { done.send(changed.await) });
        Some(Changing(result))
    }
}

/// Removes the mark of damage from an image of version 3.
fn unmark(image: &mut [u8]) {
    if image[7] == 3 {
        image[79] &= !2;
    }
}

/// A change that is under way.
pub(crate) struct Changing(oneshot::Receiver<Result<(), SnapshotError>>);

impl Changing {
    /// Whether it has succeeded. `None`: it is under way.
    pub(crate) fn is_over(&mut self, snapshots: &mut Snapshots) -> Option<bool> {
        match Pin::new(&mut self.0).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => None,
            Poll::Ready(Ok(Ok(()))) => {
                snapshots.now = snapshots.after.take().unwrap_or_default();
                Some(true)
            }
            // After a failed write to the header, the image may have either.
            Poll::Ready(_) => Some(false),
        }
    }
}

const CLUSTER: usize = 4096;
/// The first half has data.
const SIZE: usize = 16 * CLUSTER;
const NONE: [usize; 2] = [usize::MAX; 2];

/// The simulated file of an image in use.
struct Life {
    sim: Sim,
    fd: Arc<OwnedFd>,
    node: Arc<dyn BlockNode>,
    rig: Rig,
}

impl Life {
    fn begin(image: &[u8]) -> Life {
        let sim = Sim::new(1, Faults::default());
        let fd = sim.file(image).unwrap();
        let file = FileOptions { locking: Locking::Off, ..file_options(&path_of(&fd), None) };
        let driver = Driver::from(Qcow2Options {
            file: BlockdevRef::Inline(Box::new(blockdev("file", Driver::file(file)))),
            backing: Backing::None,
            ..Qcow2Options::default()
        });
        let node = NodeRegistry::new().open(&blockdev("disk", driver)).unwrap();
        let rig = Rig::on(sim.event_loop(LoopConfig::default()).unwrap(), node.clone());
        Life { sim, fd, node, rig }
    }

    /// Closes the image. Returns the file.
    fn close(self) -> Vec<u8> {
        drop((self.rig, self.node));
        std::fs::read(path_of(&self.fd)).unwrap()
    }
}

/// Checks an image, which may be marked as corrupt.
fn found(image: &[u8]) -> Found {
    let mut image = image.to_vec();
    unmark(&mut image);
    Image::read_all(&image, &[], None).unwrap()
}

/// An image without a snapshot.
fn image() -> Vec<u8> {
    let file = TempFile::new(&tmpfs(), "power-snapshots", 0);
    let create = CreateQcow2 { cluster_size: CLUSTER as u32, ..CreateQcow2::new(SIZE as u64) };
    create_qcow2(&file.0, &create).unwrap();
    let mut life = Life::begin(&file.contents());
    life.rig.write(0, &[1; SIZE / 2], 0).unwrap();
    life.close()
}

/// The result of a change with failing operations.
struct Failed {
    image: Vec<u8>,
    changed: Result<(), SnapshotError>,
    /// The image takes no more requests.
    is_cut_off: bool,
}

/// Makes a snapshot, or deletes the only one. Writes of `byte` wait for that. The operations with these numbers fail.
fn change(image: &[u8], failing: [usize; 2], byte: u8) -> Failed {
    let before = found(image);
    let mut life = Life::begin(image);
    let mut count = 0;
    life.sim.script(move |_| {
        count += 1;
        match failing.contains(&(count - 1)) {
            true => Verdict::Fail(Errno::EIO as i32),
            false => Verdict::Good,
        }
    });
    let mut after = before.snapshots.clone();
    let change = match after.pop() {
        Some(_) => SnapshotChange::Delete(life.node.snapshots().unwrap()[0].id.clone()),
        None => {
            after.push(before.contents.clone());
            SnapshotChange::Make("s".to_owned())
        }
    };
    let (done, result) = oneshot::channel();
    let event_loop = life.rig.event_loop.clone();
    let changing = life.node.clone().change_snapshots(change, &event_loop);
    event_loop.spawn(async move { done.send(changing.await) });
    // The change claims the disk.
    event_loop.run_once(false).unwrap();
    let mut write = |at: usize| {
        let bufs = filled(&[byte; CLUSTER], 0);
        let op = Op::Write { fua: false };
        (at, life.rig.submit(op, at as u64, CLUSTER as u64, bufs))
    };
    let tags: Vec<_> = (0..SIZE).step_by(2 * CLUSTER).map(&mut write).collect();
    let changed = event_loop.block_on(result).unwrap().unwrap();
    let results: Vec<_> = tags.into_iter().map(|(at, tag)| (at, life.rig.wait(tag).0)).collect();
    let is_cut_off = life.rig.read(0, 512, 0).is_err();
    let check = |image: &[u8]| {
        let found = found(image);
        assert!(found.snapshots == before.snapshots || found.snapshots == after, "{failing:?}");
        let old = before.contents.chunks(CLUSTER);
        for ((at, new), old) in (0..).step_by(CLUSTER).zip(found.contents.chunks(CLUSTER)).zip(old)
        {
            let result =
                results.iter().find(|(written, _)| *written == at).map(|(_, result)| result);
            let is_new = new.iter().all(|here| *here == byte);
            match result {
                Some(Ok(())) => assert!(is_new, "{failing:?}, {at}"),
                Some(Err(_)) if !is_cut_off && is_new => {}
                _ => assert!(new == old, "{failing:?}, {at}"),
            }
        }
    };
    if is_cut_off {
        assert!(results.iter().all(|(_, result)| *result == Err(Errno::EIO)), "{results:?}");
        let header = std::fs::read(path_of(&life.fd)).unwrap();
        // The other failure may meet the mark itself.
        let is_marked = header[79] & 2 != 0;
        assert!(is_marked || failing[1] - failing[0] > 1, "{failing:?}: marked as corrupt");
    }
    check(&std::fs::read(path_of(&life.fd)).unwrap());
    let image = life.close();
    check(&image);
    Failed { image, changed, is_cut_off }
}

/// After a change that was cut short, the tables in memory may not be those of the file: a waiting request must not use
/// them.
#[test]
fn requests_that_wait_for_a_change_that_fails() {
    let without = image();
    let Failed { image: with, changed, .. } = change(&without, NONE, 2);
    assert_eq!(changed, Ok(()));
    for image in [without, with] {
        let mut cut_off = 0;
        for gap in [1, 2] {
            let fail = |first: usize| change(&image, [first, first + gap], 3);
            let failed = (0..).map(fail).take_while(|failed| failed.changed.is_err());
            let failed: Vec<bool> = failed.map(|failed| failed.is_cut_off).collect();
            assert!(failed.len() > 8, "{} operations make no change", failed.len());
            cut_off += failed.into_iter().filter(|is_cut_off| *is_cut_off).count();
        }
        // Writing the header and flushing it, and both once more.
        assert!(cut_off >= 3, "cut off {cut_off} times");
    }
}
