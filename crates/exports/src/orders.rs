//! Orders to the service of an export, heeded between two messages.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use event_loop::{mailbox, oneshot, until};

/// The order to stop, also given by dropping its sender, and all others.
pub(crate) struct Orders<T> {
    stop: RefCell<oneshot::Receiver<()>>,
    others: RefCell<mailbox::Receiver<T>>,
}

impl<T> Orders<T> {
    pub(crate) fn new(stop: oneshot::Receiver<()>, others: mailbox::Receiver<T>) -> Self {
        Orders { stop: RefCell::new(stop), others: RefCell::new(others) }
    }

    /// The result of the future, or `None` if the service has to stop first.
    pub(crate) async fn unless_stopped<U>(&self, future: impl Future<Output = U>) -> Option<U> {
        let stop = poll_fn(|cx| Pin::new(&mut *self.stop.borrow_mut()).poll(cx));
        until(stop, future).await.err()
    }

    /// The result of the future, or an order that comes first.
    pub(crate) async fn unless_ordered<U>(&self, future: impl Future<Output = U>) -> Result<U, T> {
        let order = poll_fn(|cx| match pin!(self.others.borrow_mut().receive()).poll(cx) {
            Poll::Ready(Some(order)) => Poll::Ready(order),
            // There are no more senders: the service stops.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        });
        match until(order, future).await {
            Ok(order) => Err(order),
            Err(done) => Ok(done),
        }
    }

    /// The next order, or `None` if the service has to stop first.
    pub(crate) async fn next(&self) -> Option<T> {
        self.unless_stopped(self.unless_ordered(std::future::pending::<()>())).await?.err()
    }
}
