//! Whether this process serves the clients of monitors and metrics.

use std::cell::Cell;

use event_loop::until;

use super::signal::Signal;

/// The period in which clients are accepted. During an upgrade, each client goes to the process that
/// serves.
#[derive(Default)]
pub(super) struct Turn {
    phase: Cell<Phase>,
    changed: Signal,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// This process is still starting. Another process may be serving.
    #[default]
    NotYet,
    Now,
    /// Another process serves.
    Over,
}

impl Turn {
    /// This process serves.
    pub(super) fn begin(&self) {
        self.become_now(Phase::Now);
    }

    /// Another process serves.
    pub(super) fn end(&self) {
        self.become_now(Phase::Over);
    }

    fn become_now(&self, phase: Phase) {
        self.phase.set(phase);
        self.changed.notify();
    }

    /// Whether the period has not begun.
    pub(super) fn is_not_yet(&self) -> bool {
        self.phase.get() == Phase::NotYet
    }

    /// Waits for the beginning of the period.
    pub(super) async fn begun(&self) {
        self.changed.until(|| (self.phase.get() != Phase::NotYet).then_some(())).await;
    }

    /// Returns the result of the future. After the end of the period, it stays pending for ever: the waiting
    /// task then keeps its listening socket. Dropping the socket would remove a file that belongs to the other
    /// process.
    pub(super) async fn unless_over<T>(&self, future: impl Future<Output = T>) -> T {
        let over = self.changed.until(|| (self.phase.get() == Phase::Over).then_some(()));
        match until(over, future).await {
            Ok(()) => std::future::pending().await,
            Err(given) => given,
        }
    }
}

#[cfg(test)]
mod tests {
    use event_loop::{EventLoop, LoopConfig};

    use super::*;

    #[test]
    fn clients_are_accepted_only_between_begin_and_end() {
        let control = EventLoop::new(LoopConfig::default()).unwrap();
        let ended = control.block_on(async {
            let turn = Turn::default();
            assert!(until(turn.begun(), async {}).await.is_err());
            turn.begin();
            turn.begun().await;
            assert_eq!(turn.unless_over(async { 1 }).await, 1);
            turn.end();
            until(turn.unless_over(async { 2 }), async {}).await
        });
        assert_eq!(ended.unwrap(), Err(()));
    }
}
