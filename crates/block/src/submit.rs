//! Requests as futures, for tasks with many steps: jobs, formats.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use event_loop::IoBufs;
use nix::errno::Errno;

use crate::node::Channel;
use crate::request::{Op, Request, RequestOwner};

/// The answer of a request, and the task that waits for it.
#[derive(Default)]
struct Answer {
    answer: Cell<Option<(Result<(), Errno>, IoBufs)>>,
    waker: RefCell<Option<Waker>>,
}

impl RequestOwner for Answer {
    fn complete(&self, _tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        self.answer.set(Some((result, bufs)));
        let waker = self.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Sends a request down the channel and waits for its answer and the memory.
///
/// `offset` and `len` are in bytes. The request is sent at the first poll. Dropping the future discards the
/// answer, not the request.
///
/// Allocates, so it is not for the data plane.
///
/// # Errors
///
/// The errno with which the node has answered the request.
pub async fn submit(
    channel: &Rc<dyn Channel>,
    op: Op,
    offset: u64,
    len: u64,
    bufs: IoBufs,
) -> (Result<(), Errno>, IoBufs) {
    let answer = Rc::new(Answer::default());
    let to = answer.clone() as Rc<dyn RequestOwner>;
    channel.submit(Request::new(op, offset, len, bufs, &to, 0));
    poll_fn(|cx| match answer.answer.take() {
        Some(answer) => Poll::Ready(answer),
        None => {
            let before = answer.waker.replace(Some(cx.waker().clone()));
            drop(before);
            Poll::Pending
        }
    })
    .await
}
