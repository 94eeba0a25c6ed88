//! An image as a node, and its requests of one loop.
//!
//! A request goes to the thread as a range. What the server sends comes back in the pieces in which it has arrived,
//! and the loop copies them into the request's memory.

use std::cell::RefCell;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use bytes::Bytes;
use event_loop::{BottomHalf, EventLoop, IoBufs, Slab};
use nix::errno::Errno;
use tokio::sync::mpsc;

use super::image::Image;
use super::thread::Web;
use crate::node::{BlockNode, Channel, Geometry, NoWaiting, RemoteImage};
use crate::request::{Detached, Op, Request};

/// A disk's size is a multiple of this.
pub(super) const SECTOR: u64 = 512;
/// Requests under way that a channel has room for from the start.
const FIRST: usize = 64;

/// An image on a web server.
pub(super) struct WebNode {
    image: Arc<Image>,
    web: Arc<Web>,
}

impl WebNode {
    pub(super) fn new(image: Arc<Image>, web: Arc<Web>) -> WebNode {
        WebNode { image, web }
    }
}

impl BlockNode for WebNode {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.image.len().next_multiple_of(SECTOR),
            read_only: true,
            physical_block_size: 512,
            request_alignment: 1,
            discard: false,
            discard_granularity: 512,
            write_zeroes: false,
            write_cache: false,
        }
    }

    fn remote_image(self: Arc<Self>) -> Option<Arc<dyn RemoteImage>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        Ok(WebChannel::new(event_loop, self))
    }
}

impl RemoteImage for WebNode {
    fn stop_waiting(&self) -> Option<NoWaiting> {
        Some(self.image.stop_waiting())
    }

    fn content(&self) -> Option<String> {
        Some(self.image.content())
    }

    fn may_name_files(&self) -> bool {
        false
    }
}

/// A request for the thread.
pub(super) struct Fetch {
    image: Arc<Image>,
    offset: u64,
    len: u64,
    tag: u32,
    answers: mpsc::UnboundedSender<Done>,
    loop_side: BottomHalf,
}

/// A request that is done: the channel's number of it, and what was read.
struct Done {
    tag: u32,
    read: Result<Vec<Bytes>, Errno>,
}

impl Fetch {
    /// Carries the request out, on the thread.
    pub(super) async fn run(self) {
        let Fetch { image, offset, len, tag, answers, loop_side } = self;
        let read = image.read(offset..offset + len).await;
        // A channel that is gone has no requests.
        let _ = answers.send(Done { tag, read });
        loop_side.schedule();
    }
}

/// One loop's way to an image.
struct WebChannel {
    node: Arc<WebNode>,
    event_loop: EventLoop,
    answers: mpsc::UnboundedSender<Done>,
    answered: RefCell<mpsc::UnboundedReceiver<Done>>,
    loop_side: BottomHalf,
    /// Requests under way, by their tags.
    requests: RefCell<Slab<(Detached, IoBufs)>>,
}

impl WebChannel {
    fn new(event_loop: &EventLoop, node: Arc<WebNode>) -> Rc<Self> {
        let (answers, answered) = mpsc::unbounded_channel();
        Rc::new_cyclic(|me: &Weak<WebChannel>| {
            let on_loop = me.clone();
            let loop_side = event_loop.bottom_half(move || {
                if let Some(me) = on_loop.upgrade() {
                    me.take_answers();
                }
            });
            WebChannel {
                node,
                event_loop: event_loop.clone(),
                answers,
                answered: RefCell::new(answered),
                loop_side,
                requests: RefCell::new(Slab::with_capacity(FIRST)),
            }
        })
    }

    fn take_answers(&self) {
        loop {
            let done = self.answered.borrow_mut().try_recv();
            let Ok(Done { tag, read }) = done else { break };
            let pending = self.requests.borrow_mut().remove(tag);
            let Some((request, mut bufs)) = pending else { continue };
            let result = read.map(|pieces| {
                let copied = pieces.iter().fold(0, |at, piece| at + bufs.copy_in(at, piece));
                // Past the image's end: a disk's size is rounded up to sectors.
                bufs.zero(copied, bufs.len() - copied);
            });
            request.complete(result, bufs);
        }
    }

    fn read(&self, mut request: Request) {
        let within = request.len.min(self.node.image.len().saturating_sub(request.offset));
        if within == 0 {
            request.bufs.zero(0, request.bufs.len());
            return request.complete(Ok(()));
        }
        let offset = request.offset;
        let tag = self.requests.borrow_mut().insert(request.detach());
        self.node.web.fetch(Fetch {
            image: self.node.image.clone(),
            offset,
            len: within,
            tag,
            answers: self.answers.clone(),
            loop_side: self.loop_side.clone(),
        });
    }
}

impl Channel for WebChannel {
    fn submit(&self, request: Request) {
        let size = self.node.geometry().size;
        let result = match request.op {
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard => Err(Errno::EROFS),
            Op::Flush => Ok(()),
            Op::Read | Op::BlockStatus => match request.offset.checked_add(request.len) {
                Some(end) if end <= size && request.op == Op::Read => return self.read(request),
                // All of it may be data.
                Some(end) if end <= size => Err(Errno::EOPNOTSUPP),
                _ => Err(request.op.beyond_end()),
            },
        };
        request.complete(result);
    }

    fn in_flight(&self) -> usize {
        self.requests.borrow().len()
    }
}

impl Drop for WebChannel {
    fn drop(&mut self) {
        self.event_loop.delete_bottom_half(&self.loop_side);
    }
}
