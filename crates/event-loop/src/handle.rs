//! Access to a loop from other threads.

use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::blocking::Answer;
use crate::event_loop::EventLoop;
use crate::flag::Flag;
use crate::inbox::{Inbox, Pushed};
use crate::oneshot::{self, Receiver};
use crate::stats::LoopStats;

/// A message to a loop.
pub(crate) enum Message {
    /// Run this closure on the loop.
    Call(Box<dyn FnOnce(&EventLoop) + Send>),
    /// A bottom half was scheduled.
    BottomHalf(u64, Arc<Flag>),
    /// A task's waker was called.
    WakeTask(Arc<crate::executor::TaskWaker>),
    /// A pool thread has finished an operation.
    PoolResult {
        /// The `user_data` of the operation.
        user_data: u64,
        /// A count, or a negated errno.
        result: i32,
        answer: Answer,
    },
    /// See [`LoopHandle::stop`].
    Stop,
}

/// State shared by a loop and its handles.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) inbox: Inbox<Message>,
    /// Watched edge-triggered and never read: each write is an event, whatever the counter.
    wake: EventFd,
    /// Do not wake a sleeping loop: see [`Ablation::no_wake`](crate::Ablation::no_wake).
    no_wake: bool,
    pub(crate) stats: LoopStats,
}

impl Shared {
    pub(crate) fn new(name: &str, no_wake: bool) -> io::Result<Self> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        // Thread names cannot contain NUL.
        let name = name.replace('\0', "");
        Ok(Shared { name, inbox: Inbox::new(), wake, no_wake, stats: LoopStats::default() })
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Sends a message, and wakes the loop if it sleeps or has announced a sleep. The wake-up is the only
    /// system call, made at most once per announcement (wake-up contract).
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

    /// Ends a foreign loop's sleep, after new work was added on its own thread. Within an iteration this
    /// costs only a load.
    pub(crate) fn notify(&self) {
        if self.inbox.interrupt_sleep() && !self.no_wake {
            self.wake();
        }
    }

    fn wake(&self) {
        // The counter cannot overflow, which would take 2^64 wake-ups.
        let _ = self.wake.write(1);
        self.stats.wakes.add_from_any_thread(1);
    }

    /// As [`send`](Self::send), but also wakes a loop with `no_wake`.
    fn send_for_sure(&self, message: Message) -> Result<(), LoopGone> {
        self.send(message)?;
        if self.no_wake {
            self.wake();
        }
        Ok(())
    }
}

/// A handle to a loop for other threads. Cheap to clone; `Send` and `Sync`.
///
/// Work handed over takes effect without waiting for any other event. It costs no system call if the loop
/// is awake, and exactly one if it sleeps (wake-up contract).
#[derive(Clone)]
pub struct LoopHandle {
    shared: Arc<Shared>,
}

impl LoopHandle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        LoopHandle { shared }
    }

    /// Runs `call` on the loop's thread.
    ///
    /// Calls from one thread run in the order they were made.
    ///
    /// # Errors
    ///
    /// The loop has ended, and `call` was dropped.
    pub fn spawn(&self, call: impl FnOnce(&EventLoop) + Send + 'static) -> Result<(), LoopGone> {
        self.shared.send(Message::Call(Box::new(call)))
    }

    /// Runs a future on the loop's thread.
    ///
    /// The receiver gets what the future gives, or [`LoopGone`] if the loop ends before that. Dropping the receiver leaves
    /// the future as it is.
    ///
    /// ```
    /// use event_loop::{IoThread, IoThreadConfig};
    ///
    /// let thread = IoThread::spawn(IoThreadConfig::default())?;
    /// let later = thread.handle().run(|event_loop| async move {
    ///     event_loop.sleep_until(event_loop.now_ns() + 1_000_000).await;
    ///     "a millisecond later"
    /// });
    /// assert_eq!(later.wait(), Ok("a millisecond later"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn run<T, F>(&self, future: impl FnOnce(EventLoop) -> F + Send + 'static) -> Receiver<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        // A loop that has ended drops the sender.
        let _ = self.spawn(move |event_loop| {
            let future = future(event_loop.clone());
            event_loop.spawn(async move { sender.send(future.await) });
        });
        receiver
    }

    /// Stops the loop: [`EventLoop::run`] finishes operations in flight and returns.
    ///
    /// A second stop has no effect (stop contract).
    pub fn stop(&self) {
        // Fails if the loop has ended.
        let _ = self.shared.send_for_sure(Message::Stop);
    }

    /// Returns the loop's counters.
    pub fn stats(&self) -> &LoopStats {
        &self.shared.stats
    }

    /// Returns the loop's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns whether both handles belong to one loop.
    pub fn is_same(&self, other: &LoopHandle) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn send_pool_result(&self, user_data: u64, result: i32, answer: Answer) {
        // Cannot fail: the loop waits for its pool before it ends.
        let _ = self.shared.send_for_sure(Message::PoolResult { user_data, result, answer });
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

/// The loop has ended and accepts nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopGone;

impl fmt::Display for LoopGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the event loop has stopped")
    }
}

impl std::error::Error for LoopGone {}

impl From<LoopGone> for io::Error {
    fn from(gone: LoopGone) -> Self {
        io::Error::other(gone)
    }
}
