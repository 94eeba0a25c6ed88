//! A loop's channel through an edge: passes requests on, or holds them on an order.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{EventLoop, mailbox, oneshot};
use nix::errno::Errno;

use super::edge::Edge;
use crate::node::{BlockNode, Channel};
use crate::request::Request;

/// Pauses between two checks for requests in flight below, in nanoseconds: the first, and the longest.
const LOOK_AGAIN_NS: u64 = 20_000;
const LOOK_AGAIN_AT_MOST_NS: u64 = 1_000_000;

/// An order of the control plane to a port.
pub(super) enum Order {
    /// Hold new requests, and report when all earlier ones have been answered.
    Hold(oneshot::Sender<()>),
    /// Open a channel to this node, for a later [`Switch`](Self::Switch).
    Prepare(Arc<dyn BlockNode>, oneshot::Sender<io::Result<()>>),
    /// Use the prepared channel, and drop the present one.
    Switch(oneshot::Sender<()>),
    /// Pass on the held requests, and drop a prepared channel.
    GoOn,
}

/// Sends orders to a port from other threads.
pub(super) struct Post(mailbox::Sender<Order>);

impl Post {
    pub(super) fn new() -> (Arc<Post>, mailbox::Receiver<Order>) {
        let (sender, receiver) = mailbox::channel();
        (Arc::new(Post(sender)), receiver)
    }

    /// Sends an order. A port that is gone drops it, and with it the sender of the answer.
    pub(super) fn send(&self, order: Order) {
        let _ = self.0.send(order);
    }
}

/// A loop's channel through an edge.
pub(super) struct Port {
    holding: Cell<bool>,
    current: RefCell<Rc<dyn Channel>>,
    held: RefCell<VecDeque<Request>>,
    next: RefCell<Option<Rc<dyn Channel>>>,
    /// Calls of `drain_begin` without a `drain_end` so far: they apply to whichever channel is below.
    drains: Cell<usize>,
    event_loop: EventLoop,
    edge: Arc<Edge>,
    post: Arc<Post>,
}

impl Port {
    /// A port that passes requests on to `current`, or holds all requests until [`Order::GoOn`].
    pub(super) fn new(
        edge: Arc<Edge>,
        (post, orders): (Arc<Post>, mailbox::Receiver<Order>),
        event_loop: &EventLoop,
        current: Rc<dyn Channel>,
        holding: bool,
    ) -> Rc<Port> {
        let port = Rc::new(Port {
            holding: Cell::new(holding),
            current: RefCell::new(current),
            held: RefCell::default(),
            next: RefCell::default(),
            drains: Cell::new(0),
            event_loop: event_loop.clone(),
            edge,
            post,
        });
        event_loop.spawn(take_orders(Rc::downgrade(&port), orders));
        port
    }

    #[cold]
    fn hold_back(&self, request: Request) {
        self.held.borrow_mut().push_back(request);
    }

    fn carry_out(self: Rc<Self>, order: Order) {
        match order {
            Order::Hold(drained) => {
                self.holding.set(true);
                let event_loop = self.event_loop.clone();
                self.event_loop.spawn(wait_until_drained(
                    event_loop,
                    Rc::downgrade(&self),
                    drained,
                ));
            }
            Order::Prepare(node, ready) => {
                let opened = node.open_channel(&self.event_loop);
                ready.send(opened.map(|channel| {
                    let before = self.next.replace(Some(channel));
                    drop(before);
                }));
            }
            Order::Switch(done) => {
                if let Some(next) = self.next.take() {
                    let drains = self.drains.get();
                    (0..drains).for_each(|_| next.drain_begin());
                    let before = self.current.replace(next);
                    (0..drains).for_each(|_| before.drain_end());
                }
                done.send(());
            }
            Order::GoOn => {
                let forgotten = self.next.take();
                drop(forgotten);
                self.holding.set(false);
                let held = self.held.take();
                let current = self.current.borrow().clone();
                self.event_loop.section(|| held.into_iter().for_each(|r| current.submit(r)));
            }
        }
    }
}

impl Channel for Port {
    #[inline]
    fn submit(&self, request: Request) {
        if self.holding.get() {
            return self.hold_back(request);
        }
        let current = self.current.borrow().clone();
        current.submit(request);
    }

    fn in_flight(&self) -> usize {
        let current = self.current.borrow().clone();
        self.held.borrow().len() + current.in_flight()
    }

    fn drain_begin(&self) {
        self.drains.set(self.drains.get() + 1);
        self.below().drain_begin();
    }

    fn drain_end(&self) {
        self.drains.set(self.drains.get().saturating_sub(1));
        self.below().drain_end();
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.edge.forget(&self.post);
        for request in self.held.take() {
            request.complete(Err(Errno::ECANCELED));
        }
    }
}

/// Ends with the port, which unregisters from the edge, or with the loop.
async fn take_orders(port: Weak<Port>, mut orders: mailbox::Receiver<Order>) {
    while let Some(order) = orders.receive().await {
        let Some(port) = port.upgrade() else { return };
        port.carry_out(order);
    }
}

/// Polls the channel below, so that no request pays for counting or notification.
async fn wait_until_drained(event_loop: EventLoop, port: Weak<Port>, drained: oneshot::Sender<()>) {
    let mut pause = LOOK_AGAIN_NS;
    let below = port.upgrade().map(|port| port.below());
    if let Some(below) = &below {
        below.drain_begin();
    }
    while let Some(port) = port.upgrade()
        && port.holding.get()
        && port.below().in_flight() > 0
    {
        drop(port);
        event_loop.sleep_until(event_loop.now_ns() + pause).await;
        pause = (2 * pause).min(LOOK_AGAIN_AT_MOST_NS);
    }
    if let Some(below) = below {
        below.drain_end();
    }
    drained.send(());
}

impl Port {
    fn below(&self) -> Rc<dyn Channel> {
        self.current.borrow().clone()
    }
}
