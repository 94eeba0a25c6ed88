//! The way into a loop from other threads.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::event_loop::EventLoop;
use crate::flag::Flag;
use crate::inbox::{Inbox, Pushed};
use crate::stats::LoopStats;

/// What other threads ask of a loop.
pub(crate) enum Message {
    /// Run this on the loop.
    Call(Box<dyn FnOnce(&EventLoop) + Send>),
    /// A bottom half was scheduled.
    BottomHalf(u64, Arc<Flag>),
    /// A task's waker was called.
    WakeTask(Arc<crate::executor::TaskWaker>),
    /// A pool thread has finished an operation.
    PoolResult {
        /// The operation's.
        user_data: u64,
        /// A count, or a negated errno.
        result: i32,
    },
    /// See [`LoopHandle::stop`].
    Stop,
}

/// What a loop shares with its handles.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) inbox: Inbox<Message>,
    /// Watched edge-triggered and never read: a write is an event, whatever the counter says.
    wake: EventFd,
    /// A sleeping loop is not woken: see [`Ablation::no_wake`](crate::Ablation::no_wake).
    no_wake: bool,
    pub(crate) stats: LoopStats,
}

impl Shared {
    pub(crate) fn new(name: &str, no_wake: bool) -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        // A thread cannot be named with a NUL in it.
        let name = name.replace('\0', "");
        Ok(Shared { name, inbox: Inbox::new(), wake, no_wake, stats: LoopStats::default() })
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Sends a message and wakes the loop if it sleeps, or has announced that it will: the only system
    /// call, made at most once per announcement (contract E1).
    pub(crate) fn send(&self, message: Message) -> Result<(), LoopGone> {
        match self.inbox.push(message) {
            Ok(Pushed::Done) => Ok(()),
            Ok(Pushed::WakeIt) => {
                if !self.no_wake {
                    self.wake();
                }
                Ok(())
            }
            Err(_) => Err(LoopGone),
        }
    }

    /// Wakes the loop if a foreign one sleeps for it: called on its own thread by what has given
    /// it something to do. Within an iteration it does nothing, at the price of a load.
    pub(crate) fn notify(&self) {
        if self.inbox.interrupt_sleep() && !self.no_wake {
            self.wake();
        }
    }

    fn wake(&self) {
        // The counter cannot overflow: it would take 2^64 wake-ups.
        let _ = self.wake.write(1);
        self.stats.wakes.add_from_any_thread(1);
    }

    /// [`send`](Self::send), of what a loop is told even when it is otherwise not woken.
    fn send_for_sure(&self, message: Message) -> Result<(), LoopGone> {
        self.send(message)?;
        if self.no_wake {
            self.wake();
        }
        Ok(())
    }
}

/// A loop as other threads see it: cheap to clone, may be sent anywhere.
///
/// Whatever is handed over takes effect without waiting for any other event; if the loop is awake
/// without a system call, if it sleeps with exactly one (contract E1).
#[derive(Clone)]
pub struct LoopHandle {
    shared: Arc<Shared>,
}

impl LoopHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        LoopHandle { shared }
    }

    /// Runs `call` on the loop's thread. Calls from one thread run in the order they were made.
    ///
    /// # Errors
    ///
    /// The loop is gone, and `call` was dropped.
    pub fn spawn(&self, call: impl FnOnce(&EventLoop) + Send + 'static) -> Result<(), LoopGone> {
        self.shared.send(Message::Call(Box::new(call)))
    }

    /// Stops the loop: it finishes what is in flight, and [`EventLoop::run`] returns
    /// (contract E12). Stopping twice is stopping once.
    pub fn stop(&self) {
        // A loop that is gone has stopped.
        let _ = self.shared.send_for_sure(Message::Stop);
    }

    /// What the loop has done so far.
    pub fn stats(&self) -> &LoopStats {
        &self.shared.stats
    }

    /// The loop's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Whether both are handles of one loop.
    pub fn is_same(&self, other: &LoopHandle) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn send_pool_result(&self, user_data: u64, result: i32) {
        // A loop waits for its pool before it goes, so this is never refused.
        let _ = self.shared.send_for_sure(Message::PoolResult { user_data, result });
    }

    pub(crate) fn send(&self, message: Message) -> Result<(), LoopGone> {
        self.shared.send(message)
    }
}

impl fmt::Debug for LoopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoopHandle({}, wake fd {})", self.shared.name, self.shared.wake.as_raw_fd())
    }
}

/// The loop has stopped and takes nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopGone;

impl fmt::Display for LoopGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the event loop has stopped")
    }
}

impl std::error::Error for LoopGone {}
