//! Giving up copies that guests' requests wait for.
//!
//! A job that ends without success does not need its copies, and its target may never answer them. So the requests proceed at
//! once, and the job's end waits for the target only for a limited time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};

use event_loop::sync::lock;
use event_loop::{EventLoop, mailbox, until};

use crate::node::Channel;

/// How long the end of a job waits for copies that nothing waits for any more, nanoseconds. A copy that takes longer may reach
/// the target after the job's end.
const PATIENCE_NS: u64 = 10_000_000_000;

/// Whether a job has given up, for all threads.
#[derive(Default)]
pub(super) struct GivingUp {
    given_up: AtomicBool,
    channels: Mutex<Vec<Weak<mailbox::Sender<()>>>>,
}

impl GivingUp {
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        for channel in lock(&self.channels).iter().filter_map(Weak::upgrade) {
            // Fails if the channel's loop has ended.
            let _ = channel.send(());
        }
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Returns a receiver of [`give_up`](Self::give_up), which ends when the sender is dropped.
    fn listen(&self) -> (Arc<mailbox::Sender<()>>, mailbox::Receiver<()>) {
        let (sender, receiver) = mailbox::channel();
        let sender = Arc::new(sender);
        let mut channels = lock(&self.channels);
        channels.retain(|channel| channel.strong_count() > 0);
        channels.push(Arc::downgrade(&sender));
        (sender, receiver)
    }
}

/// The copies of one channel that requests wait for.
pub(super) struct PendingCopies {
    event_loop: EventLoop,
    /// The tasks that wait, by number.
    tasks: RefCell<BTreeMap<u64, Waker>>,
    next: Cell<u64>,
    /// The loop's time at which the end of the job began to wait.
    since_ns: Cell<Option<u64>>,
    /// Its receiver is a task on the loop, which ends with it.
    _listening: Arc<mailbox::Sender<()>>,
}

impl PendingCopies {
    pub(super) fn new(event_loop: &EventLoop, job: &GivingUp) -> Rc<PendingCopies> {
        let (listening, mut given_up) = job.listen();
        let pending = Rc::new(PendingCopies {
            event_loop: event_loop.clone(),
            tasks: RefCell::default(),
            next: Cell::new(0),
            since_ns: Cell::new(None),
            _listening: listening,
        });
        let own = Rc::downgrade(&pending);
        event_loop.spawn(async move {
            while let Some(()) = given_up.receive().await {
                let Some(own) = own.upgrade() else { return };
                let tasks = own.tasks.take();
                tasks.into_values().for_each(Waker::wake);
            }
        });
        pending
    }

    /// Returns what `copying` gives. `None`: the job gives up first. A request of the copy may be in flight then, and use its
    /// memory.
    pub(super) async fn wait_for<T>(
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
