//! The `file` driver over real files: what a disk does, and what one gets when it cannot.

use crate::common;

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use block::status::{Extent, ExtentState};
use common::*;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

const MIB: usize = 1 << 20;

fn open(options: &BlockdevOptions) -> Rig {
    Rig::new(NodeRegistry::new().open(options).unwrap())
}

/// Every engine, with and without `O_DIRECT`.
fn variants(path: &std::path::Path) -> Vec<BlockdevOptions> {
    let mut all = Vec::new();
    for aio in [None, Some(Aio::IoUring), Some(Aio::Threads), Some(Aio::Native)] {
        for direct in [false, true] {
            if aio == Some(Aio::Native) && !direct {
                continue;
            }
            let mut options = blockdev("disk", file(path, aio));
            options.cache.direct = direct;
            options.discard = Discard::Unmap;
            all.push(options);
        }
    }
    all
}

#[test]
fn reads_and_writes_reach_the_file() {
    for dir in [disk(), tmpfs()] {
        let image = TempFile::new(&dir, "thin", MIB);
        for options in variants(&image.0) {
            std::fs::write(&image.0, pattern(MIB)).unwrap();
            let mut rig = open(&options);
            assert_eq!(rig.read(8192, 4096, 0).unwrap(), pattern(MIB)[8192..12288]);
            rig.write(4096, &[0xab; 4096], 0).unwrap();
            rig.op(Op::Flush, 0, 0).unwrap();
            drop(rig);
            let mut want = pattern(MIB);
            want[4096..8192].fill(0xab);
            assert!(image.contents() == want, "{options:?}");
        }
    }
}

/// Linux AIO would wait for the disk as it submits.
#[test]
fn linux_aio_requires_direct_io() {
    let image = TempFile::new(&disk(), "native", MIB);
    let options = blockdev("disk", file(&image.0, Some(Aio::Native)));
    let error = NodeRegistry::new().open(&options).err().unwrap();
    assert_eq!(
        error.to_string(),
        "aio=native was specified, but it requires cache.direct=on, which was not specified."
    );
}

#[test]
fn requests_beyond_the_disk_fail() {
    let image = TempFile::new(&disk(), "range", 65536);
    let mut options = blockdev("disk", file(&image.0, None));
    let mut rig = open(&options);
    assert_eq!(rig.read(65536, 512, 0), Err(Errno::EIO));
    assert_eq!(rig.write(65024, &[1; 1024], 0), Err(Errno::ENOSPC));
    assert_eq!(rig.read(u64::MAX - 511, 512, 0), Err(Errno::EIO));
    assert_eq!(rig.op(Op::Discard, u64::MAX, u64::MAX), Err(Errno::EIO));
    assert_eq!(rig.read(0, 0, 0), Ok(vec![]));
    drop(rig);
    options.read_only = true;
    let mut rig = open(&options);
    assert_eq!(rig.write(0, &[1; 512], 0), Err(Errno::EROFS));
    assert_eq!(rig.op(Op::Discard, 0, 512), Err(Errno::EROFS));
    assert_eq!(rig.op(Op::Flush, 0, 0), Ok(()));
    assert_eq!(rig.read(0, 512, 0).unwrap(), pattern(512));
    drop(rig);
    assert!(image.contents() == pattern(65536));
}

/// lseek(2) is not asked again for data that it has found, until the node makes a hole.
#[test]
fn data_is_remembered_until_the_node_makes_a_hole() {
    let image = TempFile::new(&tmpfs(), "status", MIB);
    let mut options = blockdev("disk", file(&image.0, None));
    options.discard = Discard::Unmap;
    let mut rig = open(&options);
    let quarter = MIB as u64 / 4;
    let hole = |at: u64| {
        let file = std::fs::File::options().write(true).open(&image.0).unwrap();
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&file, mode, at.cast_signed(), quarter.cast_signed()).unwrap();
    };
    let own = |state| vec![Extent::own(quarter, state)];
    let data = own(ExtentState::Data);
    // The answer ends with the range, also where the data does not.
    assert_eq!(rig.extents(0, quarter), data);
    hole(2 * quarter);
    assert_eq!(rig.extents(2 * quarter, quarter), data);
    rig.op(Op::Discard, 3 * quarter, quarter).unwrap();
    let holes = Extent::own(2 * quarter, ExtentState::Hole);
    assert_eq!(rig.extents(quarter, 3 * quarter), [data[0], holes]);
    assert_eq!(rig.extents(quarter, quarter), data);
    let zero = Op::WriteZeroes { may_unmap: true, no_fallback: false, fua: false };
    rig.op(zero, quarter, quarter).unwrap();
    assert_eq!(rig.extents(quarter, quarter), own(ExtentState::Hole));
}
