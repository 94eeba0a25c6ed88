//! Inactive nodes: no lock, and reads only.

use crate::common;

use std::path::Path;
use std::process::Command;

use block::options::*;
use block::request::Op;
use block::{Connections, NodeRegistry};
use common::*;
use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;

fn below(path: &Path) -> BlockdevRef {
    let file = BlockdevOptions { node_name: None, ..blockdev("", file(path, None)) };
    BlockdevRef::Inline(Box::new(file))
}

fn raw(path: &Path) -> Driver {
    Driver::from(RawOptions { file: below(path), offset: 0, size: None, keep_raw: false })
}

fn qcow2(path: &Path) -> Driver {
    Driver::from(Qcow2Options { file: below(path), ..Qcow2Options::default() })
}

fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output();
    let output = output.unwrap_or_else(|e| panic!("qemu-img: {e} (scripts/setup-tests.sh)"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Makes a qcow2 image over a raw file with 1 MiB of data.
fn overlay(name: &str) -> (TempFile, TempFile) {
    let base = TempFile::new(&disk(), &format!("{name}-base"), 1 << 20);
    let top = TempFile::new(&disk(), &format!("{name}.qcow2"), 0);
    let (base_path, top_path) = (base.0.to_str().unwrap(), top.0.to_str().unwrap());
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", base_path, top_path]);
    (base, top)
}

fn reads_only(node: std::sync::Arc<dyn block::node::BlockNode>) {
    let mut rig = Rig::new(node);
    assert_eq!(rig.read(4096, 8192, 0).unwrap(), pattern(1 << 20)[4096..12288]);
    assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::EPERM));
    assert_eq!(rig.op(Op::Discard, 0, 4096), Err(Errno::EPERM));
    rig.op(Op::Flush, 0, 0).unwrap();
}

#[test]
fn an_inactive_node_can_be_read() {
    let image = TempFile::new(&disk(), "inactive", 1 << 20);
    let (_base, top) = overlay("inactive");
    for (path, driver) in [(&image.0, raw(&image.0)), (&top.0, qcow2(&top.0))] {
        let inactive = BlockdevOptions { active: false, ..blockdev("disk", driver.clone()) };
        // Another process writes to the image, and has the image locked.
        let mut other = NodeRegistry::new();
        other.open(&blockdev("disk", driver)).unwrap();
        let node = NodeRegistry::new().open(&inactive).unwrap();
        assert!(!node.geometry().read_only, "{}", path.display());
        reads_only(node);
    }
}

/// Nodes that are defined inside an inactive node keep their names and users.
#[test]
fn nodes_inside_change_with_the_node() {
    let (_base, top) = overlay("inside");
    let file =
        BlockdevOptions { node_name: Some("inner".into()), ..blockdev("", file(&top.0, None)) };
    let mut driver = qcow2(&top.0);
    assert!(driver.set_child("file", BlockdevRef::Inline(Box::new(file))));
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let mut nodes = NodeRegistry::new();
    nodes.open(&BlockdevOptions { active: false, ..blockdev("disk", driver) }).unwrap();
    let listed = |nodes: &NodeRegistry| {
        let activity = |info: block::NodeInfo<'_>| (info.name.to_owned(), info.active);
        nodes.all().map(activity).filter(|(name, _)| !name.starts_with('#')).collect::<Vec<_>>()
    };
    let both = |active| [("disk".to_owned(), active), ("inner".to_owned(), active)];
    assert_eq!(listed(&nodes), both(false));
    let user = nodes.get("inner").unwrap();
    let control = event_loop.clone();
    let changed = event_loop.block_on(async move {
        for _ in 0..2 {
            nodes.activate("disk", Connections::default()).await.unwrap();
            assert_eq!(listed(&nodes), both(true));
            nodes.inactivate(&control, "disk").await.unwrap();
            assert_eq!(listed(&nodes), both(false));
        }
        nodes
    });
    let mut nodes = changed.unwrap();
    let mut rig = Rig::new(user.clone());
    assert_eq!(rig.read(0, 4, 0).unwrap(), b"QFI\xfb");
    assert_eq!(rig.write(1 << 20, &[1; 512], 0), Err(Errno::EPERM));
    drop(rig);
    // Another process has the image: the nodes stay as they are.
    let mut other = NodeRegistry::new();
    other.open(&blockdev("other", common::file(&top.0, None))).unwrap();
    let failed =
        async move { (nodes.activate("disk", Connections::default()).await.is_err(), nodes) };
    let (failed, mut nodes) = event_loop.block_on(failed).unwrap();
    assert!(failed);
    assert_eq!(listed(&nodes), both(false));
    drop(other);
    nodes.remove("inner").unwrap_err();
    drop(user);
    nodes.remove("disk").unwrap();
    assert_eq!(listed(&nodes), []);
}

#[test]
fn a_node_that_becomes_inactive_can_be_read_and_is_not_locked() {
    let image = TempFile::new(&disk(), "inactivated", 1 << 20);
    let (base, top) = overlay("inactivated");
    for driver in [raw(&image.0), qcow2(&top.0)] {
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let options = blockdev("disk", driver);
        let mut nodes = NodeRegistry::new();
        let node = nodes.open(&options).unwrap();
        let control = event_loop.clone();
        let inactivated = event_loop.block_on(async move {
            nodes.inactivate(&control, "disk").await.unwrap();
            nodes
        });
        let mut nodes = inactivated.unwrap();
        let mut other = NodeRegistry::new();
        other.open(&options).expect("nobody has locked it");
        drop(other);
        // The backing image is not locked either.
        NodeRegistry::new().open(&blockdev("base", raw(&base.0))).unwrap();
        reads_only(node.clone());
        let activated = async move {
            nodes.activate("disk", Connections::default()).await.map(|()| nodes).unwrap()
        };
        let _nodes = event_loop.block_on(activated).unwrap();
        Rig::new(node).write(0, &[1; 512], 0).unwrap();
    }
}
