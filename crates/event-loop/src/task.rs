//! Tasks: futures on the loop, for what takes many steps or is rare.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::buf::IoBufs;
use crate::event_loop::EventLoop;
use crate::flag::Flag;
use crate::handle::{LoopHandle, Message};
use crate::op::{Engine, IoOp, IoTarget, LoopFile};
use crate::timers::TimerId;

type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

/// A loop's tasks.
#[derive(Default)]
pub(crate) struct Tasks {
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    tasks: HashMap<u64, Task>,
    ready: VecDeque<u64>,
    next_id: u64,
}

struct Task {
    /// Taken out while it is polled.
    future: Option<LocalFuture>,
    waker: Arc<TaskWaker>,
}

/// Wakes a task from any thread.
pub(crate) struct TaskWaker {
    id: u64,
    /// Stands in the ready list, or a message for it is on its way.
    woken: Flag,
    handle: LoopHandle,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        if self.woken.raise() {
            let handle = self.handle.clone();
            // A loop that is gone has dropped the task.
            let _ = handle.send(Message::WakeTask(self));
        }
    }
}

impl Tasks {
    pub(crate) fn has_ready(&self) -> bool {
        !self.inner.borrow().ready.is_empty()
    }

    pub(crate) fn make_ready(&self, waker: &TaskWaker) {
        self.inner.borrow_mut().ready.push_back(waker.id);
    }

    fn spawn(&self, future: LocalFuture, handle: LoopHandle) {
        let mut inner = self.inner.borrow_mut();
        let id = inner.next_id;
        inner.next_id += 1;
        let waker = Arc::new(TaskWaker { id, woken: Flag::new(true), handle });
        inner.tasks.insert(id, Task { future: Some(future), waker });
        inner.ready.push_back(id);
    }

    /// Polls the tasks that are ready now; those made ready meanwhile are for the next iteration.
    pub(crate) fn run_ready(&self) {
        let turns = self.inner.borrow().ready.len();
        for _ in 0..turns {
            let Some((id, mut future, waker)) = self.take_ready() else { continue };
            // Before it runs, so that a wake-up meanwhile counts.
            waker.woken.lower();
            let std_waker = Waker::from(waker);
            let done = future.as_mut().poll(&mut Context::from_waker(&std_waker)).is_ready();
            let mut inner = self.inner.borrow_mut();
            if done {
                let task = inner.tasks.remove(&id);
                drop(inner);
                drop(task);
            } else if let Some(task) = inner.tasks.get_mut(&id) {
                task.future = Some(future);
            }
        }
    }

    fn take_ready(&self) -> Option<(u64, LocalFuture, Arc<TaskWaker>)> {
        let mut inner = self.inner.borrow_mut();
        let id = inner.ready.pop_front()?;
        let task = inner.tasks.get_mut(&id)?;
        Some((id, task.future.take()?, task.waker.clone()))
    }

    /// Drops all tasks. `false`: there was none.
    pub(crate) fn clear(&self) -> bool {
        // Dropping a future may wake or spawn others: outside the borrow.
        let tasks = {
            let mut inner = self.inner.borrow_mut();
            inner.ready.clear();
            std::mem::take(&mut inner.tasks)
        };
        !tasks.is_empty()
    }
}

impl EventLoop {
    /// Runs a future on this loop, from the next iteration on. It is dropped unfinished when the
    /// loop stops. Its waker may be called on any thread. A future that never waits keeps the loop
    /// from everything else: it is to return now and then (contract E11).
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.0.tasks.spawn(Box::pin(future), self.handle());
        // Spawned from outside an iteration, say before `run`, the ready list is looked at anyway.
        self.0.shared.notify();
    }

    /// An operation as a future: the result as of [`IoTarget::complete`], and the memory.
    ///
    /// It starts at once. Dropping the future detaches: the loop keeps the memory until the
    /// operation is done (contract E8).
    pub fn operate(
        &self,
        file: &LoopFile,
        op: IoOp,
        engine: Engine,
        bufs: IoBufs,
    ) -> impl Future<Output = (i32, IoBufs)> + use<> {
        let state = Rc::new(Outcome::default());
        let target: Rc<dyn IoTarget> = state.clone();
        self.submit(file, op, engine, bufs, &target, 0);
        std::future::poll_fn(move |cx| state.poll(cx))
    }

    /// Completes at `deadline_ns`, loop time, or when the loop shuts down. Dropping the future cancels
    /// the timer.
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
            let _guard = guard;
            std::future::poll_fn(move |cx| state.poll(cx)).await;
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
            self.run_once(true)?;
        }
    }
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
