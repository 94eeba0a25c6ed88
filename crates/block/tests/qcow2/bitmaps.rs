//! Images with persistent dirty bitmaps.

use std::fs;
use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::*;
use block::track::{DirtyBitmap, Storage, Tracking};
use event_loop::{EventLoop, LoopConfig};

use crate::common::Rig;
use crate::qcow2::image::*;

const MIB: u64 = 1 << 20;

/// A registry with the image, and what watches its writes.
fn tracked(options: &BlockdevOptions) -> (NodeRegistry, Arc<dyn BlockNode>, Arc<Tracking>) {
    let journals = crate::common::tmpfs().join("ringmill-test-journals");
    let mut nodes = NodeRegistry::new().with_journals(&journals).unwrap();
    let node = nodes.open(options).unwrap();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let nodes_and = async move {
        let tracking = nodes.track("disk").await.unwrap();
        (nodes, tracking)
    };
    let (nodes, tracking) = event_loop.block_on(nodes_and).unwrap();
    (nodes, node, tracking)
}

fn bytes(tracking: &Tracking, name: &str) -> u64 {
    tracking.bitmap(name).unwrap().bits().bytes()
}

/// What QEMU tells of the bitmaps: flags, names, granularities.
fn told(folder: &Folder) -> String {
    let told = qemu_img(folder, &["info", "-U", "disk.qcow2"]);
    let Some((_, bitmaps)) = told.split_once("bitmaps:") else { return String::new() };
    let bitmaps = bitmaps.split_once("refcount bits").unwrap().0;
    bitmaps.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn add(tracking: &Tracking, name: &str, size: u64, granularity: u64) {
    let bitmap = DirtyBitmap::new(name.into(), size, granularity, true, Storage::Image);
    tracking.add_bitmap(Arc::new(bitmap));
}

#[test]
fn bitmaps_are_in_use_while_an_image_is_open_and_stored_when_it_is_closed() {
    let folder = Folder::new("bitmaps");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
    qemu_img(&folder, &["bitmap", "--add", "disk.qcow2", "b0"]);
    qemu_io(&folder, "disk.qcow2", "write -P 7 0 64k");
    let path = folder.path("disk.qcow2");
    let before = fs::read(&path).unwrap();
    let read_only = BlockdevOptions { read_only: true, ..options(&path) };
    let (nodes, node, tracking) = tracked(&read_only);
    assert_eq!(bytes(&tracking, "b0"), 64 << 10);
    drop((nodes, node, tracking));
    assert!(fs::read(&path).unwrap() == before, "reading leaves them");
    for round in 1..4 {
        let (nodes, node, tracking) = tracked(&options(&path));
        assert_eq!(bytes(&tracking, "b0"), round * (64 << 10));
        assert!(told(&folder).contains("[0]: in-use [1]: auto name: b0"), "{}", told(&folder));
        let mut rig = Rig::new(node);
        rig.write(round * MIB, &[1; 512], 0).unwrap();
        drop((rig, nodes, tracking));
        assert_eq!(told(&folder), "[0]: flags: [0]: auto name: b0 granularity: 65536");
        check(&folder, "disk.qcow2");
    }
}

/// All cluster sizes and reference counts, several bitmaps, of which some go; what QEMU reads is what was
/// written.
#[test]
fn bitmaps_of_all_forms_of_images_are_read_by_qemu() {
    for form in ["cluster_size=512", "cluster_size=2M", "refcount_bits=1", "refcount_bits=64"] {
        let folder = Folder::new(&format!("bitmaps-{}", form.replace('=', "-")));
        qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-o", form, "disk.qcow2", "64M"]);
        let path = folder.path("disk.qcow2");
        let size = 64 * MIB;
        let (nodes, node, tracking) = tracked(&options(&path));
        for (name, granularity) in [("fine", 512), ("coarse", MIB), ("empty", 65536)] {
            add(&tracking, name, size, granularity);
        }
        tracking.bitmap("empty").unwrap().set_recording(false);
        let mut rig = Rig::new(node);
        // Of a bitmap with more than one cluster, and more than one table's where clusters are small.
        for at in (0..64).filter(|at| at % 3 != 1) {
            rig.write(at * MIB + 512 * at, &[at as u8; 512], 0).unwrap();
        }
        drop((rig, nodes, tracking));
        check(&folder, "disk.qcow2");
        let said = told(&folder);
        let all = ["name: fine", "name: coarse", "name: empty"];
        assert!(all.iter().all(|name| said.contains(name)), "{said}");
        // QEMU merges its own bitmap with ours, whose bits it has to read for that.
        let merge = ["bitmap", "--add", "--merge", "fine", "-g", "512", "disk.qcow2", "merged"];
        qemu_img(&folder, &merge);
        check(&folder, "disk.qcow2");
        let (nodes, node, tracking) = tracked(&options(&path));
        let written: Vec<_> = (0..64u64).filter(|at| at % 3 != 1).collect();
        for name in ["fine", "merged"] {
            assert_eq!(bytes(&tracking, name), written.len() as u64 * 512, "{name}");
            let bits = tracking.bitmap(name).unwrap();
            assert!(written.iter().all(|at| bits.bits().run(at * MIB + 512 * at, 512).0));
        }
        assert_eq!(bytes(&tracking, "coarse"), written.len() as u64 * MIB);
        assert_eq!(bytes(&tracking, "empty"), 0);
        assert!(!tracking.bitmap("empty").unwrap().is_recording());
        // Removed while in use: at once, and its clusters are free.
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let store = nodes.node("disk").unwrap().bitmap_store().unwrap();
        let forgotten = store.forget("fine", &event_loop);
        event_loop.block_on(forgotten).unwrap().unwrap();
        tracking.remove_bitmap("fine");
        assert!(!told(&folder).contains("name: fine"));
        drop((nodes, node, tracking));
        check(&folder, "disk.qcow2");
        for name in ["merged", "coarse", "empty"] {
            qemu_img(&folder, &["bitmap", "--remove", "disk.qcow2", name]);
        }
        check(&folder, "disk.qcow2");
        assert_eq!(told(&folder), "");
    }
}

#[test]
fn bitmaps_that_were_in_use_are_inconsistent_and_stay_so() {
    let folder = Folder::new("bitmaps-in-use");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
    qemu_img(&folder, &["bitmap", "--add", "disk.qcow2", "b0"]);
    let path = folder.path("disk.qcow2");
    let (nodes, node, tracking) = tracked(&options(&path));
    // As a kill leaves the file.
    let killed = fs::read(&path).unwrap();
    drop((nodes, node, tracking));
    fs::write(&path, killed).unwrap();
    for _ in 0..2 {
        let (nodes, node, tracking) = tracked(&options(&path));
        let bitmap = tracking.bitmap("b0").unwrap();
        assert_eq!((bitmap.storage(), bitmap.is_recording()), (Storage::Inconsistent, false));
        let mut rig = Rig::new(node);
        rig.write(0, &[1; 512], 0).unwrap();
        add(&tracking, "new", 8 * MIB, 65536);
        drop((rig, nodes));
        drop(tracking);
        assert!(told(&folder).contains("[0]: in-use [1]: auto name: b0"), "{}", told(&folder));
        check(&folder, "disk.qcow2");
        qemu_img(&folder, &["bitmap", "--remove", "disk.qcow2", "new"]);
    }
}

#[test]
fn a_program_that_does_not_know_bitmaps_makes_them_invalid() {
    let folder = Folder::new("bitmaps-stale");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
    qemu_img(&folder, &["bitmap", "--add", "disk.qcow2", "b0"]);
    let path = folder.path("disk.qcow2");
    let mut bytes = fs::read(&path).unwrap();
    bytes[95] = 0;
    fs::write(&path, bytes).unwrap();
    let (nodes, node, tracking) = tracked(&options(&path));
    assert!(tracking.bitmaps().is_empty());
    add(&tracking, "b0", 8 * MIB, 65536);
    drop((nodes, node, tracking));
    assert_eq!(told(&folder), "[0]: flags: [0]: auto name: b0 granularity: 65536");
}
