//! A loop's channel through an edge: passes requests on, holds them when told to.

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

/// Pauses between two looks at what is still under way below, nanoseconds: the first, and the longest.
const LOOK_AGAIN_NS: u64 = 20_000;
const LOOK_AGAIN_AT_MOST_NS: u64 = 1_000_000;

/// What the control plane asks of a port.
pub(super) enum Order {
    /// Hold what comes from now on, and say when all that came before has been answered.
    Hold(oneshot::Sender<()>),
    /// Open a channel to this node, for later.
    Prepare(Arc<dyn BlockNode>, oneshot::Sender<io::Result<()>>),
    /// Use what was prepared, and drop what was used so far.
    Switch(oneshot::Sender<()>),
    /// Pass on what is held, and forget what was prepared.
    GoOn,
}

/// The way to a port from other threads.
pub(super) struct Post(mailbox::Sender<Order>);

impl Post {
    pub(super) fn new() -> (Arc<Post>, mailbox::Receiver<Order>) {
        let (sender, receiver) = mailbox::channel();
        (Arc::new(Post(sender)), receiver)
    }

    /// A port that is gone takes no orders: then whoever waits for an answer learns that.
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
    /// Calls of `drain_begin` whose `drain_end` is to come: they concern whatever is below meanwhile.
    drains: Cell<usize>,
    event_loop: EventLoop,
    edge: Arc<Edge>,
    post: Arc<Post>,
}

impl Port {
    /// A port that passes on to `current`, or holds everything until it is told to go on.
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

/// Ends with the port, which takes its post out of the edge, or with the loop.
async fn take_orders(port: Weak<Port>, mut orders: mailbox::Receiver<Order>) {
    while let Some(order) = orders.receive().await {
        let Some(port) = port.upgrade() else { return };
        port.carry_out(order);
    }
}

/// Looks from time to time, so that nothing has to be counted, nor anybody told, per request.
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
