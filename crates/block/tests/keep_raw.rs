//! A disk that was detected as raw does not become a qcow2 image by a guest's writes.

use crate::common;

use std::path::Path;
use std::rc::Rc;

use block::NodeRegistry;
use block::options::*;
use block::request::{Op, Request, RequestOwner};
use common::*;
use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;

const HEADER: &[u8; 8] = b"QFI\xfb\0\0\0\x03";

fn probed(path: &Path, direct: bool) -> BlockdevOptions {
    let cache = Cache { direct, no_flush: false };
    let below = BlockdevOptions { cache, node_name: None, ..blockdev("", file(path, None)) };
    let raw = RawOptions {
        file: BlockdevRef::Inline(Box::new(below)),
        offset: 0,
        size: None,
        keep_raw: true,
    };
    BlockdevOptions { cache, ..blockdev("disk", Driver::from(raw)) }
}

fn with_header(len: usize) -> Vec<u8> {
    let mut data = pattern(len);
    data[..8].copy_from_slice(HEADER);
    data
}

#[test]
fn a_guest_cannot_write_a_qcow2_header() {
    for direct in [false, true] {
        let image = TempFile::new(&disk(), "keep-raw", 1 << 20);
        let mut rig = Rig::new(NodeRegistry::new().open(&probed(&image.0, direct)).unwrap());
        for len in [512, 4096, 65536] {
            assert_eq!(rig.write(0, &with_header(len), 0), Err(Errno::EPERM), "{len} bytes");
        }
        // Parts of a header are refused too.
        for (offset, len) in [(0, 4), (4, 4), (7, 512), (1, 1)] {
            let part = rig.write(offset, &pattern(len), 0);
            assert_eq!(part, Err(Errno::EPERM), "{len} bytes at {offset}");
        }
        assert_eq!(image.contents(), pattern(1 << 20), "nothing was written");
        // All other writes are accepted.
        let zeroes = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
        rig.op(zeroes, 0, 512).unwrap();
        for len in [512, 4096, 65536] {
            let mut data = pattern(len);
            data[..8].copy_from_slice(b"QFI\xfb\0\0\0\x04");
            data[8..12].copy_from_slice(&(len as u32).to_be_bytes());
            rig.write(0, &data, 0).unwrap();
            assert_eq!(rig.read(0, len, 0).unwrap(), data);
        }
        rig.write(512, &with_header(4096), 0).unwrap();
        assert_eq!(rig.read(512, 4096, 0).unwrap(), with_header(4096));
    }
}

/// Changes the memory of a write between check and write, as a guest may at any time.
#[test]
fn the_checked_bytes_are_the_written_bytes() {
    let image = TempFile::new(&disk(), "keep-raw-race", 1 << 20);
    let node = NodeRegistry::new().open(&probed(&image.0, true)).unwrap();
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let channel = node.open_channel(&event_loop).unwrap();
    let answers = Rc::<Answers>::default();
    let to: Rc<dyn RequestOwner> = answers.clone();
    let guest = filled(&pattern(8192), 0);
    let mut bufs = event_loop::IoBufs::new();
    bufs.set_part(&guest, 0, 8192, 1);
    channel.submit(Request::new(Op::Write { fua: false }, 0, 8192, bufs, &to, 0));
    // The check is done. The kernel gets the write when the loop turns.
    let mut guest = guest;
    guest.copy_in(0, HEADER);
    while !answers.0.borrow().contains_key(&0) {
        event_loop.run_once(true).unwrap();
    }
    let (result, _) = answers.0.borrow_mut().remove(&0).unwrap();
    result.unwrap();
    assert_eq!(image.contents()[..4096], pattern(8192)[..4096]);
}

#[test]
fn without_a_guess_all_may_be_written() {
    let image = TempFile::new(&disk(), "not-keep-raw", 1 << 20);
    let mut options = probed(&image.0, false);
    if let Some(raw) = options.driver.downcast_mut::<RawOptions>() {
        raw.keep_raw = false;
    }
    let mut rig = Rig::new(NodeRegistry::new().open(&options).unwrap());
    rig.write(0, &with_header(512), 0).unwrap();
    assert_eq!(image.contents()[..8], *HEADER);
}
