//! One value from one thread to a task on another: the answer to what a loop was asked.
//!
//! ```
//! use event_loop::{IoThread, IoThreadConfig, oneshot};
//!
//! let thread = IoThread::spawn(IoThreadConfig::default())?;
//! let (sender, receiver) = oneshot::channel();
//! thread.handle().spawn(|event_loop| sender.send(event_loop.has_io_uring()))?;
//! assert_eq!(receiver.wait(), Ok(thread.ring().flags.is_some()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use crate::handle::LoopGone;
use crate::sync::lock;

struct OneshotState<T> {
    value: Option<T>,
    waker: Option<Waker>,
    sender_gone: bool,
}

/// The sending end, for any thread.
pub struct Sender<T>(Arc<Mutex<OneshotState<T>>>);

/// The receiving end: a future.
///
/// Completes with the value, or with [`LoopGone`] if the sender was dropped without one.
pub struct Receiver<T>(Arc<Mutex<OneshotState<T>>>);

/// Creates a channel for one value.
///
/// Dropping the sender unused ends the wait with [`LoopGone`].
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = Arc::new(Mutex::new(OneshotState { value: None, waker: None, sender_gone: false }));
    (Sender(state.clone()), Receiver(state))
}

/// Waits for the values of all channels.
///
/// Returns them in the order of the receivers.
///
/// # Errors
///
/// The item of a channel is [`LoopGone`] if its sender was dropped without a value.
///
/// ```
/// use event_loop::{EventLoop, LoopGone, oneshot};
///
/// let (first, first_receiver) = oneshot::channel();
/// let (second, second_receiver) = oneshot::channel();
/// second.send(2);
/// drop(first);
/// let all = oneshot::all(vec![first_receiver, second_receiver]);
/// assert_eq!(EventLoop::new(Default::default())?.block_on(all)?, [Err(LoopGone), Ok(2)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub async fn all<T>(receivers: Vec<Receiver<T>>) -> Vec<Result<T, LoopGone>> {
    let mut values = Vec::with_capacity(receivers.len());
    for receiver in receivers {
        values.push(receiver.await);
    }
    values
}

impl<T> Sender<T> {
    /// Sends the value and wakes the receiver.
    ///
    /// Without a receiver, the value is dropped with the channel.
    pub fn send(self, value: T) {
        lock(&self.0).value = Some(value);
    }

    /// Returns whether the receiver has not been dropped.
    pub fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = lock(&self.0);
            state.sender_gone = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// Blocks the calling thread until the value is there.
    ///
    /// A task uses `await` instead: on the thread of the sender's loop, this would never return.
    ///
    /// # Errors
    ///
    /// The sender was dropped without a value.
    pub fn wait(mut self) -> Result<T, LoopGone> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut self).poll(&mut context) {
                Poll::Ready(value) => return value,
                Poll::Pending => thread::park(),
            }
        }
    }
}

/// Ends the park of a thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<T> Future for Receiver<T> {
    /// `Err`: the sender is gone without a word, as when its loop has stopped.
    type Output = Result<T, LoopGone>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = lock(&self.0);
        if let Some(value) = state.value.take() {
            return Poll::Ready(Ok(value));
        }
        if state.sender_gone {
            return Poll::Ready(Err(LoopGone));
        }
        let old = state.waker.replace(cx.waker().clone());
        drop(state);
        drop(old);
        Poll::Pending
    }
}
