//! What other threads want of a loop, and how a sleeping loop learns of it (contract E1).
//!
//! The hand-shake: a sender first puts its message into the queue, then looks at the loop's state;
//! the loop first announces that it will sleep, then looks whether there is a message. Both sides
//! have a full fence between the two steps, so at least one of them sees the other: either the loop
//! finds the message, or the sender finds the announcement and wakes it, once. A loop that gets no
//! messages takes no lock, however often it sleeps. Model-checked with loom.

use crate::sync::{AtomicU32, Mutex, Ordering, fence};

/// The loop runs and will look at its inbox before it sleeps.
const AWAKE: u32 = 0;
/// The loop sleeps or is about to; whoever sends wakes it.
const ASLEEP: u32 = 1;
/// Somebody has woken it already.
const WOKEN: u32 = 2;
/// The loop is gone; nothing is taken any more.
const CLOSED: u32 = 3;

/// A loop's queue of messages from other threads.
pub(crate) struct Inbox<T> {
    queue: Mutex<Vec<T>>,
    state: AtomicU32,
    /// Whether the queue has something: written under the lock, read by the loop without it.
    pending: AtomicU32,
}

/// What a sender has to do after [`Inbox::push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// Nothing: the loop is awake or has been woken.
    Done,
    /// Wake the loop.
    WakeIt,
}

impl<T> Inbox<T> {
    pub(crate) fn new() -> Self {
        Inbox {
            queue: Mutex::new(Vec::new()),
            state: AtomicU32::new(AWAKE),
            pending: AtomicU32::new(0),
        }
    }

    /// Puts a message in. Gives it back when the loop is gone.
    pub(crate) fn push(&self, message: T) -> Result<Pushed, T> {
        {
            let mut queue = lock(&self.queue);
            if self.state.load(Ordering::Relaxed) == CLOSED {
                return Err(message);
            }
            queue.push(message);
            self.pending.store(1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        match self.state.compare_exchange(ASLEEP, WOKEN, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(Pushed::WakeIt),
            Err(_) => Ok(Pushed::Done),
        }
    }

    /// Whether there is something to [`take`](Self::take). No lock, no system call; what a sender
    /// is just putting in may be missed until the loop announces its sleep.
    pub(crate) fn has_messages(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Swaps all messages into `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<T>) {
        let mut queue = lock(&self.queue);
        std::mem::swap(&mut *queue, into);
        self.pending.store(0, Ordering::Relaxed);
    }

    /// Announces that the loop will sleep. `false`: there are messages, it must not.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.state.store(ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let empty = !self.has_messages();
        if !empty {
            self.end_sleep();
        }
        empty
    }

    /// The loop is awake again.
    pub(crate) fn end_sleep(&self) {
        self.state.store(AWAKE, Ordering::Relaxed);
    }

    /// Takes no more messages; returns those that are there, to be dropped outside the lock.
    pub(crate) fn close(&self) -> Vec<T> {
        let mut queue = lock(&self.queue);
        self.state.store(CLOSED, Ordering::Relaxed);
        std::mem::take(&mut *queue)
    }
}

/// A panic of a thread that held the lock leaves the queue whole: a push either happened or not.
fn lock<T>(mutex: &Mutex<T>) -> crate::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
