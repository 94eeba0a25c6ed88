//! Internal snapshots of images that several loops write to meanwhile.

use std::sync::Arc;
use std::sync::mpsc;

use block::node::{BlockNode, SnapshotChange, SnapshotError};
use event_loop::EventLoop;
use fastrand::Rng;
use nix::errno::Errno;

use crate::qcow2::image::{Folder, check, contents, judge, open, options, qemu_img, qemu_io};
use crate::qcow2::model::{KINDS, Model, SIZE, Worker, first_difference};

const LOOPS: usize = 3;
const STRIPE: usize = 4096;

fn change(node: &Arc<dyn BlockNode>, change: SnapshotChange) -> Result<(), SnapshotError> {
    let event_loop = EventLoop::new(event_loop::LoopConfig::default()).unwrap();
    event_loop.block_on(node.clone().change_snapshots(change, &event_loop)).unwrap()
}

fn make(node: &Arc<dyn BlockNode>, name: &str) -> Result<(), SnapshotError> {
    change(node, SnapshotChange::Make(name.to_owned()))
}

fn delete(node: &Arc<dyn BlockNode>, name: &str) -> Result<(), SnapshotError> {
    let all = node.snapshots().unwrap();
    let id = &all.iter().find(|snapshot| snapshot.name == name).unwrap().id;
    change(node, SnapshotChange::Delete(id.clone()))
}

/// What QEMU finds in a snapshot.
fn in_snapshot(folder: &Folder, name: &str) -> Vec<u8> {
    let convert = ["convert", "-f", "qcow2", "-O", "raw", "-l", name, "disk.qcow2", "then.raw"];
    qemu_img(folder, &convert);
    std::fs::read(folder.path("then.raw")).unwrap()
}

/// Has loops write to an image, each to stripes of its own.
struct Workers {
    node: Arc<dyn BlockNode>,
    models: Vec<Model>,
    random: Rng,
}

impl Workers {
    fn new(node: Arc<dyn BlockNode>, start: &[u8]) -> Workers {
        let model: Model = start.iter().copied().map(Some).collect();
        Workers { node, models: vec![model; LOOPS], random: Rng::with_seed(7) }
    }

    /// Writes, and calls `meanwhile` when all of them do.
    fn write(&mut self, rounds: usize, meanwhile: impl FnOnce(&Arc<dyn BlockNode>)) {
        let (batch, batches) = mpsc::channel();
        let Workers { node, models, random } = self;
        std::thread::scope(|scope| {
            for (part, model) in models.iter_mut().enumerate() {
                let (node, batch, random) = (node.clone(), batch.clone(), random.fork());
                let mut worker = Worker { random, stripe: STRIPE, part, parts: LOOPS };
                let more = (0..rounds).inspect(move |_| _ = batch.send(()));
                scope.spawn(move || worker.run(node, model, more));
            }
            drop(batch);
            batches.iter().take(LOOPS * 2).for_each(drop);
            meanwhile(node);
        });
    }

    fn model(&self) -> Model {
        (0..self.models[0].len()).map(|at| self.models[at / STRIPE % LOOPS][at]).collect()
    }
}

/// Before, during and after each change of the snapshots loops write. What they write later is not in a snapshot.
#[test]
fn under_load() {
    for (name, kind) in KINDS {
        let folder = Folder::new(&format!("snapshots-{name}"));
        let size = SIZE.to_string();
        // One bit cannot count a snapshot.
        let kind = &kind.replace("refcount_bits=1", "refcount_bits=4");
        qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-o", kind, "disk.qcow2", &size]);
        let node = open(&options(&folder.path("disk.qcow2")));
        let mut workers = Workers::new(node.clone(), &vec![0; SIZE]);
        let mut expected = Vec::new();
        for round in 0..4 {
            workers.write(3, |_| ());
            // No request is in flight: the snapshot is what the model has.
            let quiet = format!("quiet{round}");
            make(&node, &quiet).unwrap();
            expected.push((quiet, workers.model()));
            workers.write(4, |node| make(node, &format!("busy{round}")).unwrap());
            if round % 2 == 1 {
                workers.write(4, |node| delete(node, &format!("busy{}", round - 1)).unwrap());
                let (gone, _) = expected.remove(0);
                workers.write(4, |node| delete(node, &gone).unwrap());
            }
            assert_eq!(first_difference(&workers.model(), &contents(&node)), None, "{name}");
        }
        let found = contents(&node);
        drop((workers.node, node));
        judge(&folder, "disk.qcow2", &found);
        for (snapshot, model) in &expected {
            let then = in_snapshot(&folder, snapshot);
            assert_eq!(first_difference(model, &then), None, "{name}, {snapshot}");
        }
        // Two each of those made at rest, and those made under load.
        assert_eq!(qemu_img(&folder, &["snapshot", "-l", "disk.qcow2"]).lines().count(), 2 + 4);
        // Opened anew, it goes on, and QEMU deletes what was made here.
        let node = open(&options(&folder.path("disk.qcow2")));
        assert_eq!(node.snapshots().unwrap().len(), 4);
        for snapshot in node.snapshots().unwrap().into_iter().take(2) {
            delete(&node, &snapshot.name).unwrap();
        }
        assert_eq!(contents(&node), found);
        drop(node);
        judge(&folder, "disk.qcow2", &found);
        let (last, model) = expected.last().unwrap();
        let then = in_snapshot(&folder, last);
        assert_eq!(first_difference(model, &then), None, "{name}, {last}");
        qemu_img(&folder, &["snapshot", "-d", last, "disk.qcow2"]);
        judge(&folder, "disk.qcow2", &found);
    }
}

/// Snapshots of QEMU are deleted here, those from here are gone back to by QEMU, and both exist side by side.
#[test]
fn snapshots_are_those_of_qemu() {
    let folder = Folder::new("snapshots-qemu");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
    qemu_io(&folder, "disk.qcow2", "write -P 1 0 3M");
    qemu_img(&folder, &["snapshot", "-c", "theirs", "disk.qcow2"]);
    qemu_io(&folder, "disk.qcow2", "write -P 2 1M 1M");
    let node = open(&options(&folder.path("disk.qcow2")));
    make(&node, "ours").unwrap();
    let now = contents(&node);
    drop(node);
    judge(&folder, "disk.qcow2", &now);
    qemu_io(&folder, "disk.qcow2", "write -P 3 2M 4M");
    assert_eq!(in_snapshot(&folder, "ours"), now);
    let theirs = in_snapshot(&folder, "theirs");
    assert!(theirs[..3 << 20].iter().all(|byte| *byte == 1));
    let node = open(&options(&folder.path("disk.qcow2")));
    let told = node.snapshots().unwrap();
    let names: Vec<_> = told.iter().map(|one| (&*one.id, &*one.name)).collect();
    assert_eq!(names, [("1", "theirs"), ("2", "ours")]);
    delete(&node, "theirs").unwrap();
    drop(node);
    check(&folder, "disk.qcow2");
    assert_eq!(in_snapshot(&folder, "ours"), now);
    qemu_img(&folder, &["snapshot", "-a", "ours", "disk.qcow2"]);
    let node = open(&options(&folder.path("disk.qcow2")));
    assert_eq!(contents(&node), now);
    delete(&node, "ours").unwrap();
    drop(node);
    judge(&folder, "disk.qcow2", &now);
    let list = qemu_img(&folder, &["snapshot", "-l", "disk.qcow2"]);
    assert!(!list.contains("ours"), "{list}");
}

/// A count of one bit cannot count a second user.
#[test]
fn an_image_that_cannot_count_the_snapshot_stays_as_it_is() {
    let folder = Folder::new("snapshots-one-bit");
    let create = ["create", "-q", "-f", "qcow2", "-o", "refcount_bits=1", "disk.qcow2", "8M"];
    qemu_img(&folder, &create);
    qemu_io(&folder, "disk.qcow2", "write -P 1 0 3M");
    let node = open(&options(&folder.path("disk.qcow2")));
    assert_eq!(make(&node, "one"), Err(SnapshotError::Os(Errno::EINVAL)));
    let now = contents(&node);
    drop(node);
    judge(&folder, "disk.qcow2", &now);
    let read_only = open(&block::options::BlockdevOptions {
        read_only: true,
        ..options(&folder.path("disk.qcow2"))
    });
    assert_eq!(make(&read_only, "one"), Err(SnapshotError::Os(Errno::EROFS)));
}
