//! A channel to the connection of another loop, for a server that does not promise that a flush covers
//! several connections.
//!
//! Requests are sent to the loop with the connection, and their data is copied in both directions. That
//! costs time and allocates. Fast are servers with multi-conn, or nodes that are served by one
//! loop.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{AlignedBuf, EventLoop, LoopGone, mailbox, oneshot};
use nix::errno::Errno;

use super::NbdNode;
use crate::node::{BlockNode, Channel};
use crate::request::{Op, Request};
use crate::submit::submit;

/// A request for another loop.
pub(super) struct Job {
    op: Op,
    offset: u64,
    len: u64,
    /// Contents of its memory: data to write, or space for a read.
    data: Vec<u8>,
    answer: oneshot::Sender<(Result<(), Errno>, Vec<u8>)>,
}

/// Carries out the requests of other loops, and keeps the connection as long as there can be requests.
pub(super) async fn keep(
    event_loop: EventLoop,
    channel: Rc<dyn Channel>,
    mut jobs: mailbox::Receiver<Job>,
) {
    while let Some(job) = jobs.receive().await {
        let channel = channel.clone();
        event_loop.spawn(async move {
            let Job { op, offset, len, mut data, answer } = job;
            let Some(mut bufs) = AlignedBuf::io_bufs(data.len(), 4096) else {
                return answer.send((Err(Errno::ENOMEM), Vec::new()));
            };
            bufs.copy_in(0, &data);
            let (result, bufs) = submit(&channel, op, offset, len, bufs).await;
            bufs.copy_out(0, &mut data);
            answer.send((result, data));
        });
    }
}

/// Fails the requests of other loops, for want of memory.
pub(super) async fn refuse(mut jobs: mailbox::Receiver<Job>) {
    while let Some(Job { answer, .. }) = jobs.receive().await {
        answer.send((Err(Errno::ENOMEM), Vec::new()));
    }
}

/// A channel to a connection on another loop.
pub(super) struct Remote {
    me: Weak<Remote>,
    node: Arc<NbdNode>,
    event_loop: EventLoop,
    way: RefCell<Way>,
    in_flight: Cell<usize>,
}

enum Way {
    Jobs(Arc<mailbox::Sender<Job>>),
    /// A channel of this loop, after the end of the other loop.
    Channel(Rc<dyn Channel>),
}

impl Remote {
    pub(super) fn new(
        event_loop: &EventLoop,
        node: Arc<NbdNode>,
        jobs: Arc<mailbox::Sender<Job>>,
    ) -> Rc<Self> {
        Rc::new_cyclic(|me| Remote {
            me: me.clone(),
            node,
            event_loop: event_loop.clone(),
            way: RefCell::new(Way::Jobs(jobs)),
            in_flight: Cell::new(0),
        })
    }

    /// Sends a request and waits for its answer. `Err`: the loop with the connection has ended.
    async fn post(&self, request: &mut Request) -> Result<Result<(), Errno>, LoopGone> {
        let reads = matches!(request.op, Op::Read | Op::BlockStatus);
        let mut data = vec![0; request.bufs.len()];
        if !reads {
            request.bufs.copy_out(0, &mut data);
            if request.bufs.is_lost() {
                return Ok(Err(Errno::EFAULT));
            }
        }
        let (answer, answered) = oneshot::channel();
        let job = Job { op: request.op, offset: request.offset, len: request.len, data, answer };
        match &*self.way.borrow() {
            Way::Jobs(jobs) => jobs.send(job)?,
            Way::Channel(_) => return Err(LoopGone),
        }
        let (result, data) = answered.await?;
        if reads {
            request.bufs.copy_in(0, &data);
        }
        Ok(result)
    }

    /// Finds another connection after the end of the loop that had it.
    fn take_over(&self) -> io::Result<Rc<dyn Channel>> {
        if let Way::Channel(channel) = &*self.way.borrow() {
            return Ok(channel.clone());
        }
        let channel = self.node.clone().open_channel(&self.event_loop)?;
        self.way.replace(Way::Channel(channel.clone()));
        Ok(channel)
    }
}

impl Channel for Remote {
    fn submit(&self, mut request: Request) {
        if let Some(result) = self.node.shared.prepare(&mut request) {
            return request.complete(result);
        }
        if let Way::Channel(channel) = &*self.way.borrow() {
            let channel = channel.clone();
            return channel.submit(request);
        }
        let Some(me) = self.me.upgrade() else { return };
        self.in_flight.set(self.in_flight.get() + 1);
        self.event_loop.spawn(async move {
            let posted = me.post(&mut request).await;
            me.in_flight.set(me.in_flight.get() - 1);
            match posted {
                Ok(result) => request.complete(result),
                Err(LoopGone) => match me.take_over() {
                    Ok(channel) => channel.submit(request),
                    Err(_) => request.complete(Err(Errno::EIO)),
                },
            }
        });
    }

    fn in_flight(&self) -> usize {
        let direct = match &*self.way.borrow() {
            Way::Channel(channel) => channel.in_flight(),
            Way::Jobs(_) => 0,
        };
        self.in_flight.get() + direct
    }
}
