//! An export that runs, of whichever protocol.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use devices::QueueStats;
use devices::virtio::InFlight;
use event_loop::LoopHandle;
use exports::nbd::{NbdExport, SavedClient};
use exports::vhost_user::handover::SavedRings;
use exports::vhost_user::{ExportError, VhostUserExport};

use super::statistics::QueueStatistics;

/// Requests in flight, with the queue or connection of each.
type InFlightOf = Vec<(u64, InFlight)>;

/// What comes of a question, or why nothing does.
pub(super) type Asked<T> = Pin<Box<dyn Future<Output = Result<T, String>>>>;

/// What an export that stands still is handed over with.
pub(super) enum Stopped {
    Rings(SavedRings),
    Clients(Vec<SavedClient>),
}

/// An export that runs.
pub(super) enum Running {
    /// Over vhost-user.
    VhostUser(VhostUserExport),
    /// `nbd`.
    Nbd(NbdExport),
}

impl Running {
    /// Whether somebody uses it.
    pub(super) fn is_connected(&self) -> bool {
        match self {
            Running::VhostUser(export) => export.is_connected(),
            Running::Nbd(export) => export.is_connected(),
        }
    }

    /// Completes when NBD clients that have hung up no longer count as users.
    pub(super) fn hung_up_are_gone(&self) -> Pin<Box<dyn Future<Output = ()>>> {
        match self {
            Running::VhostUser(_) => Box::pin(ready(())),
            Running::Nbd(export) => Box::pin(export.hung_up_are_gone()),
        }
    }

    /// What it has done.
    pub(super) fn queue_stats(&self) -> &[Arc<QueueStats>] {
        match self {
            Running::VhostUser(export) => export.queue_stats(),
            Running::Nbd(export) => export.queue_stats(),
        }
    }

    /// What it has done, by queue or, over NBD, by thread.
    pub(super) fn queues(&self) -> Vec<QueueStatistics> {
        let of = |(number, thread, stats): (usize, &LoopHandle, &Arc<QueueStats>)| {
            let (iothread, numbers) = (thread.name().to_owned(), stats.get());
            QueueStatistics { number, iothread, numbers }
        };
        match self {
            Running::VhostUser(export) => export.queues().map(of).collect(),
            Running::Nbd(export) => export.queues().map(of).collect(),
        }
    }

    /// The requests in flight, with their queues or connections.
    pub(super) fn in_flight(&self) -> Pin<Box<dyn Future<Output = InFlightOf>>> {
        match self {
            Running::VhostUser(export) => Box::pin(export.in_flight()),
            Running::Nbd(export) => Box::pin(export.in_flight()),
        }
    }

    /// Has requests wait in the guest's queues, or not any more. Over NBD they go on, to a node that
    /// refuses them.
    pub(super) async fn set_paused(&self, paused: bool) {
        match self {
            Running::VhostUser(export) => export.set_paused(paused).await,
            Running::Nbd(_) => {}
        }
    }

    /// Makes durable what was written, and goes on.
    pub(super) fn flush(&self) -> Asked<()> {
        match self {
            Running::VhostUser(export) => Box::pin(export.hand_over().flush()),
            Running::Nbd(export) => Box::pin(export.flush()),
        }
    }

    /// Takes no more requests and finishes those in flight, and with `flush` flushes, until it is to
    /// [go on](Self::go_on).
    pub(super) fn stand_still(&self, flush: bool) -> Asked<Stopped> {
        match self {
            Running::VhostUser(export) => {
                let stopped = export.hand_over().stop(flush);
                Box::pin(async move { stopped.await.map(Stopped::Rings) })
            }
            Running::Nbd(export) => {
                let paused = export.pause(flush);
                Box::pin(async move { paused.await.map(Stopped::Clients) })
            }
        }
    }

    /// Takes requests again, to stand still once more: the answer comes when all of it does that can.
    pub(super) fn serve_on(&self) -> Asked<()> {
        match self {
            Running::VhostUser(export) => Box::pin(export.hand_over().run()),
            Running::Nbd(export) => {
                export.resume();
                Box::pin(ready(Ok(())))
            }
        }
    }

    /// Goes on where it was.
    pub(super) fn go_on(&self) {
        match self {
            Running::VhostUser(export) => export.hand_over().resume(),
            Running::Nbd(export) => export.resume(),
        }
    }

    /// Goes on where it was in another process; completes when it does.
    pub(super) fn begin(&self, stopped: Option<Stopped>) -> Pin<Box<dyn Future<Output = ()>>> {
        match (self, stopped) {
            (Running::VhostUser(export), Some(Stopped::Rings(rings))) => {
                Box::pin(export.begin(rings))
            }
            (Running::VhostUser(export), _) => Box::pin(export.begin(SavedRings::default())),
            (Running::Nbd(export), stopped) => {
                if let Some(Stopped::Clients(clients)) = stopped {
                    export.begin(clients);
                }
                Box::pin(ready(()))
            }
        }
    }

    /// Sends those away who were not handed over.
    pub(super) fn part(&self) -> Option<impl Future<Output = ()> + use<>> {
        match self {
            Running::VhostUser(_) => None,
            Running::Nbd(export) => Some(export.part()),
        }
    }

    /// Takes no more requests, finishes those in flight, calls `on_quiet`, and flushes.
    ///
    /// # Errors
    ///
    /// If the flush fails, or an I/O thread's loop has stopped.
    pub(super) async fn stop(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        match self {
            Running::VhostUser(export) => export.stop_telling(on_quiet).await,
            Running::Nbd(export) => export.stop_telling(on_quiet).await,
        }
    }
}
