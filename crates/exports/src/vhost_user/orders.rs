//! Orders to the service of an export, for a handover to another process.
//!
//! ```text
//! old: describe ── rings run, no message is taken ── stop ── nothing runs ──┬─ the process leaves
//!                            └───────────────────── run ─────┘            └─ resume
//! new: start, taken over ── memory is mapped ── waits ────────────────────── begin
//! ```

#![forbid(unsafe_code)]

use std::pin::Pin;

use event_loop::{mailbox, oneshot};

use super::handover::{SavedRings, SavedServer, SavedSession};

/// An order to a service. An error text gives the reason of a failure.
pub(crate) enum Order {
    /// Report the state, and receive no more messages and front ends.
    Describe(oneshot::Sender<Result<SavedServer, String>>),
    /// Flush the nodes, rings running.
    Flush(oneshot::Sender<Result<(), String>>),
    /// Stop all rings, then flush the nodes if the flag is set.
    Stop(bool, oneshot::Sender<Result<SavedRings, String>>),
    /// Run all stopped rings again, still without receiving messages. Answered when they run.
    Run(oneshot::Sender<Result<(), String>>),
    /// Continue as before the first order.
    Resume,
}

/// Hands an export over. Each order is given after the answer to the previous one.
pub struct HandOver(mailbox::Sender<Order>);

impl HandOver {
    pub(crate) fn new() -> (Self, mailbox::Receiver<Order>) {
        let (sender, receiver) = mailbox::channel();
        (HandOver(sender), receiver)
    }

    /// Returns the state for a handover.
    ///
    /// From here on, no message of the front end is received; the rings continue. Waits for the end of the
    /// present message.
    ///
    /// # Errors
    ///
    /// Why it cannot be handed over. The export continues after [`resume`](Self::resume).
    pub fn describe(&self) -> impl Future<Output = Result<SavedServer, String>> + use<> {
        self.ask(Order::Describe)
    }

    /// Flushes the nodes while rings run.
    ///
    /// Little is left then when the rings [stop](Self::stop).
    ///
    /// # Errors
    ///
    /// As of [`describe`](Self::describe); or of fdatasync(2).
    pub fn flush(&self) -> impl Future<Output = Result<(), String>> + use<> {
        self.ask(Order::Flush)
    }

    /// Stops all rings.
    ///
    /// The answer comes when nothing is in flight and, with `flush`, when the nodes are flushed.
    ///
    /// # Errors
    ///
    /// As of [`describe`](Self::describe).
    pub fn stop(&self, flush: bool) -> impl Future<Output = Result<SavedRings, String>> + use<> {
        self.ask(|answer| Order::Stop(flush, answer))
    }

    /// Runs all rings again, whether they have stopped yet or not.
    ///
    /// Messages of the front end are still not received, so that the rings can be stopped once more. The
    /// answer comes when they run.
    ///
    /// # Errors
    ///
    /// As of [`describe`](Self::describe).
    pub fn run(&self) -> impl Future<Output = Result<(), String>> + use<> {
        self.ask(Order::Run)
    }

    /// Continues as before the first order.
    pub fn resume(&self) {
        // An ended service has nothing to continue.
        let _ = self.0.send(Order::Resume);
    }

    /// Sends an order at once; the future is its answer.
    fn ask<T: 'static>(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<T, String>>) -> Order,
    ) -> Pin<Box<dyn Future<Output = Result<T, String>>>> {
        let (sender, answer) = oneshot::channel();
        // An ended service drops the sender, which fails the answer.
        let _ = self.0.send(order(sender));
        Box::pin(async move { answer.await.map_err(|gone| gone.to_string())? })
    }
}

/// State received from the previous process.
#[derive(Debug)]
pub struct TakenOver {
    /// Session with the front end that was connected. `None`: no front end was connected.
    pub session: Option<SavedSession>,
}

/// The messages that start the rings, and the sender to inform when they run.
pub(crate) type Begin = (SavedRings, oneshot::Sender<()>);

/// The channels of a server that waits to begin.
pub(crate) struct Beginning {
    pub(crate) session: Option<SavedSession>,
    /// Informed when everything is ready that does not depend on the stop of the old process.
    pub(crate) ready: oneshot::Sender<Result<(), String>>,
    pub(crate) begin: oneshot::Receiver<Begin>,
}
