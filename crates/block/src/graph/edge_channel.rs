//! A loop's channel through an edge: passes requests on, or holds them on a command.

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

/// Bytes of held requests that an iteration passes on, apart from the last of them. Clients may have sent any number, and the
/// loop's other users wait meanwhile.
const SHARE: u64 = 1 << 20;

/// What a request counts as at least, bytes.
const LEAST: u64 = 4 << 10;

/// A command of the control plane to an edge channel.
pub(super) enum EdgeCommand {
    /// Hold new requests, and report when all earlier ones have been answered.
    Hold(oneshot::Sender<()>),
    /// Open a channel to this node, for a later [`Switch`](Self::Switch).
    Prepare(Arc<dyn BlockNode>, oneshot::Sender<io::Result<()>>),
    /// Use the prepared channel, and drop the present one.
    Switch(oneshot::Sender<()>),
    /// Pass on the held requests, and drop a prepared channel.
    GoOn,
}

/// Sends commands to an edge channel from other threads.
pub(super) struct EdgeSender(mailbox::Sender<EdgeCommand>);

impl EdgeSender {
    pub(super) fn new() -> (Arc<EdgeSender>, mailbox::Receiver<EdgeCommand>) {
        let (sender, receiver) = mailbox::channel();
        (Arc::new(EdgeSender(sender)), receiver)
    }

    /// Sends a command. An edge channel that is gone drops it, and with it the sender of the answer.
    pub(super) fn send(&self, command: EdgeCommand) {
        let _ = self.0.send(command);
    }
}

/// A loop's channel through an edge.
pub(super) struct EdgeChannel {
    holding: Cell<bool>,
    /// Held requests are passed on, in parts. New ones are held until all of them are.
    resuming: Cell<bool>,
    /// A task passes on the next part.
    has_task: Cell<bool>,
    current: RefCell<Rc<dyn Channel>>,
    held: RefCell<VecDeque<Request>>,
    next: RefCell<Option<Rc<dyn Channel>>>,
    /// Calls of `drain_begin` without a `drain_end` so far: they apply to whichever channel is below.
    drains: Cell<usize>,
    event_loop: EventLoop,
    edge: Arc<Edge>,
    edge_sender: Arc<EdgeSender>,
}

impl EdgeChannel {
    /// An edge channel that passes requests on to `current`, or holds all requests until [`EdgeCommand::GoOn`].
    pub(super) fn new(
        edge: Arc<Edge>,
        (edge_sender, commands): (Arc<EdgeSender>, mailbox::Receiver<EdgeCommand>),
        event_loop: &EventLoop,
        current: Rc<dyn Channel>,
        holding: bool,
    ) -> Rc<EdgeChannel> {
        let own = Rc::new(EdgeChannel {
            holding: Cell::new(holding),
            resuming: Cell::new(false),
            has_task: Cell::new(false),
            current: RefCell::new(current),
            held: RefCell::default(),
            next: RefCell::default(),
            drains: Cell::new(0),
            event_loop: event_loop.clone(),
            edge,
            edge_sender,
        });
        event_loop.spawn(take_commands(Rc::downgrade(&own), commands));
        own
    }

    #[cold]
    fn hold_back(&self, request: Request) {
        self.held.borrow_mut().push_back(request);
    }

    fn carry_out(self: Rc<Self>, command: EdgeCommand) {
        match command {
            EdgeCommand::Hold(drained) => {
                self.holding.set(true);
                self.resuming.set(false);
                let event_loop = self.event_loop.clone();
                self.event_loop.spawn(wait_until_drained(
                    event_loop,
                    Rc::downgrade(&self),
                    drained,
                ));
            }
            EdgeCommand::Prepare(node, ready) => {
                let opened = node.open_channel(&self.event_loop);
                ready.send(opened.map(|channel| {
                    let before = self.next.replace(Some(channel));
                    drop(before);
                }));
            }
            EdgeCommand::Switch(done) => {
                if let Some(next) = self.next.take() {
                    let drains = self.drains.get();
                    (0..drains).for_each(|_| next.drain_begin());
                    let before = self.current.replace(next);
                    (0..drains).for_each(|_| before.drain_end());
                }
                done.send(());
            }
            EdgeCommand::GoOn => {
                let forgotten = self.next.take();
                drop(forgotten);
                self.resuming.set(true);
                self.pass_on();
                if self.resuming.get() && !self.has_task.replace(true) {
                    self.event_loop.spawn(pass_on_the_rest(Rc::downgrade(&self)));
                }
            }
        }
    }

    /// Passes on a part of the held requests.
    fn pass_on(&self) {
        let current = self.child();
        let mut left = SHARE;
        self.event_loop.section(|| {
            while left > 0 {
                let Some(request) = self.held.borrow_mut().pop_front() else {
                    self.resuming.set(false);
                    return self.holding.set(false);
                };
                left = left.saturating_sub((request.bufs.len() as u64).max(LEAST));
                current.submit(request);
            }
        });
    }
}

impl Channel for EdgeChannel {
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
        self.child().drain_begin();
    }

    fn drain_end(&self) {
        self.drains.set(self.drains.get().saturating_sub(1));
        self.child().drain_end();
    }
}

impl Drop for EdgeChannel {
    fn drop(&mut self) {
        self.edge.forget(&self.edge_sender);
        for request in self.held.take() {
            request.complete(Err(Errno::ECANCELED));
        }
    }
}

/// Ends with the edge channel, which unregisters from the edge, or with the loop.
async fn take_commands(own: Weak<EdgeChannel>, mut commands: mailbox::Receiver<EdgeCommand>) {
    while let Some(command) = commands.receive().await {
        let Some(own) = own.upgrade() else { return };
        own.carry_out(command);
    }
}

/// Passes on a part of the held requests in each iteration, until none is left or they are held again.
async fn pass_on_the_rest(own: Weak<EdgeChannel>) {
    while let Some(edge) = own.upgrade() {
        if !edge.resuming.get() {
            edge.has_task.set(false);
            return;
        }
        let event_loop = edge.event_loop.clone();
        drop(edge);
        event_loop.sleep_until(event_loop.now_ns()).await;
        if let Some(edge) = own.upgrade()
            && edge.resuming.get()
        {
            edge.pass_on();
        }
    }
}

/// Polls the channel below, so that no request pays for counting or notification.
async fn wait_until_drained(
    event_loop: EventLoop,
    own: Weak<EdgeChannel>,
    drained: oneshot::Sender<()>,
) {
    let mut pause = LOOK_AGAIN_NS;
    let below = own.upgrade().map(|own| own.child());
    if let Some(below) = &below {
        below.drain_begin();
    }
    while let Some(own) = own.upgrade()
        && own.holding.get()
        && !own.resuming.get()
        && own.child().in_flight() > 0
    {
        drop(own);
        event_loop.sleep_until(event_loop.now_ns() + pause).await;
        pause = (2 * pause).min(LOOK_AGAIN_AT_MOST_NS);
    }
    if let Some(below) = below {
        below.drain_end();
    }
    drained.send(());
}

impl EdgeChannel {
    fn child(&self) -> Rc<dyn Channel> {
        self.current.borrow().clone()
    }
}
