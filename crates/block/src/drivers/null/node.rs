//! A null disk's node and channel.

use std::cell::RefCell;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{EventLoop, IoBufs, IoTarget, Slab};
use nix::errno::Errno;

use super::NullOptions;
use crate::node::{BlockNode, Channel, Geometry};
use crate::request::{Op, Request};
use crate::status::{self, Extent, ExtentState};

/// Requests under way that a channel has room for from the start; what is not used is not touched.
const FIRST: usize = 256;

/// From where a request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// `null-co`: from within the submission.
    Inline,
    /// `null-aio`: from the loop, as a real disk answers.
    FromLoop,
}

/// A null disk.
pub(crate) struct NullNode {
    name: String,
    answer: Answer,
    options: NullOptions,
    read_only: bool,
}

impl NullNode {
    pub(crate) fn new(name: String, answer: Answer, options: NullOptions, read_only: bool) -> Self {
        NullNode { name, answer, options, read_only }
    }
}

impl BlockNode for NullNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.options.size,
            read_only: self.read_only,
            physical_block_size: 512,
            request_alignment: 1,
            discard: false,
            discard_granularity: 512,
            write_zeroes: !self.read_only,
            write_cache: false,
        }
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        Ok(Rc::new_cyclic(|me| NullChannel {
            me: me.clone(),
            node: self,
            event_loop: event_loop.clone(),
            waiting: RefCell::new(Slab::with_capacity(FIRST)),
        }))
    }
}

struct NullChannel {
    me: Weak<NullChannel>,
    node: Arc<NullNode>,
    event_loop: EventLoop,
    /// Requests under way, by token.
    waiting: RefCell<Slab<Request>>,
}

impl NullChannel {
    fn answer(&self, mut request: Request) {
        if request.op == Op::Read && self.node.options.read_zeroes {
            let len = request.bufs.len();
            request.bufs.zero(0, len);
        }
        if request.op == Op::BlockStatus {
            let state = match self.node.options.read_zeroes {
                true => ExtentState::Zeroes,
                false => ExtentState::Data,
            };
            status::write_one(&mut request.bufs, Extent::own(request.len, state));
        }
        request.complete(Ok(()));
    }

    fn check(&self, request: &Request) -> Result<(), Errno> {
        if self.node.read_only && !request.op.only_reads() {
            return Err(Errno::EROFS);
        }
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.node.options.size => Ok(()),
            _ => Err(request.op.beyond_end()),
        }
    }
}

impl Channel for NullChannel {
    fn submit(&self, request: Request) {
        if let Err(errno) = self.check(&request) {
            return request.complete(Err(errno));
        }
        let latency = self.node.options.latency_ns;
        if latency == 0 && self.node.answer == Answer::Inline {
            return self.answer(request);
        }
        let Some(me) = self.me.upgrade() else { return };
        let deadline = self.event_loop.now_ns().saturating_add(latency);
        let token = self.waiting.borrow_mut().insert(request);
        let target = me as Rc<dyn IoTarget>;
        self.event_loop.submit_timer(deadline, &target, token);
    }

    fn in_flight(&self) -> usize {
        self.waiting.borrow().len()
    }
}

impl IoTarget for NullChannel {
    fn complete(&self, token: u32, _result: i32, _bufs: IoBufs) {
        let request = self.waiting.borrow_mut().remove(token);
        if let Some(request) = request {
            self.answer(request);
        }
    }
}
