//! Images with persistent dirty bitmaps, which ringmill does not update.

use std::fs;

use block::options::*;

use crate::common::Rig;
use crate::image::*;

/// Whether QEMU reports the bitmaps as valid.
fn are_valid(folder: &Folder) -> bool {
    let said = qemu_img(folder, &["info", "disk.qcow2"]);
    assert!(said.contains("name: b0"), "{said}");
    !said.contains("in-use")
}

#[test]
fn bitmaps_become_invalid_before_data_changes() {
    let folder = Folder::new("bitmaps");
    qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
    qemu_io(&folder, "disk.qcow2", "write -P 7 0 64k");
    qemu_img(&folder, &["bitmap", "--add", "disk.qcow2", "b0"]);
    let path = folder.path("disk.qcow2");
    let autoclear = || fs::read(&path).unwrap()[95];
    assert_eq!(autoclear(), 1);
    let read_only = BlockdevOptions { read_only: true, ..options(&path) };
    drop(Rig::new(open(&read_only)).read(0, 512, 0).unwrap());
    assert!(autoclear() == 1 && are_valid(&folder), "reading leaves them");
    let mut rig = Rig::new(open(&options(&path)));
    // Overwriting allocated data changes no metadata.
    rig.write(0, &[1; 512], 0).unwrap();
    assert_eq!(autoclear(), 0, "a process that is killed now leaves no bitmap that lacks a write");
    drop(rig);
    assert_eq!(autoclear(), 0);
}
