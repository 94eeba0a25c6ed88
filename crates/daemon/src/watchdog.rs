//! Signs of life for a service manager with a watchdog.

use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;

use event_loop::{EventLoop, LoopHandle, oneshot, until};

use crate::service_manager::ServiceManager;

/// Reports twice within `limit_ns` that the daemon is alive, if this loop runs and all `threads` have
/// answered: an answer is a turn of that thread's loop. It waits for a thread that is stuck in a system call or an endless
/// loop. Then the reports stop, the log names the thread, and the manager ends the daemon.
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
            asked.extend(is_there.then(|| (thread.name().to_owned(), answered)));
            is_there
        });
        for (name, answered) in asked {
            let mut answered = pin!(answered);
            // A thread that drops the question unanswered has ended, too.
            if until(answered.as_mut(), event_loop.sleep_until(next)).await.is_err() {
                let ms = limit_ns / 2 / 1_000_000;
                log::error!(
                    "watchdog: I/O thread \"{name}\" has not answered for {ms} ms: the service manager gets no sign of life \
                     until it does"
                );
                let _ = answered.await;
            }
        }
        manager.alive();
        event_loop.sleep_until(next).await;
    }
}
