//! A loop as a task of a Tokio runtime.
//!
//! The task waits for the loop's descriptor and its nearest deadline. Other tasks on its thread may use the
//! loop freely. Their operations are submitted at once. Futures of the loop
//! ([`operate`](EventLoop::operate), [`sleep_until`](EventLoop::sleep_until),
//! [`Readiness`](crate::Readiness)) can be awaited by Tokio's tasks as well as by the loop's own.

#![allow(unsafe_code)]

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

use super::descriptor;
use crate::event_loop::EventLoop;

/// Maximum distance of a deadline that Tokio's clock can represent for certain.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns a future that runs a loop within a Tokio runtime.
///
/// The future ends after [`stop`](crate::LoopHandle::stop). It then first finishes or cancels operations in
/// flight, as [`EventLoop::run`] does, which blocks the thread. Call this before any of the loop's operations
/// is awaited.
///
/// The future stays on the loop's thread: `Runtime::block_on`, `LocalSet::spawn_local`. Dropping it detaches
/// the loop, which may then run elsewhere. Timers have Tokio's resolution of a millisecond, and are never
/// early.
///
/// ```
/// use event_loop::{EventLoop, LoopConfig, RingChoice, RingFlags, foreign};
///
/// let event_loop = EventLoop::new(LoopConfig::default())?;
/// let handle = event_loop.handle();
/// event_loop.add_timer(event_loop.now_ns() + 1_000_000, move || handle.stop());
/// let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// runtime.block_on(foreign::tokio::run(&event_loop))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Unsupported`](io::ErrorKind::Unsupported): the loop has no descriptor to watch (DEFER_TASKRUN). Create
/// it with [`RingFlags::BEST`](crate::RingFlags::BEST). Errors of epoll_ctl(2) for the descriptor. Later
/// errors are those of [`EventLoop::run`].
///
/// # Panics
///
/// At the first poll, outside of a Tokio runtime or in one without I/O and time drivers (`enable_all`).
pub fn run(event_loop: &EventLoop) -> impl Future<Output = io::Result<()>> + use<> {
    // From now on, not from the first poll: tasks polled earlier may await operations.
    let fd = descriptor(event_loop);
    let event_loop = event_loop.clone();
    async move { turn(&event_loop, fd?).await }
}

async fn turn(event_loop: &EventLoop, fd: RawFd) -> io::Result<()> {
    let fd = LoopFd { fd, _event_loop: event_loop.clone() };
    // SAFETY: `LoopFd` always returns the same descriptor, and holds the loop, which keeps it open.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
    let result = turn_until_stopped(event_loop, &fd).await;
    drop(fd);
    let shut_down = event_loop.shut_down();
    result.and(shut_down)
}

/// The loop's descriptor, with the loop, which keeps it open.
struct LoopFd {
    fd: RawFd,
    _event_loop: EventLoop,
}

impl AsRawFd for LoopFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

async fn turn_until_stopped(event_loop: &EventLoop, fd: &AsyncFd<LoopFd>) -> io::Result<()> {
    let mut alarm = pin!(sleep_until(Instant::now() + FAR));
    // The deadline of the alarm, loop time.
    let mut set_to = None;
    while !event_loop.is_stopping() {
        let wait = event_loop.prepare()?;
        if wait != Some(0) {
            let deadline = event_loop.next_deadline();
            if let (Some(ns), true) = (wait, deadline != set_to) {
                alarm.as_mut().reset(Instant::now() + Duration::from_nanos(ns).min(FAR));
                set_to = deadline;
            }
            poll_fn(|cx| {
                // Tokio remembers an event until it is cleared. Clear it before `check`, so that a later event
                // fires again. Earlier events are found by `check` and then `prepare` on the ring itself.
                if let Poll::Ready(ready) = fd.poll_read_ready(cx) {
                    ready?.clear_ready();
                    return Poll::Ready(io::Result::Ok(()));
                }
                if wait.is_some() && alarm.as_mut().poll(cx).is_ready() {
                    set_to = None;
                    return Poll::Ready(Ok(()));
                }
                Poll::Pending
            })
            .await?;
        }
        if event_loop.check() {
            event_loop.dispatch()?;
        }
        if wait == Some(0) {
            // The loop did not wait: let the runtime's other tasks and drivers run (fairness contract).
            tokio::task::yield_now().await;
        }
    }
    Ok(())
}
