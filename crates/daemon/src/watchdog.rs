//! Signs of life for a service manager that has asked for them.

use std::cell::RefCell;
use std::rc::Rc;

use event_loop::{EventLoop, LoopHandle, oneshot};

use crate::service_manager::ServiceManager;

/// Tells the manager that the daemon lives, twice within `limit_ns`, for as long as this loop turns and all of
/// the `threads` have answered. One that is stuck in a system call, or turns without end, is waited for: the
/// manager hears nothing more, and ends the daemon.
pub(super) async fn watch(
    event_loop: EventLoop,
    threads: Rc<RefCell<Vec<LoopHandle>>>,
    limit_ns: u64,
    manager: Rc<ServiceManager>,
) {
    loop {
        let next = event_loop.now_ns() + limit_ns / 2;
        let mut asked = Vec::new();
        threads.borrow_mut().retain(|thread| {
            let (answer, answered) = oneshot::channel();
            // One that cannot be asked has ended, which others have seen.
            let is_there = thread.spawn(move |_| answer.send(())).is_ok();
            asked.extend(is_there.then_some(answered));
            is_there
        });
        for answered in asked {
            // So has one that goes without an answer.
            let _ = answered.await;
        }
        manager.alive();
        event_loop.sleep_until(next).await;
    }
}
