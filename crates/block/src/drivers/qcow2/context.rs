//! What a task needs of the loop that it runs on: the channels to the nodes below.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use event_loop::{EventLoop, IoBufs, Meter};
use nix::errno::Errno;

use super::scratch::Scratch;
use super::writes::Ticket;
use crate::node::Channel;
use crate::request::{Op, Part, Request, RequestOwner};

/// One loop's channels to the nodes below an image.
pub(super) struct Channels {
    pub(super) event_loop: EventLoop,
    /// `file`: the image's metadata and, as a rule, data.
    pub(super) file: Rc<dyn Channel>,
    /// `data-file`.
    pub(super) data_file: Option<Rc<dyn Channel>>,
    /// Where the guest's data lies: one of those, or, if the image is encrypted, plain data on top of it.
    pub(super) data: Rc<dyn Channel>,
    /// Whether the image is encrypted.
    pub(super) is_encrypted: bool,
    /// `backing`, and its bytes.
    pub(super) backing: Option<(Rc<dyn Channel>, u64)>,
    /// For data that is copied.
    pub(super) scratch: Scratch,
    /// What requests of this channel cost the loop.
    pub(super) meter: Meter,
}

impl Channels {
    /// All of the nodes below.
    pub(super) fn all(&self) -> impl Iterator<Item = &Rc<dyn Channel>> {
        let backing = self.backing.iter().map(|(channel, _)| channel);
        std::iter::once(&self.file).chain(&self.data_file).chain(backing)
    }

    /// Where the guest's data lies.
    pub(super) fn data(&self) -> &Rc<dyn Channel> {
        &self.data
    }
}

/// A request to a node below, under way, and its answer.
///
/// Dropping it leaves the request under way; its memory is the request's.
pub(super) struct Transfer(Rc<Pending>);

#[derive(Default)]
struct Pending {
    answer: Cell<Option<(Result<(), Errno>, IoBufs)>>,
    waker: Cell<Option<Waker>>,
    /// Of what writes: given back with the answer.
    ticket: Cell<Option<Ticket>>,
}

impl RequestOwner for Pending {
    fn complete(&self, _tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        drop(self.ticket.take());
        self.answer.set(Some((result, bufs)));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Transfer {
    /// Sends a request that leaves the image as it is.
    pub(super) fn start(
        to: &Rc<dyn Channel>,
        op: Op,
        offset: u64,
        len: u64,
        bufs: IoBufs,
    ) -> Transfer {
        Self::send((to, Part::Data), op, offset, len, bufs, None)
    }

    /// Sends a request for metadata to the image's file.
    pub(super) fn start_part(
        channels: &Channels,
        part: Part,
        op: Op,
        offset: u64,
        bufs: IoBufs,
    ) -> Transfer {
        let len = bufs.len() as u64;
        Self::send((&channels.file, part), op, offset, len, bufs, None)
    }

    /// Sends one that writes, and holds the ticket until it is answered.
    pub(super) fn start_write(
        to: &Rc<dyn Channel>,
        op: Op,
        offset: u64,
        len: u64,
        bufs: IoBufs,
        ticket: Ticket,
    ) -> Transfer {
        Self::send((to, Part::Data), op, offset, len, bufs, Some(ticket))
    }

    /// Sends a write of something else than the guest's data to the image's file, and holds the ticket until the write is
    /// answered.
    pub(super) fn start_part_write(
        channels: &Channels,
        part: Part,
        offset: u64,
        bufs: IoBufs,
        ticket: Ticket,
    ) -> Transfer {
        let (op, len) = (Op::Write { fua: false }, bufs.len() as u64);
        Self::send((&channels.file, part), op, offset, len, bufs, Some(ticket))
    }

    fn send(
        (to, part): (&Rc<dyn Channel>, Part),
        op: Op,
        offset: u64,
        len: u64,
        bufs: IoBufs,
        ticket: Option<Ticket>,
    ) -> Transfer {
        let pending = Rc::new(Pending { ticket: Cell::new(ticket), ..Pending::default() });
        let answer = pending.clone() as Rc<dyn RequestOwner>;
        let mut request = Request::new(op, offset, len, bufs, &answer, 0);
        request.part = part;
        to.submit(request);
        Transfer(pending)
    }
}

impl Future for Transfer {
    type Output = (Result<(), Errno>, IoBufs);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => {
                let old = self.0.waker.replace(Some(cx.waker().clone()));
                drop(old);
                Poll::Pending
            }
        }
    }
}
