//! A hostile qcow2 image, and requests to it.
//!
//! The first byte says how many requests there are, six bytes each; all the rest is the image.

use std::io::Write;

use block::options::{
    Backing, BlockdevOptions, BlockdevRef, Driver, FileOptions, Locking, Qcow2Options,
};
use event_loop::EventLoop;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::requests::{self, REQUESTS};
use crate::world;

/// The header's byte with the flag for an external data file. The image names that file,
/// which must not be opened here.
const FEATURES: usize = 79;
const DATA_FILE: u8 = 1 << 2;

thread_local! {
    static LOOP: EventLoop = world::quiet_loop();
}

/// What opens the image at `path`.
pub(crate) fn options(path: String, read_only: bool) -> BlockdevOptions {
    let node = |name, driver| {
        let node = world::node_options(name, driver);
        BlockdevOptions { read_only, ..node }
    };
    let file = FileOptions { filename: path.into(), aio: None, locking: Locking::Off };
    let driver = Driver::from(Qcow2Options {
        file: BlockdevRef::Inline(Box::new(node(None, Driver::file(file)))),
        backing: Backing::None,
        ..Qcow2Options::default()
    });
    node(Some("image"), driver)
}

/// Opens the image and uses it.
pub fn run(data: &[u8]) {
    let Some((count, rest)) = data.split_first() else { return };
    let requests = usize::from(count & 0x7f) % REQUESTS;
    let (steps, image) = rest.split_at(rest.len().min(requests * 6));
    let mut image = image.to_vec();
    if let Some(features) = image.get_mut(FEATURES) {
        *features &= !DATA_FILE;
    }
    let memory = memfd_create(c"image", MFdFlags::empty()).expect("a memfd");
    let path = world::path_of(&memory);
    let mut file = std::fs::File::from(memory);
    file.write_all(&image).expect("it fits");
    LOOP.with(|event_loop| requests::play(event_loop, &options(path, count & 0x80 != 0), steps));
}
