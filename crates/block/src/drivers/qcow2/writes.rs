//! Which writes to an image's files are under way, on all loops.
//!
//! A task may end before a write that it began, when its loop ends. Before clusters that such a write
//! may touch are used for something else, [`Writes::settle`] waits for it.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use event_loop::sync::lock;

/// The writes to the files of an image.
#[derive(Debug, Default)]
pub(super) struct Writes {
    state: Mutex<WriteState>,
    /// Writes have ended since the last flush began.
    unflushed: AtomicBool,
}

#[derive(Debug, Default)]
struct WriteState {
    next: u64,
    under_way: BTreeSet<u64>,
    waiting: Vec<Waker>,
}

/// A write that is under way until this is dropped.
#[derive(Debug)]
pub(super) struct Ticket {
    writes: Arc<Writes>,
    number: u64,
}

impl Writes {
    /// Takes note of a write that begins.
    pub(super) fn begin(self: &Arc<Self>) -> Ticket {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.under_way.insert(number);
        drop(state);
        Ticket { writes: self.clone(), number }
    }

    /// A write has ended.
    #[inline]
    pub(super) fn ended(&self) {
        if !self.unflushed.load(Ordering::Relaxed) {
            self.unflushed.store(true, Ordering::Relaxed);
        }
    }

    /// Whether writes have ended since the last flush began.
    pub(super) fn are_unflushed(&self) -> bool {
        self.unflushed.load(Ordering::Relaxed)
    }

    /// A flush begins.
    pub(super) fn begin_flush(&self) {
        self.unflushed.store(false, Ordering::Relaxed);
    }

    /// Waits until no write is under way that has begun before.
    pub(super) async fn settle(&self) {
        let until = lock(&self.state).next;
        poll_fn(|cx| {
            let mut state = lock(&self.state);
            if state.under_way.first().is_none_or(|first| *first >= until) {
                return Poll::Ready(());
            }
            state.waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.writes.ended();
        let waiting = {
            let mut state = lock(&self.writes.state);
            state.under_way.remove(&self.number);
            std::mem::take(&mut state.waiting)
        };
        // Outside of the lock. Those who have to wait longer come again.
        waiting.into_iter().for_each(Waker::wake);
    }
}
