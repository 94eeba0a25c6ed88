//! Running exports, with one file per export type. [`Daemon::start_export`] lists the types.

mod fuse;
mod nbd;
mod turns;
mod ublk;
mod vduse;
mod vfio_user;
mod vhost_user;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use block::policy::ErrorPolicy;
use control::{ExportKind, ExportOptions};
use event_loop::LoopHandle;
use exports::vhost_user::ExportError;
use stats::InFlight;
use stats::QueueStats;

use super::statistics::QueueStatistics;
use super::upgrade::{Part, TakenPart};
use super::{Daemon, DaemonError};

/// Requests in flight, with the queue or connection of each.
pub(super) type InFlightOf = Vec<(u64, InFlight)>;

/// Completes once, on the control loop.
pub(super) type Later<T> = Pin<Box<dyn Future<Output = T>>>;

/// Completes once, with a result or the reason of the failure.
pub(super) type Asked<T> = Later<Result<T, String>>;

/// A running export. No method has a default, because upgrades and shutdown rely on each.
pub(super) trait Running {
    /// Whether a front end or a client uses it.
    fn is_connected(&self) -> bool;

    /// Completes when disconnected clients no longer count as users.
    fn hung_up_are_gone(&self) -> Later<()>;

    /// The path of the host's block device, if the export is one.
    fn device(&self) -> Option<PathBuf>;

    /// `block-export-del` with `mode=hard`: [`stop`](Self::stop) follows, and disregards users.
    fn spare_nobody(&self);

    /// The counters of its queues or threads.
    fn queue_stats(&self) -> &[Arc<QueueStats>];

    /// The counters at this moment, by queue or thread.
    fn queues(&self) -> Vec<QueueStatistics>;

    /// The requests in flight, with their queues or connections.
    fn in_flight(&self) -> Later<InFlightOf>;

    /// Leaves new requests in their queues, or takes them again. Requests in flight continue.
    ///
    /// Export types without this ability do nothing: an inactive node serves reads and fails
    /// writes.
    fn set_paused(&self, paused: bool) -> Later<()>;

    /// Makes completed writes durable while the export keeps serving.
    fn flush(&self) -> Asked<()>;

    /// Returns the part of the hand-over that stays constant while the export serves. The new process' export
    /// is started with it, by [`TakenOver::export`](super::upgrade::TakenOver::export). `None`: the export type has no
    /// constant part.
    fn describe(&self) -> Option<Asked<Part>>;

    /// Stops taking requests and drains those in flight, until [`resume`](Self::resume). Returns the part of the
    /// hand-over that is only known then, for [`prepare`](Self::prepare) in the new process.
    ///
    /// `flush`: also flushes the node.
    fn quiesce(&self, flush: bool) -> Asked<Part>;

    /// Takes requests again between two attempts to quiesce. Completes when the queues run.
    fn restart_queues(&self) -> Asked<()>;

    /// Takes requests again after [`quiesce`](Self::quiesce).
    fn resume(&self);

    /// Checks and keeps the state of the quiesced predecessor: what [`quiesce`](Self::quiesce) returned in the
    /// previous process. Touches no queue and no client yet.
    ///
    /// # Errors
    ///
    /// The state is malformed, or cannot be served. The previous process then continues.
    fn prepare(&self, state: TakenPart<'_>) -> Result<(), String>;

    /// Begins to serve, with the state that [`prepare`](Self::prepare) kept if the export was handed over.
    ///
    /// Completes when the export serves.
    fn begin(&self) -> Later<()>;

    /// Disconnects the clients that were not handed over. `None`: no such clients exist.
    fn disconnect_clients(&self) -> Option<Later<()>>;

    /// Stops taking requests, drains those in flight, calls `on_quiet`, and flushes.
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
            ExportKind::Ublk(own) => self.start_ublk(options, own).await,
            ExportKind::VduseBlk(own) => self.start_vduse(options, own).await,
            ExportKind::VfioUserAhci(own) => self.start_ahci(options, own).await,
            ExportKind::VfioUserNvme(own) => self.start_nvme(options, own).await,
        }
    }

    /// Checks that all nodes of a writable export can be written to.
    ///
    /// An image with `auto-read-only` may be open read-only although its options allow writes.
    /// Exports that another process handed over are not checked: they must keep running.
    fn check_writable(&self, options: &ExportOptions) -> Result<(), DaemonError> {
        if !options.writable || self.origin.taken.is_some() {
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
