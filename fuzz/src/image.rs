//! An untrusted file, opened as a raw image, as an image whose format is probed,
//! or as rules of `blkdebug`.
//!
//! The first byte selects the way, and the number of requests of six bytes each. The rest is the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use block::options::{
    BlkdebugOptions, BlockdevOptions, BlockdevRef, Driver, FileOptions, Locking, NullOptions,
    Qcow2Options, RawOptions,
};
use block::{CreateQcow2, create_qcow2};
use event_loop::EventLoop;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::input::Input;
use crate::requests::{self, REQUESTS};
use crate::world;

/// In a qcow2 header: where the name of a backing file lies, and how long it is.
const BACKING: std::ops::Range<usize> = 8..20;
/// The byte of a qcow2 header with the flag for an external data file.
const FEATURES: usize = 79;
const DATA_FILE: u8 = 1 << 2;
/// The type of a header extension that names the backing file's format.
const BACKING_FORMAT: [u8; 4] = [0xe2, 0x79, 0x2a, 0xca];

struct World {
    event_loop: EventLoop,
    /// The untrusted file.
    file: File,
    /// An image that names it as its backing file, and no format.
    overlay: File,
    contents: Vec<u8>,
}

fn memory() -> File {
    File::from(memfd_create(c"image", MFdFlags::empty()).expect("a memfd"))
}

fn file_node(file: &File) -> BlockdevRef {
    let filename = world::path_of(file).into();
    let file = FileOptions { filename, aio: None, locking: Locking::Off };
    BlockdevRef::Inline(Box::new(world::node_options(None, Driver::file(file))))
}

fn fill(file: &File, contents: &[u8]) {
    file.set_len(0).and_then(|()| file.write_all_at(contents, 0)).expect("it fits");
}

impl World {
    fn new() -> Self {
        let (file, overlay) = (memory(), memory());
        let create = CreateQcow2 {
            backing: Some((world::path_of(&file), Some("raw".into()))),
            cluster_size: 512,
            ..CreateQcow2::new(64 << 10)
        };
        let path = world::path_of(&overlay);
        create_qcow2(Path::new(&path), &create).expect("an image");
        let mut contents = std::fs::read(path).expect("it is ours");
        let extension = contents.windows(4).position(|bytes| bytes == BACKING_FORMAT);
        // An unknown type, which readers ignore.
        contents[extension.expect("the format is named")] = 0x12;
        World { event_loop: world::quiet_loop(), file, overlay, contents }
    }

    /// Opens it as a backing file without a named format.
    fn probed(&self, contents: &[u8]) -> BlockdevOptions {
        let mut contents = contents.to_vec();
        // Files that it names must not be opened here.
        for at in BACKING {
            contents.get_mut(at).into_iter().for_each(|byte| *byte = 0);
        }
        contents.get_mut(FEATURES).into_iter().for_each(|byte| *byte &= !DATA_FILE);
        fill(&self.file, &contents);
        fill(&self.overlay, &self.contents);
        let driver = Driver::from(Qcow2Options {
            file: file_node(&self.overlay),
            ..Qcow2Options::default()
        });
        world::node_options(Some("image"), driver)
    }

    /// A part of it, with arbitrary options.
    fn raw(&self, contents: &[u8]) -> BlockdevOptions {
        let mut input = Input::new(contents);
        let number = |input: &mut Input<'_>| match input.u8() {
            255 => input.u64(),
            254 => u64::from(input.u16()),
            few => u64::from(few) << 9,
        };
        let (offset, size) = (number(&mut input), number(&mut input));
        let size = (input.u8() & 1 == 0).then_some(size);
        fill(&self.file, contents);
        let file = file_node(&self.file);
        world::node_options(
            Some("image"),
            Driver::from(RawOptions { file, offset, size, keep_raw: false }),
        )
    }

    /// Rules for a disk's errors.
    fn blkdebug(&self, contents: &[u8]) -> BlockdevOptions {
        fill(&self.file, contents);
        let null = NullOptions { size: 1 << 20, latency_ns: 0, read_zeroes: true };
        let null = world::node_options(None, Driver::null_co(null));
        let config = Some(world::path_of(&self.file).into());
        let options = BlkdebugOptions::new(BlockdevRef::Inline(Box::new(null)));
        let driver = Driver::from(BlkdebugOptions { config, ..options });
        world::node_options(Some("image"), driver)
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// Opens the file and uses it.
pub fn run(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else { return };
    let requests = usize::from(how & 0x3f) % REQUESTS;
    let (steps, contents) = rest.split_at(rest.len().min(requests * 6));
    WORLD.with(|world| {
        let options = match how >> 6 {
            0 | 1 => world.probed(contents),
            2 => world.raw(contents),
            _ => world.blkdebug(contents),
        };
        requests::play(&world.event_loop, &options, steps);
    });
}
