//! Handing an export over to another process, and taking it over: what its service is told, and when.
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

/// What a service that may be handed over is told. The text says why something could not be done.
pub(crate) enum Order {
    /// Say what there is, and take no more messages and no more front ends.
    Describe(oneshot::Sender<Result<SavedServer, String>>),
    /// Flush the nodes, rings running.
    Flush(oneshot::Sender<Result<(), String>>),
    /// Stop all rings, then flush the nodes if that is said.
    Stop(bool, oneshot::Sender<Result<SavedRings, String>>),
    /// Have all rings run again that run no more, but hear nothing still. Answered when they do.
    Run(oneshot::Sender<Result<(), String>>),
    /// Go on as if nothing had been.
    Resume,
}

/// The way to have an export handed over. Each is asked after the one before it was answered.
pub struct HandOver(mailbox::Sender<Order>);

impl HandOver {
    pub(crate) fn new() -> (Self, mailbox::Receiver<Order>) {
        let (sender, receiver) = mailbox::channel();
        (HandOver(sender), receiver)
    }

    /// What there is to be handed over. From here on nothing that its front end says is heard; the
    /// rings run on. It waits for the message that is being carried out.
    ///
    /// # Errors
    ///
    /// Why it cannot be handed over; it goes on once it is told to [resume](Self::resume).
    pub fn describe(&self) -> impl Future<Output = Result<SavedServer, String>> + use<> {
        self.ask(Order::Describe)
    }

    /// Writes what the nodes have kept back, while rings run: so that little is left when they
    /// [stop](Self::stop).
    ///
    /// # Errors
    ///
    /// As of [`describe`](Self::describe); or of fdatasync(2).
    pub fn flush(&self) -> impl Future<Output = Result<(), String>> + use<> {
        self.ask(Order::Flush)
    }

    /// Stops all rings; the answer comes when nothing is in flight any more, and with `flush` when what
    /// the nodes have kept back is written.
    ///
    /// # Errors
    ///
    /// As of [`describe`](Self::describe).
    pub fn stop(&self, flush: bool) -> impl Future<Output = Result<SavedRings, String>> + use<> {
        self.ask(|answer| Order::Stop(flush, answer))
    }

    /// All rings run again, whether they have stopped yet or are about to; nothing else of the front end's is
    /// heard, for them to be stopped once more. The answer comes when they do.
    ///
    /// # Errors
    ///
    /// As of [`describe`](Self::describe).
    pub fn run(&self) -> impl Future<Output = Result<(), String>> + use<> {
        self.ask(Order::Run)
    }

    /// Goes on where it was.
    pub fn resume(&self) {
        // One that is gone has nothing to go on with.
        let _ = self.0.send(Order::Resume);
    }

    /// Asks at once; the answer is to be waited for.
    fn ask<T: 'static>(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<T, String>>) -> Order,
    ) -> Pin<Box<dyn Future<Output = Result<T, String>>>> {
        let (sender, answer) = oneshot::channel();
        // One that is gone drops the sender, which shows in the answer.
        let _ = self.0.send(order(sender));
        Box::pin(async move { answer.await.map_err(|gone| gone.to_string())? })
    }
}

/// What another process has handed over.
#[derive(Debug)]
pub struct TakenOver {
    /// Session with the front end that was connected. `None`: no front end was connected.
    pub session: Option<SavedSession>,
}

/// What starts the rings, and who is told that they run.
pub(crate) type Begin = (SavedRings, oneshot::Sender<()>);

/// What a server receives that waits to begin.
pub(crate) struct Beginning {
    pub(crate) session: Option<SavedSession>,
    /// Told once all is there that can be there before the old process has stopped.
    pub(crate) ready: oneshot::Sender<Result<(), String>>,
    pub(crate) begin: oneshot::Receiver<Begin>,
}
