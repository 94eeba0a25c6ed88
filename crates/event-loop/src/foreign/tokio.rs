//! A loop as a task of a Tokio runtime.
//!
//! The task waits for the loop's descriptor and its nearest deadline, beside the runtime's other tasks.
//! Those may use the loop as they like, if they run on its thread: what they submit goes out at once,
//! and its futures ([`operate`](EventLoop::operate), [`sleep_until`](EventLoop::sleep_until),
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

/// How far off a deadline may be: what Tokio's clock can surely take.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns a future that turns a loop within a Tokio runtime until [`stop`](crate::LoopHandle::stop), then finishes or cancels
/// what is in flight, as [`EventLoop::run`] does; for that it blocks the thread. Call it before the loop's operations are awaited.
///
/// The future stays on the loop's thread: `Runtime::block_on`, `LocalSet::spawn_local`. Dropping it
/// takes the loop out of the runtime and leaves it as it is, to be turned by something else. Timers
/// have Tokio's resolution, a millisecond, and are never early.
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
/// [`Unsupported`](io::ErrorKind::Unsupported): the loop has no descriptor to watch (DEFER_TASKRUN),
/// create it with [`RingFlags::BEST`](crate::RingFlags::BEST). What epoll_ctl(2) says of the
/// descriptor. Afterwards as of [`EventLoop::run`].
///
/// # Panics
///
/// Outside of a Tokio runtime, or in one without its I/O and time drivers (`enable_all`), as everything
/// of Tokio's does that needs them; at the first poll, not later.
pub fn run(event_loop: &EventLoop) -> impl Future<Output = io::Result<()>> + use<> {
    // From the call on, not from the first poll: tasks that are polled before may await operations.
    let fd = descriptor(event_loop);
    let event_loop = event_loop.clone();
    async move { turn(&event_loop, fd?).await }
}

async fn turn(event_loop: &EventLoop, fd: RawFd) -> io::Result<()> {
    let fd = LoopFd { fd, _event_loop: event_loop.clone() };
    // SAFETY: `LoopFd` names one descriptor all the time, and holds the loop, which keeps it open.
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
    // The deadline that the alarm is set to, loop time.
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
                // Tokio hears of the descriptor once per event, and remembers. It has to forget before
                // `check` looks: what comes in after that is an event of its own, and what was there
                // before, `check` and then `prepare` see on the ring itself, event or not.
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
            // It did not wait: the runtime's other tasks and its drivers get their turn (E11).
            tokio::task::yield_now().await;
        }
    }
    Ok(())
}
