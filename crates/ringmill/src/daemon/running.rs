//! An export that runs, of whichever protocol.

use std::sync::Arc;

use devices::QueueStats;
use exports::nbd::NbdExport;
use exports::vhost_user::{ExportError, VhostUserExport};

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
