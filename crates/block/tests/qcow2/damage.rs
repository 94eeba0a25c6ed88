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
use crate::qcow2::image::*;

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

/// As with QSD, the rest of the disk can be read. Such an image is not opened for writing.
#[test]
fn a_damaged_l1_entry_fails_reads_of_what_it_maps() {
    let folder = Folder::new("damage-l1");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "1G"]);
    qemu_io(&folder, "disk.qcow2", "write -P 7 0 64k");
    qemu_io(&folder, "disk.qcow2", "write -P 8 512M 64k");
    let path = folder.path("disk.qcow2");
    let mut before = fs::read(&path).unwrap();
    let second = number(&before, 40) + 8;
    before[second + 6] |= 2;
    fs::write(&path, &before).unwrap();
    let writable = options(&path);
    let (node, damages) = open_telling(&BlockdevOptions { read_only: true, ..options(&path) });
    let mut rig = Rig::new(node);
    assert_eq!(rig.read(0, 64 << 10, 0).unwrap(), vec![7; 64 << 10]);
    assert_eq!(rig.read(512 << 20, 512, 0), Err(Errno::EIO));
    assert_eq!(rig.read(1 << 20, 512, 0).unwrap(), vec![0; 512]);
    drop(rig);
    let told = told(damages);
    assert!(matches!(&*told, [Damage { is_fatal: false, .. }]), "{told:?}");
    let refused = NodeRegistry::new().open(&writable).err().unwrap().to_string();
    assert!(refused.contains("the offset is not that of a cluster"), "{refused}");
    assert!(fs::read(&path).unwrap() == before);
}

/// The places of metadata in an image with an internal snapshot.
struct Places {
    l1: usize,
    l2: usize,
    refcount_table: usize,
    refcount_block: usize,
    snapshots: usize,
    inactive_l1: usize,
}

/// One of them.
type Place = fn(&Places) -> usize;

/// A request, and how it ends.
type Send = fn(&mut Rig) -> Result<(), Errno>;

/// Makes an image with a snapshot and data at 0 and 32 MiB, and has `damage` change its bytes.
fn damaged_by(folder: &Folder, damage: impl FnOnce(&mut [u8], &Places)) -> Vec<u8> {
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
    qemu_io(folder, "disk.qcow2", "write -P 7 32M 64k");
    qemu_img(folder, &["snapshot", "-c", "first", "disk.qcow2"]);
    qemu_io(folder, "disk.qcow2", "write -P 8 0 64k");
    qemu_io(folder, "disk.qcow2", "write -P 8 32M 64k");
    let path = folder.path("disk.qcow2");
    let mut image = fs::read(&path).unwrap();
    let (l1, refcount_table, snapshots) =
        (number(&image, 40), number(&image, 48), number(&image, 64));
    let places = Places {
        l1,
        l2: number(&image, l1),
        refcount_table,
        refcount_block: number(&image, refcount_table),
        snapshots,
        inactive_l1: number(&image, snapshots),
    };
    damage(&mut image, &places);
    fs::write(&path, &image).unwrap();
    image
}

/// Has the L2 entry for 32 MiB lead to a place in the file.
fn lead(image: &mut [u8], l2: usize, to: usize) {
    image[l2 + 8 * 512..][..8].copy_from_slice(&(to as u64 | 1 << 63).to_be_bytes());
}

/// Runs a request that would destroy metadata, and checks that it changes no byte but those of the header.
fn prevented(
    folder: &Folder,
    before: &[u8],
    request: impl FnOnce(&mut Rig) -> Result<(), Errno>,
) -> Damage {
    let path = folder.path("disk.qcow2");
    let (node, damages) = open_telling(&options(&path));
    let mut rig = Rig::new(node);
    assert_eq!(request(&mut rig), Err(Errno::EIO));
    drop(rig);
    let after = fs::read(&path).unwrap();
    assert_eq!(after[79] & 2, 2, "marked");
    assert!(after[65536..before.len()] == before[65536..], "nothing else is written");
    let mut told = told(damages);
    assert_eq!(told.len(), 1, "{told:?}");
    told.remove(0)
}

#[test]
fn data_is_not_written_over_metadata() {
    let cases: [(&str, Place); 6] = [
        ("active L1 table", |at| at.l1),
        ("active L2 table", |at| at.l2),
        ("refcount table", |at| at.refcount_table),
        ("refcount block", |at| at.refcount_block),
        ("snapshot table", |at| at.snapshots),
        ("inactive L1 table", |at| at.inactive_l1),
    ];
    for (name, place) in cases {
        let requests: [Send; 2] = [
            |rig| rig.write((32 << 20) + 4096, &[1; 4096], 0).map(drop),
            |rig| rig.op(Op::Discard, 32 << 20, 64 << 10).map(drop),
        ];
        for request in requests {
            let folder = Folder::new("overlap");
            let mut host = 0;
            let before = damaged_by(&folder, |image, at| {
                host = place(at);
                lead(image, at.l2, host);
            });
            let damage = prevented(&folder, &before, request);
            let message = format!("Preventing invalid write on metadata (overlaps with {name})");
            assert_eq!(damage.message, message);
            let host = host as u64;
            assert_eq!((damage.is_fatal, damage.place), (true, Some(host..host + 65536)));
        }
    }
}

/// Reads change nothing, so they are answered from the image, as in QEMU.
#[test]
fn metadata_that_an_entry_leads_to_can_be_read_as_data() {
    let folder = Folder::new("overlap-read");
    let mut l1 = 0;
    let image = damaged_by(&folder, |image, at| {
        l1 = at.l1;
        lead(image, at.l2, l1);
    });
    let (node, damages) = open_telling(&options(&folder.path("disk.qcow2")));
    let mut rig = Rig::new(node);
    assert_eq!(rig.read(32 << 20, 512, 0).unwrap(), image[l1..l1 + 512]);
    drop(rig);
    assert_eq!(told(damages), []);
}

#[test]
fn metadata_that_counts_as_free_is_not_used_for_data() {
    let cases: [(&str, Place); 3] = [
        ("active L2 table", |at| at.l2),
        ("active L1 table", |at| at.l1),
        ("inactive L1 table", |at| at.inactive_l1),
    ];
    for (name, place) in cases {
        let folder = Folder::new("overlap-free");
        let before = damaged_by(&folder, |image, at| {
            let count = at.refcount_block + 2 * (place(at) >> 16);
            image[count..count + 2].fill(0);
        });
        let damage = prevented(&folder, &before, |rig| rig.write(8 << 20, &[1; 4096], 0));
        assert!(damage.message.ends_with(&format!("(overlaps with {name})")), "{damage:?}");
    }
}

/// A change of one table would be a change of the other.
#[test]
fn a_cluster_that_is_two_tables_is_not_changed() {
    let folder = Folder::new("overlap-twice");
    let before = damaged_by(&folder, |image, at| {
        let entry = (at.refcount_block as u64 | 1 << 63).to_be_bytes();
        image[at.l1..at.l1 + 8].copy_from_slice(&entry);
    });
    let damage = prevented(&folder, &before, |rig| rig.write(8 << 20, &[1; 4096], 0));
    assert!(damage.message.contains("overlaps with"), "{damage:?}");
}

/// Each of the two L1 entries has a copy of the table in memory.
#[test]
fn a_table_of_two_l1_entries_does_not_change_and_its_data_stays() {
    let folder = Folder::new("damage-shared-table");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "2G"]);
    qemu_io(&folder, "disk.qcow2", "write -P 7 0 64k");
    let path = folder.path("disk.qcow2");
    let mut image = fs::read(&path).unwrap();
    let l1 = number(&image, 40);
    image.copy_within(l1..l1 + 8, l1 + 8);
    for op in [Op::Discard, Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false }] {
        fs::write(&path, &image).unwrap();
        let (node, damages) = open_telling(&options(&path));
        let mut rig = Rig::new(node);
        assert_eq!(rig.op(op, 512 << 20, 1 << 16), Err(Errno::EIO));
        drop(rig);
        assert!(told(damages)[0].message.contains("overlaps with active L2 table"));
        let after = fs::read(&path).unwrap();
        assert_eq!(after[79] & 2, 2, "marked as corrupt");
        assert!(after[1 << 16..image.len()] == image[1 << 16..], "data or metadata was lost");
    }
}
