//! A flag that one thread raises and a task on another awaits, with any runtime's waker.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use futures_util::task::AtomicWaker;

/// The flag, raised and awaited alternately.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    raised: AtomicBool,
    waker: AtomicWaker,
}

impl Signal {
    /// Raises the flag and wakes the waiting task.
    pub(crate) fn raise(&self) {
        self.raised.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Waits until the flag is raised, and lowers it.
    pub(crate) async fn wait(&self) {
        poll_fn(|cx| {
            if self.raised.swap(false, Ordering::AcqRel) {
                return Poll::Ready(());
            }
            self.waker.register(cx.waker());
            match self.raised.swap(false, Ordering::AcqRel) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}
