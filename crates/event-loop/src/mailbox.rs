//! An ordered channel to a task on another loop. [`oneshot`](crate::oneshot) is the channel for one value.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use crate::handle::LoopGone;
use crate::sync::lock;

struct MailboxState<T> {
    queue: VecDeque<T>,
    waker: Option<Waker>,
    open: bool,
}

/// The sending end, for any thread. Dropping it ends the receiver.
pub struct Sender<T>(Arc<Mutex<MailboxState<T>>>);

/// The receiving end, for a task.
pub struct Receiver<T>(Arc<Mutex<MailboxState<T>>>);

/// Creates a channel.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = MailboxState { queue: VecDeque::new(), waker: None, open: true };
    let state = Arc::new(Mutex::new(state));
    (Sender(state.clone()), Receiver(state))
}

impl<T> Sender<T> {
    /// Sends a value.
    ///
    /// # Errors
    ///
    /// The receiver was dropped, with its loop.
    pub fn send(&self, value: T) -> Result<(), LoopGone> {
        let waker = {
            let mut state = lock(&self.0);
            if !state.open {
                return Err(LoopGone);
            }
            state.queue.push_back(value);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = lock(&self.0);
            state.open = false;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// Waits for the next value.
    ///
    /// Returns `None` once the sender was dropped and all values are received.
    pub async fn receive(&mut self) -> Option<T> {
        poll_fn(|cx| {
            let mut state = lock(&self.0);
            if let Some(value) = state.queue.pop_front() {
                return Poll::Ready(Some(value));
            }
            if !state.open {
                return Poll::Ready(None);
            }
            state.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let queue = {
            let mut state = lock(&self.0);
            state.open = false;
            std::mem::take(&mut state.queue)
        };
        // Outside of the lock, as the drop of a value may run any code.
        drop(queue);
    }
}
