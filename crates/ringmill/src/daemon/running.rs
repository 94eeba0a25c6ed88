//! An export that runs, of whichever protocol.

use std::pin::Pin;
use std::sync::Arc;

use devices::QueueStats;
use devices::virtio::InFlight;
use event_loop::LoopHandle;
use exports::nbd::NbdExport;
use exports::vhost_user::{ExportError, VhostUserExport};

use super::statistics::QueueStatistics;

/// Requests in flight, with the queue or connection of each.
type InFlightOf = Vec<(u64, InFlight)>;

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

    /// Takes no more requests, finishes those in flight, flushes.
    ///
    /// # Errors
    ///
    /// When the flush failed, or a loop has stopped before.
    pub(super) async fn stop(self) -> Result<(), ExportError> {
        match self {
            Running::VhostUser(export) => export.stop().await,
            Running::Nbd(export) => export.stop().await,
        }
    }
}
