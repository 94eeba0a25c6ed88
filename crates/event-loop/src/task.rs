//! Tasks: futures on the loop, for rare work or work with many steps.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::buf::IoBufs;
use crate::event_loop::{EventLoop, Inner};
use crate::executor::{Task, Wakers};
use crate::op::{Engine, IoOp, IoTarget, LoopFile, count};
use crate::slots::SlotId;
use crate::timers::TimerId;

/// Yields to the loop's other tasks and sources (fairness contract).
///
/// For a task that always finds more to do.
pub async fn take_turns() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Waits for `work`, but no longer than for `end`.
///
/// Polls both in this order, and drops both when one of them is done.
///
/// # Errors
///
/// The result of `end`, which came first.
pub async fn until<T, U>(
    work: impl Future<Output = T>,
    end: impl Future<Output = U>,
) -> Result<T, U> {
    let (mut work, mut end) = (pin!(work), pin!(end));
    poll_fn(|cx| match work.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => end.as_mut().poll(cx).map(Err),
    })
    .await
}

/// The time of [`EventLoop::timeout`] has passed.
///
/// As an [`io::Error`], its kind is [`TimedOut`](io::ErrorKind::TimedOut).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for io::Error {
    fn from(elapsed: Elapsed) -> Self {
        io::Error::new(io::ErrorKind::TimedOut, elapsed)
    }
}

/// Why a task has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum JoinError {
    /// [`JoinHandle::abort`] has dropped the task.
    Aborted,
    /// The loop has stopped and dropped the task.
    LoopGone,
    /// The handle has returned the result before.
    Taken,
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            JoinError::Aborted => "the task was aborted",
            JoinError::LoopGone => "the event loop has stopped and dropped the task",
            JoinError::Taken => "the task's result was taken before",
        })
    }
}

impl std::error::Error for JoinError {}

impl From<JoinError> for io::Error {
    fn from(error: JoinError) -> Self {
        io::Error::other(error)
    }
}

/// A task's result, awaited by another task.
///
/// Dropping the handle does not end the task; [`abort`](Self::abort) does.
pub struct JoinHandle<T> {
    task: Rc<dyn Join<T>>,
    /// Of the task. `None`: the loop had stopped before.
    wakers: Option<Rc<Wakers>>,
}

/// A task: first its future, then its result, in one allocation. It stays in an `Rc` and is never moved out.
struct Spawned<F: Future> {
    stage: RefCell<Stage<F>>,
    joiner: Cell<Option<Waker>>,
    /// The handle was dropped.
    detached: Cell<bool>,
    /// The task has aborted itself, during its poll.
    aborted: Cell<bool>,
}

enum Stage<F: Future> {
    Running(F),
    Done(F::Output),
    /// There is no result, or no longer.
    Over(JoinError),
}

impl<F: Future> Spawned<F> {
    fn leave(&self, stage: Stage<F>) {
        // Assigned in place, as the future is pinned.
        *self.stage.borrow_mut() = stage;
        if let Some(joiner) = self.joiner.take() {
            joiner.wake();
        }
    }
}

impl<F: Future> Task for Spawned<F> {
    fn poll(&self, cx: &mut Context<'_>) -> bool {
        let result = {
            let mut stage = self.stage.borrow_mut();
            let Stage::Running(future) = &mut *stage else { return true };
            // SAFETY: the future is in an `Rc` that it is never moved out of. `leave` and this type's
            // drop, which drop it in place, are the only ends.
            unsafe { Pin::new_unchecked(future) }.poll(cx)
        };
        match result {
            Poll::Pending if !self.aborted.get() => return false,
            Poll::Pending => self.leave(Stage::Over(JoinError::Aborted)),
            Poll::Ready(_) if self.detached.get() => self.leave(Stage::Over(JoinError::Taken)),
            Poll::Ready(result) => self.leave(Stage::Done(result)),
        }
        true
    }

    fn cancel(&self) {
        self.leave(Stage::Over(JoinError::LoopGone));
    }
}

/// A task from its handle's side.
trait Join<T> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<T, JoinError>>;
    fn detach(&self);
    /// Drops the future. Returns whether the task's slot must be freed by a wake-up.
    fn abort(&self) -> bool;
}

impl<F: Future> Join<F::Output> for Spawned<F> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<F::Output, JoinError>> {
        // The task is awaiting itself: pending for ever.
        let Ok(mut stage) = self.stage.try_borrow_mut() else { return Poll::Pending };
        if let Stage::Running(_) = &*stage {
            drop(stage);
            let old = self.joiner.replace(Some(cx.waker().clone()));
            drop(old);
            return Poll::Pending;
        }
        if let Stage::Over(why) = &*stage {
            return Poll::Ready(Err(*why));
        }
        match std::mem::replace(&mut *stage, Stage::Over(JoinError::Taken)) {
            Stage::Done(result) => Poll::Ready(Ok(result)),
            Stage::Running(_) | Stage::Over(_) => Poll::Ready(Err(JoinError::Taken)),
        }
    }

    fn detach(&self) {
        self.detached.set(true);
        // Borrowed while the future is polled or dropped: not done.
        let done = match self.stage.try_borrow_mut() {
            Ok(mut stage) if matches!(*stage, Stage::Done(_)) => {
                std::mem::replace(&mut *stage, Stage::Over(JoinError::Taken))
            }
            _ => Stage::Over(JoinError::Taken),
        };
        drop((done, self.joiner.take()));
    }

    fn abort(&self) -> bool {
        match self.stage.try_borrow() {
            Ok(stage) if !matches!(*stage, Stage::Running(_)) => return false,
            Ok(_) => {}
            // The future is being polled, and calls this. Its poll's end drops it.
            Err(_) => {
                self.aborted.set(true);
                return false;
            }
        }
        self.leave(Stage::Over(JoinError::Aborted));
        true
    }
}

impl<T> JoinHandle<T> {
    /// Drops the task's future at once, and with it what the future holds.
    ///
    /// The handle then returns [`JoinError::Aborted`]. A task that has ended keeps its result. A task that aborts
    /// itself is dropped when it next waits.
    ///
    /// ```
    /// use event_loop::{EventLoop, JoinError, LoopConfig};
    ///
    /// let event_loop = EventLoop::new(LoopConfig::default())?;
    /// let task = event_loop.spawn(std::future::pending::<()>());
    /// task.abort();
    /// assert_eq!(event_loop.block_on(task)?, Err(JoinError::Aborted));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn abort(&self) {
        if self.task.abort()
            && let Some(wakers) = &self.wakers
        {
            wakers.wake();
        }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.task.poll_join(cx)
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        self.task.detach();
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").finish_non_exhaustive()
    }
}

impl EventLoop {
    /// Runs a future on this loop, from the next iteration on.
    ///
    /// The future is dropped unfinished when the loop stops, and at once if it has stopped. Its waker may be called on any thread. A future
    /// that never waits blocks the loop, so it has to return from time to time (fairness contract). Dropping
    /// the handle does not end the task.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let is_closing = self.0.closing.get();
        let stage =
            if is_closing { Stage::Over(JoinError::LoopGone) } else { Stage::Running(future) };
        let task = Rc::new(Spawned {
            stage: RefCell::new(stage),
            joiner: Cell::new(None),
            detached: Cell::new(false),
            aborted: Cell::new(false),
        });
        let wakers = (!is_closing).then(|| {
            let (_, wakers) = self.0.tasks.add(task.clone());
            self.0.shared.notify();
            wakers
        });
        JoinHandle { task, wakers }
    }

    /// Starts an operation and returns a future of its result and its memory.
    ///
    /// The result is the number of bytes, for operations that transfer some, else 0. Dropping the future cancels the
    /// operation; the loop keeps the memory until the operation is done (memory contract). The methods of
    /// [`LoopFile`] do the same with a caller's own buffers.
    ///
    /// # Errors
    ///
    /// The result is the errno with which the kernel has answered the operation; `ECANCELED` after
    /// [`cancel`](Self::cancel) or [`Operation::cancel`].
    ///
    /// # Panics
    ///
    /// The future panics if it is polled outside of the loop's iterations and nothing runs the loop, as it
    /// would wait for ever. [`block_on`](Self::block_on) and [`run`](Self::run) run the loop during their
    /// calls. The adapters for foreign loops do so from their first call on, like
    /// [`run_once`](Self::run_once), [`prepare`](Self::prepare) and [`pollable_fd`](Self::pollable_fd).
    pub fn operate(&self, file: &LoopFile, op: IoOp, engine: Engine, bufs: IoBufs) -> Operation {
        let state = Rc::new(Outcome::default());
        let target: Rc<dyn IoTarget> = state.clone();
        let id = self.start(file, op, engine, bufs, &target, 0);
        // A weak reference, as a task of the loop must not keep the loop alive.
        Operation { state, inner: Rc::downgrade(&self.0), id, is_over: false }
    }

    /// Completes at `deadline_ns` nanoseconds of loop time.
    ///
    /// Also completes when the loop shuts down. Dropping the future cancels the timer.
    ///
    /// # Panics
    ///
    /// The future panics as that of [`operate`](Self::operate).
    pub fn sleep_until(&self, deadline_ns: u64) -> impl Future<Output = ()> + use<> {
        // A weak reference, as in `operate`.
        struct Cancel(Weak<Inner>, TimerId);
        impl Drop for Cancel {
            fn drop(&mut self) {
                if let Some(inner) = self.0.upgrade() {
                    EventLoop(inner).cancel_timer(self.1);
                }
            }
        }
        let state = Rc::new(Outcome::default());
        let target: Rc<dyn IoTarget> = state.clone();
        let guard = Cancel(Rc::downgrade(&self.0), self.submit_timer(deadline_ns, &target, 0));
        async move {
            let poll = |cx: &mut Context<'_>| {
                let outcome = state.poll(cx);
                assert_turns(guard.0.upgrade().as_deref(), &outcome);
                outcome
            };
            poll_fn(poll).await;
        }
    }

    /// Completes `duration` after this call, or later.
    ///
    /// Resolution: nanoseconds. Otherwise as [`sleep_until`](Self::sleep_until).
    pub fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + use<> {
        // Not the iteration's time, which may lie in the past.
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.sleep_until(self.0.clock.now_ns().saturating_add(nanoseconds))
    }

    /// Waits for `work`, but no longer than `duration` from this call on.
    ///
    /// `work` is dropped when the time has passed. It is polled first: if it completes together with the deadline, its
    /// result counts. A loop that shuts down ends the wait, with [`Elapsed`].
    ///
    /// # Errors
    ///
    /// [`Elapsed`]: the time has passed.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use event_loop::{Elapsed, EventLoop, LoopConfig};
    ///
    /// let event_loop = EventLoop::new(LoopConfig::default())?;
    /// let never = event_loop.timeout(Duration::from_millis(1), std::future::pending::<()>());
    /// assert_eq!(event_loop.block_on(never)?, Err(Elapsed));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn timeout<F: Future>(
        &self,
        duration: Duration,
        work: F,
    ) -> impl Future<Output = Result<F::Output, Elapsed>> + use<F> {
        let end = self.sleep(duration);
        async move { until(work, end).await.map_err(|()| Elapsed) }
    }

    /// Runs the loop until `future` is done. The future may borrow.
    ///
    /// For tests, and for programs that do not call [`run`](Self::run). `future` is dropped when the call returns. Tasks
    /// that it woke have had their turn by then.
    ///
    /// # Errors
    ///
    /// Those of [`run_once`](Self::run_once); also if the loop is stopped before `future` is done.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use event_loop::{EventLoop, LoopConfig};
    ///
    /// let event_loop = EventLoop::new(LoopConfig::default())?;
    /// let mut ticks = 0;
    /// event_loop.block_on(async {
    ///     while ticks < 3 {
    ///         event_loop.sleep(Duration::from_millis(1)).await;
    ///         ticks += 1;
    ///     }
    /// })?;
    /// assert_eq!(ticks, 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn block_on<F: Future>(&self, future: F) -> io::Result<F::Output> {
        let mut future = pin!(future);
        let blocking = Blocking::new(self);
        loop {
            if !self.0.closing.get() && blocking.proxy.woken.take() {
                let turn = self.enter_iteration()?;
                let mut cx = Context::from_waker(blocking.wakers.given());
                let polled = self.section(|| future.as_mut().poll(&mut cx));
                drop(turn);
                if let Poll::Ready(value) = polled {
                    self.iterate(false)?;
                    return Ok(value);
                }
            }
            if self.is_stopping() {
                return Err(io::Error::other("the event loop was stopped"));
            }
            self.iterate(true)?;
        }
    }
}

/// The task that stands for the future of [`EventLoop::block_on`], which stays on that call's stack. Wake-ups of the
/// future wake the task, which notes them.
struct Proxy {
    woken: Cell<bool>,
}

impl Task for Proxy {
    fn poll(&self, _cx: &mut Context<'_>) -> bool {
        self.woken.set(true);
        false
    }

    fn cancel(&self) {}
}

/// A call of [`EventLoop::block_on`].
struct Blocking<'a> {
    event_loop: &'a EventLoop,
    proxy: Rc<Proxy>,
    id: SlotId,
    wakers: Rc<Wakers>,
}

impl<'a> Blocking<'a> {
    fn new(event_loop: &'a EventLoop) -> Self {
        let proxy = Rc::new(Proxy { woken: Cell::new(false) });
        let (id, wakers) = event_loop.0.tasks.add(proxy.clone());
        Blocking { event_loop, proxy, id, wakers }
    }
}

impl Drop for Blocking<'_> {
    fn drop(&mut self) {
        self.event_loop.0.tasks.remove(self.id);
    }
}

/// An operation in flight: a future of its result and its memory.
///
/// Dropping it cancels the operation, as far as that is possible: see [`cancel`](Self::cancel).
#[must_use = "dropping an operation cancels it"]
pub struct Operation {
    state: Rc<Outcome>,
    inner: Weak<Inner>,
    id: SlotId,
    /// Completed or detached.
    is_over: bool,
}

impl Operation {
    /// Tries to cancel the operation. Await the operation for its end.
    ///
    /// An operation that still waits, such as a read of a socket, completes with `ECANCELED` and has moved nothing. An
    /// operation in progress completes normally or with `EINTR`. Operations of pool threads and Linux AIO continue.
    ///
    /// The cost does not depend on what else is in flight.
    pub fn cancel(&self) {
        if let Some(inner) = self.inner.upgrade() {
            EventLoop(inner).cancel_slot(self.id);
        }
    }

    /// Lets the operation continue without the future.
    pub fn detach(mut self) {
        self.is_over = true;
    }
}

impl Future for Operation {
    type Output = (io::Result<usize>, IoBufs);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = self.state.poll(cx);
        assert_turns(self.inner.upgrade().as_deref(), &outcome);
        self.is_over |= outcome.is_ready();
        outcome.map(|(result, bufs)| (count(result), bufs))
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if !self.is_over {
            self.cancel();
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("is_over", &self.is_over).finish_non_exhaustive()
    }
}

/// Panics if `outcome` is pending and nothing runs the loop, as nothing would wake the task. `None`: the
/// loop was dropped.
fn assert_turns<T>(event_loop: Option<&Inner>, outcome: &Poll<T>) {
    let turns = event_loop.is_some_and(|inner| inner.turning.get() || inner.is_embedded.get());
    assert!(
        turns || outcome.is_ready(),
        "event loop {}: a future of the loop is awaited, and nothing turns the loop: await it in EventLoop::block_on or \
         in a task of EventLoop::spawn, or attach the loop to the foreign loop first",
        event_loop.map_or("(dropped)", |inner| &inner.shared.name),
    );
}

/// The completion of an operation awaited by a task.
#[derive(Default)]
struct Outcome {
    result: RefCell<Option<(i32, IoBufs)>>,
    waker: RefCell<Option<Waker>>,
}

impl IoTarget for Outcome {
    fn complete(&self, _token: u32, result: i32, bufs: IoBufs) {
        self.result.replace(Some((result, bufs)));
        // Outside of the borrow, as the waker may run any code.
        let waker = self.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Outcome {
    fn poll(&self, cx: &Context<'_>) -> Poll<(i32, IoBufs)> {
        match self.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                let old = self.waker.replace(Some(cx.waker().clone()));
                drop(old);
                Poll::Pending
            }
        }
    }
}
