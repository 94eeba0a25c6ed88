//! How tasks of the control loop wait for one another.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Tasks that wait for something to become true.
#[derive(Debug, Default)]
pub(crate) struct Signal(RefCell<Vec<Waker>>);

impl Signal {
    /// Wakes all waiting tasks, which check their condition again.
    pub(crate) fn notify(&self) {
        // A foreign waker may call `until` or `notify`: wake outside the borrow.
        let wakers = self.0.take();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until `look` returns a value. Calls `look` at once and after each [`notify`](Self::notify).
    pub(crate) async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|cx| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                let mut wakers = self.0.borrow_mut();
                if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        })
        .await
    }
}

/// A queue within the control loop's thread.
pub(super) struct Mailbox<T>(Rc<Shared<T>>);

struct Shared<T> {
    /// `None` once it is closed.
    messages: RefCell<Option<VecDeque<T>>>,
    arrived: Signal,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Mailbox(self.0.clone())
    }
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        let messages = RefCell::new(Some(VecDeque::new()));
        Mailbox(Rc::new(Shared { messages, arrived: Signal::default() }))
    }
}

impl<T> Mailbox<T> {
    /// Sends a message; one to a mailbox that is closed is dropped.
    pub(super) fn push(&self, message: T) {
        if let Some(messages) = self.0.messages.borrow_mut().as_mut() {
            messages.push_back(message);
        }
        self.0.arrived.notify();
    }

    /// Waits for the next message.
    pub(super) async fn next(&self) -> T {
        self.0.arrived.until(|| self.0.messages.borrow_mut().as_mut()?.pop_front()).await
    }

    /// Drops all messages, those to come as well.
    pub(super) fn close(&self) {
        let messages = self.0.messages.take();
        drop(messages);
    }
}
