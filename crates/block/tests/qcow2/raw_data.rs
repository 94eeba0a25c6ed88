//! Images whose data file by itself is the disk (`data_file_raw`).

use std::process::Command;

use block::NodeRegistry;
use block::options::{Backing, BlockdevOptions};
use block::request::Op;
use event_loop::IoBufs;

use crate::common::Rig;
use crate::qcow2::image::{Folder, contents, driver, judge, open, options, qemu_img, qemu_io};
use crate::qcow2::model::{SIZE, matches};
use crate::qcow2::resize::grows;

fn create(folder: &Folder, more: &str) {
    let _ = std::fs::remove_file(folder.path("data"));
    let (form, size) = (format!("data_file=DIR/data,data_file_raw=on{more}"), SIZE.to_string());
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "-o", &form, "disk.qcow2", &size]);
}

/// The data file has the bytes that were read of the image last, and is still said to be raw.
fn assert_same(folder: &Folder) {
    let [data, contents] =
        ["data", "contents.raw"].map(|name| std::fs::read(folder.path(name)).unwrap());
    assert!(data.len() >= contents.len());
    let (same, rest) = data.split_at(contents.len());
    assert!(same == contents && rest.iter().all(|byte| *byte == 0));
    let said = qemu_img(folder, &["info", "disk.qcow2"]);
    assert!(said.contains("data file raw: true"), "{said}");
}

/// Under random requests. Images that QEMU has not given tables are written too.
#[test]
fn the_data_file_is_the_disk() {
    for (seed, threads, more) in [
        (1, 1, ""),
        (2, 3, ""),
        (3, 3, ",cluster_size=4k"),
        (4, 1, ",cluster_size=16k,extended_l2=on"),
    ] {
        let folder = Folder::new(&format!("raw-data-{seed}"));
        create(&folder, more);
        let options = options(&folder.path("disk.qcow2"));
        matches(&folder, &options, &vec![0; SIZE], seed, threads, 8192);
        assert_same(&folder);
    }
}

#[test]
fn a_grown_data_file_is_the_disk() {
    for more in ["", ",cluster_size=16k,extended_l2=on"] {
        let folder = Folder::new(&format!("raw-data-grown-{}", more.len()));
        create(&folder, more);
        grows(&folder, &options(&folder.path("disk.qcow2")), &[0; SIZE], 8192);
        assert_same(&folder);
    }
}

/// What QEMU has made zeroes, and what was written to the data file alone.
#[test]
fn qemu_and_raw_writers_are_understood() {
    let folder = Folder::new("raw-data-qemu");
    create(&folder, "");
    qemu_io(&folder, "disk.qcow2", "write -P 5 0 1M");
    qemu_io(&folder, "disk.qcow2", "write -z 64k 256k");
    let path = folder.path("disk.qcow2");
    let mut data = std::fs::read(folder.path("data")).unwrap();
    data[2 << 20..][..4096].fill(9);
    std::fs::write(folder.path("data"), &data).unwrap();
    // QEMU makes it a whole number of clusters.
    data.truncate(SIZE);
    let node = open(&options(&path));
    assert!(contents(&node) == data);
    // Within the zeroes of QEMU, and past them.
    let mut rig = Rig::new(node.clone());
    rig.write(100 * 1024, &[7; 4096], 0).unwrap();
    let zeroes = Op::WriteZeroes { may_unmap: false, no_fallback: true, fua: false };
    rig.op(zeroes, 512, 1024).unwrap();
    let tag = rig.submit(Op::Flush, 0, 0, IoBufs::new());
    rig.wait(tag).0.unwrap();
    drop(rig);
    data[100 * 1024..][..4096].fill(7);
    data[512..][..1024].fill(0);
    let found = contents(&node);
    assert!(found == data);
    drop(node);
    judge(&folder, "disk.qcow2", &found);
    assert_same(&folder);
}

/// What lies behind would show where the data file has zeroes. The sentence is QEMU's.
#[test]
fn a_backing_image_is_refused() {
    let folder = Folder::new("raw-data-behind");
    create(&folder, "");
    std::fs::write(folder.path("base.raw"), vec![5; SIZE]).unwrap();
    let behind = crate::common::file(&folder.path("base.raw"), None);
    let behind = BlockdevOptions { read_only: true, ..crate::common::blockdev("behind", behind) };
    let mut registry = NodeRegistry::new();
    registry.open(&behind).unwrap();
    let path = folder.path("disk.qcow2");
    let named = Backing::Node(block::options::BlockdevRef::Name("behind".into()));
    let options = BlockdevOptions { driver: driver(&path, named), ..options(&path) };
    let refused = registry.open(&options).map(drop).unwrap_err().to_string();
    assert_eq!(refused, "Backing file and data-file-raw cannot be used at the same time");
    let create = ["create", "-q", "-f", "qcow2", "-o", "data_file=d,data_file_raw=on", "-F", "raw"];
    let mut command = Command::new("qemu-img");
    let output = command.args(create).args(["-b", "base.raw", "no.qcow2"]);
    let output = output.current_dir(folder.path(".")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&refused), "{said}");
}
