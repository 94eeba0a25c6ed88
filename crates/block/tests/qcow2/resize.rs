//! Disks that get another size, also while they are used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use block::node::{BlockNode, ResizeError, Watcher};
use block::options::BlockdevOptions;
use event_loop::EventLoop;
use fastrand::Rng;

use crate::qcow2::image::{Folder, contents, judge, open, options, qemu_img};
use crate::qcow2::model::{KINDS, Model, SIZE, Worker, first_difference};

/// Within the last cluster, or not; into the next table, or not.
const SIZES: [usize; 5] =
    [SIZE + 512, (3 << 20) + 65536 + 512, 4 << 20, (5 << 20) + 1024, (9 << 20) + 512];
const LARGEST: usize = SIZES[4];
const LOOPS: usize = 3;

pub(crate) fn resize(node: &Arc<dyn BlockNode>, size: usize) -> Result<(), ResizeError> {
    let event_loop = EventLoop::new(event_loop::LoopConfig::default()).unwrap();
    event_loop.block_on(node.clone().resize(size as u64, &event_loop)).unwrap()
}

fn size(node: &Arc<dyn BlockNode>) -> usize {
    node.geometry().size as usize
}

/// Has several loops work on an image that grows meanwhile, and becomes smaller and larger afterwards.
/// `start`: what it has, less than all.
pub(crate) fn grows(folder: &Folder, options: &BlockdevOptions, start: &[u8], stripe: usize) {
    let node = open(options);
    let (watcher, mut changes) = Watcher::new();
    node.watch(watcher);
    let mut model: Model = start.iter().copied().map(Some).collect();
    model.resize(LARGEST, Some(0));
    let mut models = vec![model; LOOPS];
    let grown = AtomicBool::new(false);
    let (batch, batches) = mpsc::channel();
    std::thread::scope(|scope| {
        for (part, model) in models.iter_mut().enumerate() {
            let (node, grown, batch) = (node.clone(), &grown, batch.clone());
            let random = Rng::with_seed(stripe as u64 * 31 + part as u64 + 1);
            let mut worker = Worker { random, stripe, part, parts: LOOPS };
            // Until it has grown, and some more.
            let mut left = 10;
            let more = std::iter::from_fn(move || {
                // Nobody counts any more, at the end.
                let _ = batch.send(());
                left -= usize::from(grown.load(Ordering::Acquire));
                (left > 0).then_some(left)
            });
            scope.spawn(move || worker.run(node, model, more));
        }
        drop(batch);
        for size_now in SIZES {
            batches.iter().take(6).for_each(drop);
            assert_eq!(resize(&node, size_now), Ok(()));
            assert_eq!(size(&node), size_now);
        }
        grown.store(true, Ordering::Release);
    });
    let event_loop = EventLoop::new(event_loop::LoopConfig::default()).unwrap();
    assert_eq!(
        event_loop.block_on(async move { changes.next().await }).unwrap(),
        Some(()),
        "watchers are told"
    );
    let mut model: Model = (0..LARGEST).map(|at| models[at / stripe % LOOPS][at]).collect();
    let found = contents(&node);
    assert_eq!(first_difference(&model, &found), None, "grown");
    // What is cut off does not come back.
    for cut in [(2 << 20) + 1536, 1 << 20, 512] {
        assert_eq!(resize(&node, cut), Ok(()));
        model.truncate(cut);
        assert_eq!(first_difference(&model, &contents(&node)), None, "cut at {cut}");
        for larger in [cut + 512, cut + 300_032] {
            assert_eq!(resize(&node, larger), Ok(()));
            model.resize(larger, Some(0));
            assert_eq!(first_difference(&model, &contents(&node)), None, "{cut}, then {larger}");
        }
        let mut worker = Worker { random: Rng::with_seed(cut as u64), stripe, part: 0, parts: 1 };
        worker.run(node.clone(), &mut model, 0..20);
    }
    let found = contents(&node);
    assert_eq!(first_difference(&model, &found), None);
    drop(node);
    judge(folder, "disk.qcow2", &found);
    let info = qemu_img(folder, &["info", "disk.qcow2"]);
    assert!(info.contains(&format!(" ({} bytes)\n", model.len())), "{info}");
}

#[test]
fn under_load() {
    for (name, kind) in KINDS {
        let folder = Folder::new(&format!("resize-{name}"));
        for stripe in [4096, 65536] {
            let size = SIZE.to_string();
            qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-o", kind, "disk.qcow2", &size]);
            grows(&folder, &options(&folder.path("disk.qcow2")), &vec![0; SIZE], stripe);
        }
    }
}

/// The images behind are longer than the disk was, all or some of its later size.
#[test]
fn a_grown_disk_hides_its_backing_image() {
    let extended = "64k,extended_l2=on";
    for (behind, cluster) in [
        (20 << 20, "64k"),
        ((4 << 20) + 5120, "64k"),
        (20 << 20, "512"),
        (20 << 20, extended),
        ((4 << 20) + 5120, extended),
    ] {
        let folder = Folder::new(&format!("resize-behind-{behind}-{cluster}"));
        std::fs::write(folder.path("base.raw"), vec![5; behind]).unwrap();
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"];
        qemu_img(&folder, &[&create[..], &["middle.qcow2"]].concat());
        let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", "-o"];
        let (kind, size) = (format!("cluster_size={cluster}"), SIZE.to_string());
        qemu_img(&folder, &[&create[..], &[&kind, "disk.qcow2", &size]].concat());
        grows(&folder, &options(&folder.path("disk.qcow2")), &[5; SIZE], 8192);
    }
}

/// QEMU makes a disk larger without clearing what its last cluster has.
#[test]
fn what_is_cut_off_is_gone_from_the_file() {
    let plain = &["-o", "cluster_size=64k"][..];
    let extended = &["-o", "cluster_size=64k,extended_l2=on"][..];
    for kind in [plain, &["-o", "cluster_size=64k", "-c"], extended] {
        for cut in [(1 << 20) - 512, (1 << 20) - 32768 - 512] {
            let folder = Folder::new("resize-cut-off");
            std::fs::write(folder.path("all.raw"), vec![7; 1 << 20]).unwrap();
            let convert = ["convert", "-f", "raw", "-O", "qcow2"];
            qemu_img(&folder, &[&convert[..], kind, &["all.raw", "disk.qcow2"]].concat());
            let node = open(&options(&folder.path("disk.qcow2")));
            assert_eq!(resize(&node, cut), Ok(()));
            drop(node);
            qemu_img(&folder, &["resize", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
            let mut expected = vec![7; cut];
            expected.resize(1 << 20, 0);
            judge(&folder, "disk.qcow2", &expected);
        }
    }
}

/// The sentences are QEMU's.
#[test]
fn invalid_sizes_are_refused_without_a_change() {
    let folder = Folder::new("resize-refused");
    std::fs::write(folder.path("base.raw"), vec![5; 4 << 20]).unwrap();
    let refusal = |create: &[&str], snapshot: bool, read_only: bool, size: usize| {
        let create = [&["create", "-q", "-f", "qcow2"], create, &["disk.qcow2", "1M"]].concat();
        qemu_img(&folder, &create);
        if snapshot {
            qemu_img(&folder, &["snapshot", "-c", "before", "disk.qcow2"]);
        }
        let options = options(&folder.path("disk.qcow2"));
        let node = open(&BlockdevOptions { read_only, ..options });
        let refused = resize(&node, size).unwrap_err().to_string();
        assert_eq!(self::size(&node), 1 << 20);
        let found = contents(&node);
        drop(node);
        judge(&folder, "disk.qcow2", &found);
        refused
    };
    let v2 = ["-o", "compat=0.10"];
    let behind = [&v2[..], &["-F", "raw", "-b", "base.raw"]].concat();
    let zeroes = "Failed to zero out new clusters: Operation not supported";
    assert_eq!(refusal(&behind, false, false, 2 << 20), zeroes);
    let snapshots = "Can't resize a v2 image which has snapshots";
    assert_eq!(refusal(&v2, true, false, 2 << 20), snapshots);
    assert_eq!(refusal(&[], false, false, (2 << 20) + 1), "The new size must be a multiple of 512");
    assert_eq!(refusal(&[], false, true, 2 << 20), "Image is read-only");
    let tables = "Failed to grow the L1 table: File too large";
    assert_eq!(refusal(&["-o", "cluster_size=512"], false, false, 1 << 40), tables);
}
