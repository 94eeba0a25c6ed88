//! How much metadata waits in memory for a flush.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::common::Rig;
use crate::qcow2::image::{Folder, check, open, options, qemu_img};

/// Bytes of a cluster, and so of an L2 table, which is as large whatever is in it.
const CLUSTER: u64 = 65536;
/// Bytes of the disk that such a table leads to.
const REACH: u64 = CLUSTER / 8 * CLUSTER;
/// So many of them may wait.
const KEPT: usize = (32 << 20) / CLUSTER as usize;

/// How many tables the image's file leads to.
fn tables(file: &File) -> usize {
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let (entries, l1_table) = (number(32) & u64::from(u32::MAX), number(40));
    (0..entries).filter(|entry| number(l1_table + entry * 8) != 0).count()
}

/// It is written when there is too much, without a flush, and not long before.
#[test]
fn no_more_than_a_limit_waits_for_a_flush() {
    let folder = Folder::new("kept");
    let count = KEPT + 100;
    let size = (count as u64 * REACH).to_string();
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", &size]);
    let file = File::open(folder.path("disk.qcow2")).unwrap();
    let node = open(&options(&folder.path("disk.qcow2")));
    let mut rig = Rig::new(node.clone());
    for written in 1..=count {
        rig.write((written as u64 - 1) * REACH, &[1; 4096], 0).unwrap();
        let in_file = tables(&file);
        assert!(written - in_file <= KEPT, "{written} written, {in_file} of them to the file");
        assert!(in_file == 0 || written > KEPT / 2, "the {written}th is in the file already");
    }
    drop((rig, node));
    check(&folder, "disk.qcow2");
}
