//! Giving up copies that guests' requests wait for.
//!
//! A job that ends without success does not need its copies, and its target may never answer them. So the requests proceed at
//! once, and the job's end waits for the target only for a limited time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use event_loop::{EventLoop, until};

use crate::node::{Channel, Watcher, Watchers};

/// How long requests to the target count after the job has given up, nanoseconds. Those of a target that works end within it,
/// so nothing of the job reaches the target later.
const PATIENCE_NS: u64 = 1_000_000_000;

/// Whether a job has given up, for all threads.
#[derive(Default)]
pub(super) struct GivingUp {
    given_up: AtomicBool,
    watchers: Watchers,
}

impl GivingUp {
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.watchers.tell();
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}

/// The copies of one channel that requests wait for.
pub(super) struct Waiting {
    event_loop: EventLoop,
    /// The tasks that wait, by number.
    tasks: RefCell<BTreeMap<u64, Waker>>,
    next: Cell<u64>,
    /// The loop's time at which the job has given up.
    since_ns: Cell<Option<u64>>,
}

impl Waiting {
    pub(super) fn new(event_loop: &EventLoop, job: &GivingUp) -> Rc<Waiting> {
        let waiting = Rc::new(Waiting {
            event_loop: event_loop.clone(),
            tasks: RefCell::default(),
            next: Cell::new(0),
            since_ns: Cell::new(None),
        });
        let (watcher, mut changes) = Watcher::new();
        job.watchers.add(watcher);
        let own = Rc::downgrade(&waiting);
        event_loop.spawn(async move {
            // `None`: the job has ended without giving up.
            if changes.next().await.is_some()
                && let Some(own) = own.upgrade()
            {
                own.since_ns.set(Some(own.event_loop.now_ns()));
                let tasks = own.tasks.take();
                tasks.into_values().for_each(Waker::wake);
            }
        });
        waiting
    }

    /// Returns what `copying` gives. `None`: the job gives up first. A request of the copy may be in flight then, and use its
    /// memory.
    pub(super) async fn for_copy<T>(
        &self,
        job: &GivingUp,
        copying: impl Future<Output = T>,
    ) -> Option<T> {
        let number = self.next.replace(self.next.get() + 1);
        let given_up = poll_fn(|cx| {
            if job.is_given_up() {
                return Poll::Ready(());
            }
            self.tasks.borrow_mut().insert(number, cx.waker().clone());
            Poll::Pending
        });
        let copied = until(copying, given_up).await.ok();
        self.tasks.borrow_mut().remove(&number);
        copied
    }

    /// Returns how many requests to the target count.
    pub(super) fn in_flight(&self, target: &Rc<dyn Channel>) -> usize {
        let waited = |since: u64| self.event_loop.now_ns().saturating_sub(since);
        match self.since_ns.get().is_some_and(|since| waited(since) >= PATIENCE_NS) {
            true => 0,
            false => target.in_flight(),
        }
    }
}
