//! Requests to a node, of six bytes each.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::BlockdevOptions;
use block::request::{Op, Request, RequestOwner};
use event_loop::{AlignedBuf, EventLoop, IoBufs};
use nix::errno::Errno;

use crate::input::Input;

/// Requests of an input, at most.
pub(crate) const REQUESTS: usize = 32;
/// Bytes of one, at most.
const MOST: u64 = 1 << 20;

#[derive(Default)]
struct Answers(RefCell<Vec<u32>>);

impl RequestOwner for Answers {
    fn complete(&self, tag: u32, _result: Result<(), Errno>, _bufs: IoBufs) {
        assert!(!self.0.borrow().contains(&tag), "answered twice");
        self.0.borrow_mut().push(tag);
    }
}

/// Opens a node and sends it the requests of `steps`.
pub(crate) fn play(event_loop: &EventLoop, options: &BlockdevOptions, steps: &[u8]) {
    if let Ok(node) = NodeRegistry::new().open(options) {
        ask(event_loop, &node, steps);
    }
}

/// Sends a node the requests of `steps`: each is answered, once.
pub(crate) fn ask(event_loop: &EventLoop, node: &Arc<dyn BlockNode>, steps: &[u8]) {
    let size = node.geometry().size;
    assert_eq!(size % 512, 0);
    let Ok(channel) = node.clone().open_channel(event_loop) else { return };
    let answers = Rc::<Answers>::default();
    let to = answers.clone() as Rc<dyn RequestOwner>;
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
