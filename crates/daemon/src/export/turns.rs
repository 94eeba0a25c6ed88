//! Tasks of an export that run one after the other.

use std::cell::Cell;
use std::rc::Rc;

use event_loop::{EventLoop, JoinHandle};

use crate::signal::Signal;

/// Lets a device be taken away, and served again, one after the other.
#[derive(Default)]
pub(super) struct Turns {
    is_taken: Cell<bool>,
    free: Signal,
}

impl Turns {
    /// Runs a task to its end, also if nothing waits for it any more, after those that run already.
    pub(super) fn run<T: 'static>(
        self: &Rc<Self>,
        event_loop: &EventLoop,
        task: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        let turns = self.clone();
        event_loop.spawn(async move {
            turns.free.until(|| (!turns.is_taken.replace(true)).then_some(())).await;
            let result = task.await;
            turns.is_taken.set(false);
            turns.free.notify();
            result
        })
    }
}
