//! Giving up copies that guests' requests wait for.
//!
//! A job that ends without success does not need its copies, and its target may never answer them. So the requests proceed at
//! once, and the job's end waits for the target only for a limited time.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use event_loop::{EventLoop, Slab, until};

use crate::listeners::{Listeners, Listening};
use crate::node::Channel;

/// How long the end of a job waits for copies that nothing waits for any more, nanoseconds. A copy that takes longer may reach
/// the target after the job's end.
const PATIENCE_NS: u64 = 10_000_000_000;

/// Whether a job has given up, for all threads.
#[derive(Default)]
pub(super) struct GivingUp {
    given_up: AtomicBool,
    channels: Listeners,
}

impl GivingUp {
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.channels.tell();
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}

/// The copies of one channel that requests wait for.
pub(super) struct PendingCopies {
    event_loop: EventLoop,
    /// The tasks that wait.
    tasks: RefCell<Slab<Waker>>,
    /// The loop's time at which the end of the job began to wait.
    since_ns: Cell<Option<u64>>,
    _listening: Listening,
}

impl PendingCopies {
    pub(super) fn new(event_loop: &EventLoop, job: &GivingUp) -> Rc<PendingCopies> {
        Rc::new_cyclic(|own| PendingCopies {
            event_loop: event_loop.clone(),
            tasks: RefCell::default(),
            since_ns: Cell::new(None),
            _listening: job.channels.listen(event_loop, own.clone(), |own: &Rc<Self>| own.wake()),
        })
    }

    fn wake(&self) {
        let tasks: Vec<Waker> = self.tasks.borrow().values().cloned().collect();
        tasks.into_iter().for_each(Waker::wake);
    }

    /// Returns what `copying` gives. `None`: the job has given up before. A request of the copy may be in flight then, and use its
    /// memory.
    pub(super) async fn wait_for<T>(
        &self,
        job: &GivingUp,
        copying: impl Future<Output = T>,
    ) -> Option<T> {
        let task = self.tasks.borrow_mut().insert(Waker::noop().clone());
        let given_up = poll_fn(|cx| {
            if job.is_given_up() {
                return Poll::Ready(());
            }
            if let Some(waker) = self.tasks.borrow_mut().get_mut(task) {
                waker.clone_from(cx.waker());
            }
            Poll::Pending
        });
        let copied = until(copying, given_up).await.ok();
        self.tasks.borrow_mut().remove(task);
        copied
    }

    /// Returns how many requests to the target a drain has to wait for.
    pub(super) fn in_flight(&self, job: &GivingUp, target: &Rc<dyn Channel>) -> usize {
        if !job.is_given_up() {
            return target.in_flight();
        }
        let now = self.event_loop.now_ns();
        let since = self.since_ns.get().unwrap_or(now);
        self.since_ns.set(Some(since));
        match now.saturating_sub(since) < PATIENCE_NS {
            true => target.in_flight(),
            false => 0,
        }
    }
}
