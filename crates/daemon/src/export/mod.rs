//! Exports that run. An export type is a file here; [`Daemon::start_export`] lists the types.

mod fuse;
mod nbd;
mod vfio_user;
mod vhost_user;

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use block::policy::ErrorPolicy;
use control::{ExportKind, ExportOptions};
use event_loop::LoopHandle;
use exports::nbd::SavedClient;
use exports::vhost_user::ExportError;
use exports::vhost_user::handover::{SavedRings, SavedServer};
use stats::InFlight;
use stats::QueueStats;

use super::statistics::QueueStatistics;
use super::{Daemon, DaemonError};

/// Requests in flight, with the queue or connection of each.
pub(super) type InFlightOf = Vec<(u64, InFlight)>;

/// Completes once, on the control loop.
pub(super) type Later<T> = Pin<Box<dyn Future<Output = T>>>;

/// The answer to a question, or why there is none.
pub(super) type Asked<T> = Later<Result<T, String>>;

/// What a running export is handed over with.
pub(super) enum Described {
    /// `vhost-user-blk` and `vhost-user-scsi`.
    Server(SavedServer),
    /// `fuse`: descriptors of the mount, one for each thread.
    Mount { devices: Vec<OwnedFd>, allow_other: bool },
}

/// What an export that stands still is handed over with.
pub(super) enum Stopped {
    /// `vhost-user-blk` and `vhost-user-scsi`.
    Rings(SavedRings),
    /// `nbd`.
    Clients(Vec<SavedClient>),
    /// `fuse`: mode, owner and group, and how many descriptors are open.
    File { owner: [u32; 3], opens: u64 },
}

/// An export that runs. No method has a default: an upgrade or the end of the daemon asks for each.
pub(super) trait Running {
    /// Whether a front end or a client uses it.
    fn is_connected(&self) -> bool;

    /// Completes when clients that have hung up no longer count as users.
    fn hung_up_are_gone(&self) -> Later<()>;

    /// The counters of its queues or threads.
    fn queue_stats(&self) -> &[Arc<QueueStats>];

    /// The counters at this moment, by queue or thread.
    fn queues(&self) -> Vec<QueueStatistics>;

    /// The requests in flight, with their queues or connections.
    fn in_flight(&self) -> Later<InFlightOf>;

    /// Has requests wait where they come from, or not any more. An export that cannot has them go on, to a
    /// node that refuses them.
    fn set_paused(&self, paused: bool) -> Later<()>;

    /// Makes durable what was written, and goes on.
    fn flush(&self) -> Asked<()>;

    /// Before an upgrade: what does not change while requests are served. `None`: there is nothing.
    fn describe(&self) -> Option<Asked<Described>>;

    /// Takes no more requests and finishes those in flight, and with `flush` flushes, until it is to
    /// [resume](Self::resume).
    fn quiesce(&self, flush: bool) -> Asked<Stopped>;

    /// Takes requests again, to stand still once more. Completes when all parts that can take requests do.
    fn restart_queues(&self) -> Asked<()>;

    /// Goes on where it was.
    fn resume(&self);

    /// Begins to serve, with what another process has left; completes when it does.
    fn begin(&self, stopped: Option<Stopped>) -> Later<()>;

    /// Sends clients away that were not handed over.
    fn disconnect_clients(&self) -> Option<Later<()>>;

    /// Takes no more requests, finishes those in flight, calls `on_quiet`, and flushes.
    ///
    /// # Errors
    ///
    /// If the flush fails, or an I/O thread's loop has stopped.
    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>>;
}

impl Daemon {
    /// Starts an export.
    pub(super) async fn start_export(
        &mut self,
        options: &ExportOptions,
        policy: Option<&Arc<ErrorPolicy>>,
    ) -> Result<Box<dyn Running>, DaemonError> {
        self.check_writable(options)?;
        match &options.kind {
            ExportKind::VhostUserBlk(own) => self.start_blk(options, own, policy).await,
            ExportKind::VhostUserScsi(own) => self.start_scsi(options, own, policy).await,
            ExportKind::Nbd(own) => self.start_nbd(options, own).await,
            ExportKind::Fuse(own) => self.start_fuse(options, own).await,
            ExportKind::VfioUserAhci(own) => self.start_ahci(options, own).await,
            ExportKind::VfioUserNvme(own) => self.start_nvme(options, own).await,
        }
    }

    /// Checks that all nodes of a writable export can be written to. An image with `auto-read-only` may be open
    /// read-only whatever the options say. Exports that another process handed over are not checked: they must
    /// keep running.
    fn check_writable(&self, options: &ExportOptions) -> Result<(), DaemonError> {
        if !options.writable || self.taken.is_some() {
            return Ok(());
        }
        for name in options.nodes() {
            let node = self.nodes.get(name)?;
            if node.geometry().read_only {
                let plain = || DaemonError::new("Cannot export read-only node as writable");
                return Err(node.why_read_only().map_or_else(plain, DaemonError::from));
            }
        }
        Ok(())
    }
}

/// The counters of a queue or a thread at this moment.
fn counted((number, thread, stats): (usize, &LoopHandle, &Arc<QueueStats>)) -> QueueStatistics {
    QueueStatistics { number, iothread: thread.name().to_owned(), numbers: stats.get() }
}
