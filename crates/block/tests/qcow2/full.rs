//! Images in a file that is full.

use block::NodeRegistry;
use block::options::*;
use block::request::Op;

use crate::common::{Rig, blockdev, filled};
use crate::qcow2::image::{Folder, contents, judge, qcow2, qemu_img};

const MIB: usize = 1 << 20;
const DISK: usize = 8 * MIB;

/// An image whose file is as long as a full volume.
fn full(folder: &Folder, limit: usize) -> BlockdevOptions {
    let path = folder.path("disk.qcow2");
    let size = DISK.to_string();
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", &size]);
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(2 * DISK as u64))
        .unwrap();
    let Qcow2Options { file: below, .. } = qcow2(&path, Backing::Implicit);
    let raw = RawOptions { file: below, offset: 0, size: Some(limit as u64), keep_raw: false };
    let raw = BlockdevOptions {
        node_name: None,
        discard: Discard::Unmap,
        ..blockdev("", Driver::from(raw))
    };
    let file = BlockdevRef::Inline(Box::new(raw));
    let image = Qcow2Options { file, ..qcow2(&path, Backing::Implicit) };
    BlockdevOptions { discard: Discard::Unmap, ..blockdev("disk", Driver::from(image)) }
}

fn open(options: &BlockdevOptions) -> std::sync::Arc<dyn block::node::BlockNode> {
    NodeRegistry::new().open(options).unwrap()
}

/// Writes all of the disk, `depth` requests at once. Returns how many have failed.
fn write_all(rig: &mut Rig, len: usize, depth: usize) -> usize {
    let offsets: Vec<usize> = (0..DISK).step_by(len).collect();
    let mut failed = 0;
    for batch in offsets.chunks(depth) {
        let write = Op::Write { fua: false };
        let tags: Vec<u32> = batch
            .iter()
            .map(|at| rig.submit(write, *at as u64, len as u64, filled(&vec![7; len], 0)))
            .collect();
        failed += tags.iter().filter(|tag| rig.wait(**tag).0.is_err()).count();
    }
    failed
}

/// Writes that fail leave their room to others: those that fit into a smaller hole succeed, and the metadata of the others
/// is not put behind the end, where a flush could not write it.
#[test]
fn failed_writes_take_no_room() {
    for depth in [1, 8] {
        let folder = Folder::new(&format!("qcow2-full-{depth}"));
        let options = full(&folder, 3 * MIB);
        let node = open(&options);
        let mut rig = Rig::new(node.clone());
        for _ in 0..3 {
            assert!(write_all(&mut rig, MIB, depth) > 0);
        }
        // Less than a MiB was left, and is still.
        let written = (0..DISK / 65536)
            .filter(|nth| rig.write((nth * 65536) as u64, &[9; 65536], 0).is_ok())
            .count();
        // The header, three tables and an L2 table take a cluster each.
        assert_eq!(written, 3 * MIB / 65536 - 5, "all of the file is used");
        assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
        drop(rig);
        let found = contents(&node);
        drop(node);
        judge(&folder, "disk.qcow2", &found);
    }
}
