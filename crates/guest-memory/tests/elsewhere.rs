//! Memory in a file whose pages another process supplies at any time.

use std::fs::OpenOptions;

use guest_memory::test_util::fuse::Fuse;
use guest_memory::{Error, Region};
use test_requirements::{Needs, untested};

const SIZE: u64 = 1 << 20;

#[test]
fn memory_on_fuse_is_refused() {
    if let Err(why) = OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        return untested(Needs::Fuse, format_args!("memory on FUSE takes /dev/fuse: {why}"));
    }
    let fuse = Fuse::mount(SIZE).unwrap();
    let fd = fuse.open().unwrap().into();
    let region = Region { guest_addr: 0, size: SIZE, user_addr: 0, mmap_offset: 0, fd };
    let refused = region.map().map(drop);
    assert!(matches!(refused, Err(Error::Elsewhere { guest_addr: 0 })), "{refused:?}");
}
