//! Images whose metadata is found damaged while they are in use.

use std::fs;

use block::node::BlockNode;
use block::options::*;
use block::request::Op;
use block::{Damage, NodeRegistry};
use event_loop::{EventLoop, LoopConfig, mailbox};
use nix::errno::Errno;
use std::sync::Arc;

use crate::common::{Rig, pattern, tmpfs};
use crate::image::*;

fn number(bytes: &[u8], at: usize) -> usize {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize & 0x00ff_ffff_ffff_fe00
}

/// Makes an image with intact data at 0 and a misaligned L2 entry at 32 MiB.
fn damaged(folder: &Folder, name: &str) -> Vec<u8> {
    qemu_img(folder, &["create", "-q", "-f", "qcow2", name, "64M"]);
    qemu_io(folder, name, "write -P 7 0 64k");
    qemu_io(folder, name, "write -P 8 32M 64k");
    let path = folder.path(name);
    let mut image = fs::read(&path).unwrap();
    let l2 = number(&image, number(&image, 40));
    let entry = l2 + 8 * 512;
    assert_ne!(number(&image, entry), 0);
    image[entry + 6] |= 2;
    fs::write(&path, &image).unwrap();
    image
}

fn open_telling(options: &BlockdevOptions) -> (Arc<dyn BlockNode>, mailbox::Receiver<Damage>) {
    let journals = tmpfs().join("ringmill-test-journals");
    let mut nodes = NodeRegistry::new().with_journals(&journals).unwrap();
    let damages = nodes.damages();
    (nodes.open(options).unwrap(), damages)
}

/// Returns all reports. The registry, which has the sender, must be dropped.
fn told(mut damages: mailbox::Receiver<Damage>) -> Vec<Damage> {
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let all = async move {
        let mut all = Vec::new();
        while let Some(damage) = damages.receive().await {
            all.push(damage);
        }
        all
    };
    event_loop.block_on(all).unwrap()
}

#[test]
fn an_image_that_is_written_to_is_marked_and_fails_from_then_on() {
    let folder = Folder::new("damage");
    damaged(&folder, "disk.qcow2");
    let options = options(&folder.path("disk.qcow2"));
    let (node, damages) = open_telling(&options);
    let mut rig = Rig::new(node);
    assert_eq!(rig.read(32 << 20, 512, 0), Err(Errno::EIO));
    let header = fs::read(folder.path("disk.qcow2")).unwrap();
    assert_eq!(header[79] & 2, 2, "marked before the request is answered");
    for at in [0, 32 << 20, 48 << 20] {
        assert_eq!(rig.read(at, 512, 0), Err(Errno::EIO));
        assert_eq!(rig.write(at, &[1; 512], 0), Err(Errno::EIO));
    }
    assert_eq!(rig.op(Op::Flush, 0, 0), Err(Errno::EIO));
    drop(rig);
    let told = told(damages);
    let [Damage { node_name, is_fatal: true, .. }] = &*told else { panic!("{told:?}") };
    assert_eq!(node_name, "disk");
    let said = qemu_img(&folder, &["info", "disk.qcow2"]);
    assert!(said.contains("corrupt: true"), "{said}");
    let error = NodeRegistry::new().open(&options).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "qcow2: Image is corrupt; cannot be opened read/write");
    // As in QEMU, the image can be opened for reading.
    let options = BlockdevOptions { read_only: true, ..options };
    NodeRegistry::new().open(&options).unwrap();
}

/// Writes that completed before the damage was found are not lost.
#[test]
fn a_marked_image_has_all_answered_writes() {
    let folder = Folder::new("damage-kept");
    qemu_img(
        &folder,
        &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "disk.qcow2", "64M"],
    );
    qemu_io(&folder, "disk.qcow2", "write -P 8 32M 4k");
    let path = folder.path("disk.qcow2");
    let mut image = fs::read(&path).unwrap();
    // The L2 table for the part from 32 MiB on, which is the only L2 table.
    let l2 = number(&image, number(&image, 40) + 8 * 16);
    assert_ne!(l2, 0);
    image[l2 + 6] |= 2;
    fs::write(&path, &image).unwrap();
    let (node, damages) = open_telling(&options(&path));
    let mut rig = Rig::new(node);
    rig.write(0, &pattern(1 << 20), 0).unwrap();
    assert_eq!(rig.write(32 << 20, &[1; 512], 0), Err(Errno::EIO));
    drop(rig);
    assert_eq!(told(damages).len(), 1);
    assert_eq!(fs::read(&path).unwrap()[79] & 3, 2, "corrupt, and closed");
    let read_only = BlockdevOptions { read_only: true, ..options(&path) };
    let mut rig = Rig::new(open(&read_only));
    assert_eq!(rig.read(0, 1 << 20, 0).unwrap(), pattern(1 << 20));
}

#[test]
fn damage_of_a_read_only_image_is_reported_and_not_marked() {
    let folder = Folder::new("damage-read");
    let before = damaged(&folder, "disk.qcow2");
    let options = BlockdevOptions { read_only: true, ..options(&folder.path("disk.qcow2")) };
    let (node, damages) = open_telling(&options);
    let mut rig = Rig::new(node);
    for _ in 0..3 {
        assert_eq!(rig.read(32 << 20, 512, 0), Err(Errno::EIO));
    }
    rig.op(Op::Flush, 0, 0).unwrap();
    drop(rig);
    let told = told(damages);
    assert!(matches!(&*told, [Damage { is_fatal: false, .. }]), "{told:?}");
    assert!(fs::read(folder.path("disk.qcow2")).unwrap() == before);
}
