//! Signs of life for a service manager with a watchdog.

use std::cell::RefCell;
use std::rc::Rc;

use event_loop::{EventLoop, LoopHandle, oneshot};

use crate::service_manager::ServiceManager;

/// Reports twice within `limit_ns` that the daemon is alive, if this loop runs and all `threads` have
/// answered. It waits for a thread that is stuck in a system call or an endless loop. Then the reports stop, and
/// the manager ends the daemon.
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
            // A thread that cannot be asked has ended, which is handled elsewhere.
            let is_there = thread.spawn(move |_| answer.send(())).is_ok();
            asked.extend(is_there.then_some(answered));
            is_there
        });
        for answered in asked {
            // A thread that drops the question unanswered has ended, too.
            let _ = answered.await;
        }
        manager.alive();
        event_loop.sleep_until(next).await;
    }
}
