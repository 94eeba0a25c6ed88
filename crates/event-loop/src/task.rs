//! Tasks: futures on the loop, for rare work or work with many steps.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use crate::buf::IoBufs;
use crate::event_loop::{EventLoop, Inner};
use crate::executor::Task;
use crate::handle::LoopGone;
use crate::op::{Engine, IoOp, IoTarget, LoopFile, count};
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

/// A task's result, awaited by another task.
///
/// Dropping the handle does not end the task.
pub struct JoinHandle<T>(Rc<dyn Join<T>>);

/// A task: first its future, then its result, in one allocation. It stays in an `Rc` and is never moved out.
struct Spawned<F: Future> {
    stage: RefCell<Stage<F>>,
    joiner: Cell<Option<Waker>>,
    /// The handle was dropped.
    detached: Cell<bool>,
}

enum Stage<F: Future> {
    Running(F),
    Done(F::Output),
    /// The result was taken, or the task was dropped unfinished.
    Over,
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
            Poll::Pending => return false,
            Poll::Ready(_) if self.detached.get() => self.leave(Stage::Over),
            Poll::Ready(result) => self.leave(Stage::Done(result)),
        }
        true
    }

    fn cancel(&self) {
        self.leave(Stage::Over);
    }
}

/// A task from its handle's side.
trait Join<T> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<T, LoopGone>>;
    fn detach(&self);
}

impl<F: Future> Join<F::Output> for Spawned<F> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<F::Output, LoopGone>> {
        // The task is awaiting itself: pending for ever.
        let Ok(mut stage) = self.stage.try_borrow_mut() else { return Poll::Pending };
        if let Stage::Running(_) = &*stage {
            drop(stage);
            let old = self.joiner.replace(Some(cx.waker().clone()));
            drop(old);
            return Poll::Pending;
        }
        match std::mem::replace(&mut *stage, Stage::Over) {
            Stage::Done(result) => Poll::Ready(Ok(result)),
            Stage::Running(_) | Stage::Over => Poll::Ready(Err(LoopGone)),
        }
    }

    fn detach(&self) {
        self.detached.set(true);
        // Borrowed while the future is polled or dropped: not done.
        let done = match self.stage.try_borrow_mut() {
            Ok(mut stage) if matches!(*stage, Stage::Done(_)) => {
                std::mem::replace(&mut *stage, Stage::Over)
            }
            _ => Stage::Over,
        };
        drop((done, self.joiner.take()));
    }
}

impl<T> Future for JoinHandle<T> {
    /// `Err`: the loop has stopped and dropped the task unfinished, or the result was taken before.
    type Output = Result<T, LoopGone>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_join(cx)
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        self.0.detach();
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
        let stage = if is_closing { Stage::Over } else { Stage::Running(future) };
        let task = Rc::new(Spawned {
            stage: RefCell::new(stage),
            joiner: Cell::new(None),
            detached: Cell::new(false),
        });
        if !is_closing {
            self.0.tasks.add(task.clone());
            self.0.shared.notify();
        }
        JoinHandle(task)
    }

    /// Starts an operation and returns a future of its result and its memory.
    ///
    /// The result is the number of bytes, for operations that transfer some, else 0. Dropping the future
    /// detaches it: the loop keeps the memory until the operation is done (memory contract).
    ///
    /// # Errors
    ///
    /// The result is the errno with which the kernel has answered the operation; `ECANCELED` after
    /// [`cancel`](Self::cancel).
    ///
    /// # Panics
    ///
    /// The future panics if it is polled outside of the loop's iterations and nothing runs the loop, as it
    /// would wait for ever. [`block_on`](Self::block_on) and [`run`](Self::run) run the loop during their
    /// calls. The adapters for foreign loops do so from their first call on, like
    /// [`run_once`](Self::run_once), [`prepare`](Self::prepare) and [`pollable_fd`](Self::pollable_fd).
    pub fn operate(
        &self,
        file: &LoopFile,
        op: IoOp,
        engine: Engine,
        bufs: IoBufs,
    ) -> impl Future<Output = (io::Result<usize>, IoBufs)> + use<> {
        let state = Rc::new(Outcome::default());
        let target: Rc<dyn IoTarget> = state.clone();
        self.submit(file, op, engine, bufs, &target, 0);
        // A weak reference, as a task of the loop must not keep the loop alive.
        let inner = Rc::downgrade(&self.0);
        poll_fn(move |cx| {
            let outcome = state.poll(cx);
            assert_turns(inner.upgrade().as_deref(), &outcome);
            outcome.map(|(result, bufs)| (count(result), bufs))
        })
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

    /// Runs the loop until `future` is done.
    ///
    /// For tests, and for programs that do not call `run`.
    ///
    /// # Errors
    ///
    /// Those of [`run_once`](Self::run_once); also if the loop is stopped before `future` is done.
    pub fn block_on<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> std::io::Result<T> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        self.spawn(async move {
            let value = future.await;
            slot.replace(Some(value));
        });
        loop {
            if let Some(value) = result.take() {
                return Ok(value);
            }
            if self.is_stopping() {
                return Err(std::io::Error::other("the event loop was stopped"));
            }
            self.iterate(true)?;
        }
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
