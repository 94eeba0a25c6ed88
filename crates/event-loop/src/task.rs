//! Tasks: futures on the loop, for what takes many steps or is rare.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::buf::IoBufs;
use crate::event_loop::{EventLoop, Inner};
use crate::executor::Task;
use crate::handle::LoopGone;
use crate::op::{Engine, IoOp, IoTarget, LoopFile, count};
use crate::timers::TimerId;

/// Lets the loop's other tasks, and what else it has to do, have their turn (contract E11): for a task
/// that always finds more to do.
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

/// A task's result, for another task to wait for. Dropping it lets the task run on by itself.
pub struct JoinHandle<T>(Rc<dyn Join<T>>);

/// A task with its future, then its result, in one place. It stands behind an `Rc` from its birth
/// to its end, and nothing moves it out from there.
struct Spawned<F: Future> {
    stage: RefCell<Stage<F>>,
    joiner: Cell<Option<Waker>>,
    /// Nobody wants the result any more.
    detached: Cell<bool>,
}

enum Stage<F: Future> {
    Running(F),
    Done(F::Output),
    /// The result was taken, or there will be none.
    Over,
}

impl<F: Future> Spawned<F> {
    fn leave(&self, stage: Stage<F>) {
        // In place, never moved: the future was pinned.
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
            // SAFETY: the future lies in an `Rc` that nobody takes it out of, and is dropped in
            // place: `leave` and this type's own drop are all that ends it.
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

/// The side of a task that its handle sees.
trait Join<T> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<T, LoopGone>>;
    fn detach(&self);
}

impl<F: Future> Join<F::Output> for Spawned<F> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<F::Output, LoopGone>> {
        // A task that waits for itself waits for ever.
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
        // Within its own poll, or its future's drop, it is not done yet.
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
    /// `Err`: the loop has stopped, and dropped the task unfinished. (Also when asked again after
    /// the result.)
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
    /// Runs a future on this loop, from the next iteration on. It is dropped unfinished when the
    /// loop stops. Its waker may be called on any thread. A future that never waits keeps the loop
    /// from everything else: it is to return now and then (contract E11). The handle may be
    /// dropped; the task runs on.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let task = Rc::new(Spawned {
            stage: RefCell::new(Stage::Running(future)),
            joiner: Cell::new(None),
            detached: Cell::new(false),
        });
        self.0.tasks.add(task.clone());
        self.0.shared.notify();
        JoinHandle(task)
    }

    /// Starts an operation and returns a future of its result and its memory.
    ///
    /// The result is a count, of bytes for operations that transfer some, or the operation's errno. Dropping the future
    /// detaches: the loop keeps the memory until the operation is done (contract E8).
    ///
    /// # Panics
    ///
    /// The future, if it would wait for ever: it is polled outside of the loop's iterations, and nothing turns the loop.
    /// These turn it: [`block_on`](Self::block_on) and [`run`](Self::run) while they run; from their first call on
    /// [`run_once`](Self::run_once), [`prepare`](Self::prepare), [`pollable_fd`](Self::pollable_fd) and the
    /// adapters for foreign loops.
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
        // A task of the loop must not keep the loop.
        let inner = Rc::downgrade(&self.0);
        poll_fn(move |cx| {
            let outcome = state.poll(cx);
            assert_turns(inner.upgrade().as_deref(), &outcome);
            outcome.map(|(result, bufs)| (count(result), bufs))
        })
    }

    /// Completes at `deadline_ns`, loop time, or when the loop shuts down. Dropping the future cancels
    /// the timer.
    ///
    /// # Panics
    ///
    /// The future, as that of [`operate`](Self::operate).
    pub fn sleep_until(&self, deadline_ns: u64) -> impl Future<Output = ()> + use<> {
        struct Cancel(EventLoop, TimerId);
        impl Drop for Cancel {
            fn drop(&mut self) {
                self.0.cancel_timer(self.1);
            }
        }
        let state = Rc::new(Outcome::default());
        let target: Rc<dyn IoTarget> = state.clone();
        let guard = Cancel(self.clone(), self.submit_timer(deadline_ns, &target, 0));
        async move {
            let poll = |cx: &mut Context<'_>| {
                let outcome = state.poll(cx);
                assert_turns(Some(&guard.0.0), &outcome);
                outcome
            };
            poll_fn(poll).await;
        }
    }

    /// Runs the loop until `future` is done: for tests and for programs without a `run` of their
    /// own.
    ///
    /// # Errors
    ///
    /// As of [`run_once`](Self::run_once); also when the loop is stopped before `future` is done.
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

/// Panics if `outcome` is pending and nothing turns the loop: nothing would wake the task. `None`: the loop was dropped.
fn assert_turns<T>(event_loop: Option<&Inner>, outcome: &Poll<T>) {
    let turns = event_loop.is_some_and(|inner| inner.turning.get() || inner.is_embedded.get());
    assert!(
        turns || outcome.is_ready(),
        "event loop {}: a future of the loop is awaited, and nothing turns the loop: await it in EventLoop::block_on or \
         in a task of EventLoop::spawn, or attach the loop to the foreign loop first",
        event_loop.map_or("(dropped)", |inner| &inner.shared.name),
    );
}

/// The completion of an operation that a task waits for.
#[derive(Default)]
struct Outcome {
    result: RefCell<Option<(i32, IoBufs)>>,
    waker: RefCell<Option<Waker>>,
}

impl IoTarget for Outcome {
    fn complete(&self, _token: u32, result: i32, bufs: IoBufs) {
        self.result.replace(Some((result, bufs)));
        // Somebody else's waker may do anything: not within the borrow.
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
