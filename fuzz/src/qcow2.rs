//! A hostile qcow2 image, and requests to it.
//!
//! The first byte says how many requests there are, six bytes each; all the rest is the image.

use std::cell::RefCell;
use std::io::Write;
use std::rc::Rc;

use block::NodeRegistry;
use block::options::{
    Backing, BlockdevOptions, BlockdevRef, Driver, FileOptions, Locking, Qcow2Options,
};
use block::request::{Completion, Op, Request};
use event_loop::{AlignedBuf, EventLoop, IoBufs};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::input::Input;
use crate::world;

/// Requests, and bytes of one, at most.
const REQUESTS: usize = 32;
const MOST: u64 = 1 << 20;
/// The header's byte that says whether the data lies in a file of its own: one that the image names,
/// which is not to be opened here.
const FEATURES: usize = 79;
const DATA_FILE: u8 = 1 << 2;

thread_local! {
    static LOOP: EventLoop = world::quiet_loop();
}

#[derive(Default)]
struct Answers(RefCell<Vec<u32>>);

impl Completion for Answers {
    fn complete(&self, tag: u32, _result: Result<(), Errno>, _bufs: IoBufs) {
        assert!(!self.0.borrow().contains(&tag), "answered twice");
        self.0.borrow_mut().push(tag);
    }
}

fn options(path: String, read_only: bool) -> BlockdevOptions {
    let node = |name, driver| {
        let node = world::node_options(name, driver);
        BlockdevOptions { read_only, ..node }
    };
    let file = FileOptions { filename: path.into(), aio: None, locking: Locking::Off };
    let driver = Driver::Qcow2(Qcow2Options {
        file: BlockdevRef::Inline(Box::new(node(None, Driver::File(file)))),
        data_file: None,
        backing: Backing::None,
        pass_discard_request: None,
        discard_no_unref: false,
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
    LOOP.with(|event_loop| play(event_loop, &options(path, count & 0x80 != 0), steps));
}

fn play(event_loop: &EventLoop, options: &BlockdevOptions, steps: &[u8]) {
    let mut registry = NodeRegistry::new();
    let Ok(node) = registry.open(options) else { return };
    let size = node.geometry().size;
    assert_eq!(size % 512, 0);
    let Ok(channel) = node.clone().open_channel(event_loop) else { return };
    let answers = Rc::<Answers>::default();
    let to = answers.clone() as Rc<dyn Completion>;
    let mut input = Input::new(steps);
    let mut asked = 0;
    while !input.is_empty() {
        let (kind, len) = (input.u8(), (u64::from(input.u8()) + 1) * 512);
        let offset = (u64::from(input.u32()) << 9).checked_rem(size).unwrap_or_default();
        let len = if kind & 0x80 == 0 { len } else { size / 3 }.min(size - offset).min(MOST);
        let (len, memory) =
            (len - len % 512, |len: u64| AlignedBuf::io_bufs(len as usize, 512).expect("memory"));
        let (op, offset, len, bufs) = match kind & 7 {
            0 | 1 => (Op::Read, offset, len, memory(len)),
            2 | 3 => (Op::Write { fua: kind & 8 != 0 }, offset, len, memory(len)),
            4 => (Op::Discard, offset, len, IoBufs::new()),
            5 => {
                let (may_unmap, no_fallback) = (kind & 16 != 0, kind & 32 != 0);
                let op = Op::WriteZeroes { may_unmap, no_fallback, fua: kind & 8 != 0 };
                (op, offset, len, IoBufs::new())
            }
            6 => (Op::Flush, 0, 0, IoBufs::new()),
            _ => (Op::BlockStatus, offset, len, memory(256)),
        };
        channel.submit(Request::new(op, offset, len, bufs, &to, asked));
        asked += 1;
        if kind & 64 != 0 {
            wait(event_loop, &answers, asked);
        }
    }
    wait(event_loop, &answers, asked);
}

fn wait(event_loop: &EventLoop, answers: &Answers, asked: u32) {
    while answers.0.borrow().len() < asked as usize {
        event_loop.run_once(true).expect("it turns");
    }
}
