//! The channel of a queue to a node with a policy: records each request in flight, so that it can be
//! repeated.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{BottomHalf, EventLoop, IoBufs, Slab};
use nix::errno::Errno;

use super::{IoError, PolicyNode};
use crate::job::OnError;
use crate::node::Channel;
use crate::request::{CompletionGuard, Op, Request, RequestOwner};

/// Initial capacity for requests; unused memory is not touched.
const FIRST: usize = 256;

/// A channel.
pub(super) struct PolicyChannel {
    me: Weak<PolicyChannel>,
    event_loop: EventLoop,
    node: Arc<PolicyNode>,
    child: Rc<dyn Channel>,
    /// Requests at the node, by token.
    under_way: RefCell<Slab<RequestSlot>>,
    held: RefCell<Vec<HeldRequest>>,
    /// The number of the next request, in order of arrival.
    next: Cell<u64>,
    /// Drains that wait for the end of all requests.
    draining: Cell<u32>,
    /// Scheduled on a resume; the number is that with the policy.
    bottom_half: OnceCell<(BottomHalf, u64)>,
}

/// A request at the node, without its memory.
struct RequestSlot {
    number: u64,
    op: Op,
    offset: u64,
    len: u64,
    reply: CompletionGuard,
    /// Its queue has stopped: do not hold it on an error.
    is_abandoned: bool,
}

/// A request that is held while the export is stopped.
struct HeldRequest {
    number: u64,
    request: Request,
}

impl PolicyChannel {
    pub(super) fn new(
        node: Arc<PolicyNode>,
        event_loop: &EventLoop,
        child: Rc<dyn Channel>,
    ) -> Rc<Self> {
        let channel = Rc::new_cyclic(|me: &Weak<PolicyChannel>| PolicyChannel {
            me: me.clone(),
            event_loop: event_loop.clone(),
            node,
            child,
            under_way: RefCell::new(Slab::with_capacity(FIRST)),
            held: RefCell::default(),
            next: Cell::new(0),
            draining: Cell::new(0),
            bottom_half: OnceCell::new(),
        });
        let me = channel.me.clone();
        let bottom_half = event_loop.bottom_half(move || {
            if let Some(me) = me.upgrade() {
                me.go_on();
            }
        });
        let number = channel.node.policy.join(bottom_half.clone());
        // The cell is empty so far.
        let _ = channel.bottom_half.set((bottom_half, number));
        channel
    }

    /// Passes a request on, unless the export is stopped.
    fn begin(&self, number: u64, mut request: Request) {
        if self.node.policy.is_stopped() {
            return self.hold(number, request);
        }
        let Some(me) = self.me.upgrade() else { return request.complete(Err(Errno::ECANCELED)) };
        let to: Rc<dyn RequestOwner> = me;
        let mut under_way = self.under_way.borrow_mut();
        let reply = request.intercept(&to, under_way.next_tag());
        let Request { op, offset, len, .. } = request;
        under_way.insert(RequestSlot { number, op, offset, len, reply, is_abandoned: false });
        drop(under_way);
        self.child.submit(request);
    }

    #[cold]
    fn hold(&self, number: u64, request: Request) {
        if self.draining.get() > 0 {
            return request.give_up();
        }
        self.held.borrow_mut().push(HeldRequest { number, request });
    }

    /// Repeats the held requests in order.
    fn go_on(&self) {
        let mut held = self.held.take();
        held.sort_unstable_by_key(|held| held.number);
        self.event_loop.section(|| {
            held.into_iter()
                .for_each(|HeldRequest { number, request }| self.begin(number, request));
        });
    }

    /// Answers the held requests without carrying them out.
    fn give_up(&self) {
        let held = self.held.take();
        held.into_iter().for_each(|held| held.request.give_up());
    }

    #[cold]
    fn failed(&self, slot: RequestSlot, errno: Errno, mut bufs: IoBufs) {
        let RequestSlot { number, op, offset, len, mut reply, is_abandoned } = slot;
        // An unsupported operation is no failure of the node, and neither is the end of its loop.
        if matches!(errno, Errno::EOPNOTSUPP | Errno::ECANCELED) {
            return reply.send(Err(errno), bufs);
        }
        let policy = &self.node.policy;
        let has_memory = matches!(op, Op::Read | Op::Write { .. });
        let action = match policy.action(super::is_read(op), errno) {
            // Without its memory it cannot be repeated.
            OnError::Stop if has_memory && bufs.len() as u64 != len => OnError::Report,
            action => action,
        };
        let error = || {
            let node_name = self.node.node.known_name();
            IoError { node_name, op, action, errno, offset, untold: 0 }
        };
        match action {
            OnError::Stop => {
                policy.stop(error());
                let request = Request::answered_to(reply, op, offset, len, bufs);
                match is_abandoned {
                    true => request.give_up(),
                    false => self.hold(number, request),
                }
            }
            OnError::Ignore => {
                policy.tell(error(), self.event_loop.now_ns());
                if op == Op::Read {
                    // Zeroes, so that the guest gets neither old contents of its memory nor a part of the data.
                    let len = bufs.len();
                    bufs.zero(0, len);
                }
                reply.send(Ok(()), bufs);
            }
            OnError::Report | OnError::Enospc => reply.send(Err(errno), bufs),
        }
    }
}

impl Channel for PolicyChannel {
    fn submit(&self, request: Request) {
        let number = self.next.get();
        self.next.set(number + 1);
        self.begin(number, request);
    }

    fn in_flight(&self) -> usize {
        self.under_way.borrow().len() + self.held.borrow().len()
    }

    fn drain_begin(&self) {
        self.draining.set(self.draining.get() + 1);
        self.give_up();
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.draining.set(self.draining.get().saturating_sub(1));
        self.child.drain_end();
    }

    fn abandon(&self, is_abandoned: &dyn Fn(u32) -> bool) {
        for slot in self.under_way.borrow_mut().values_mut() {
            slot.is_abandoned |= is_abandoned(slot.reply.tag());
        }
        let mut held = self.held.borrow_mut();
        let abandoned: Vec<HeldRequest> =
            held.extract_if(.., |held| is_abandoned(held.request.tag())).collect();
        // Answered outside of the borrow.
        drop(held);
        abandoned.into_iter().for_each(|held| held.request.give_up());
    }
}

impl RequestOwner for PolicyChannel {
    fn complete(&self, token: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let slot = self.under_way.borrow_mut().remove(token);
        let Some(mut slot) = slot else { return };
        match result {
            Ok(()) => slot.reply.send(Ok(()), bufs),
            Err(errno) => self.failed(slot, errno, bufs),
        }
    }
}

impl Drop for PolicyChannel {
    fn drop(&mut self) {
        if let Some((bottom_half, number)) = self.bottom_half.get() {
            self.node.policy.leave(*number);
            self.event_loop.delete_bottom_half(bottom_half);
        }
        self.give_up();
    }
}
