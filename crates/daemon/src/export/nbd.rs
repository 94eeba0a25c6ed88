//! Exports over NBD.

use std::cell::Cell;
use std::future::ready;
use std::path::PathBuf;
use std::sync::Arc;

use control::{ExportOptions, NbdOptions};
use exports::nbd::{NbdExport, NbdExportConfig, SavedClient};
use exports::vhost_user::ExportError;
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::super::upgrade::{Part, TakenPart, part};
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running, counted};

/// An export, with the clients of its predecessor until it begins.
struct Nbd {
    export: NbdExport,
    clients: Cell<Vec<SavedClient>>,
}

impl Running for Nbd {
    fn is_connected(&self) -> bool {
        self.export.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        Box::pin(self.export.hung_up_are_gone())
    }

    fn device(&self) -> Option<PathBuf> {
        None
    }

    fn spare_nobody(&self) {}

    fn queue_stats(&self) -> &[Arc<QueueStats>] {
        self.export.queue_stats()
    }

    fn queues(&self) -> Vec<QueueStatistics> {
        self.export.queues().map(counted).collect()
    }

    fn in_flight(&self) -> Later<InFlightOf> {
        Box::pin(self.export.in_flight())
    }

    /// Does nothing: an inactive node serves reads and fails writes with `EPERM`.
    fn set_paused(&self, _paused: bool) -> Later<()> {
        Box::pin(ready(()))
    }

    fn flush(&self) -> Asked<()> {
        Box::pin(self.export.flush())
    }

    fn describe(&self) -> Option<Asked<Part>> {
        None
    }

    fn quiesce(&self, flush: bool) -> Asked<Part> {
        let paused = self.export.pause(flush);
        Box::pin(async move {
            let clients = paused.await?;
            Ok(part(|fds| fds.clients(clients)))
        })
    }

    fn restart_queues(&self) -> Asked<()> {
        self.export.resume();
        Box::pin(ready(Ok(())))
    }

    fn resume(&self) {
        self.export.resume();
    }

    fn prepare(&self, TakenPart { json, document }: TakenPart<'_>) -> Result<(), String> {
        self.clients.set(document.clients(&json)?);
        Ok(())
    }

    fn begin(&self) -> Later<()> {
        self.export.begin(self.clients.take());
        Box::pin(ready(()))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        Some(Box::pin(self.export.disconnect_clients()))
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin(self.export.stop_telling(on_quiet))
    }
}

impl Daemon {
    pub(super) async fn start_nbd(
        &mut self,
        options: &ExportOptions,
        nbd: &NbdOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let Some(server) = &self.entrances.nbd_server else {
            return Err(DaemonError::new("NBD server not running"));
        };
        let bitmaps =
            self.bitmaps_for_export(&options.node_name, &nbd.bitmaps, options.writable)?;
        let config = NbdExportConfig {
            id: options.id.clone(),
            name: nbd.name.clone(),
            description: nbd.description.clone(),
            node: self.nodes.get(&options.node_name)?,
            io_threads: self.threads.handles(&options.iothreads)?,
            writable: options.writable,
            writethrough: options.writethrough,
            allocation_depth: nbd.allocation_depth,
            bitmaps,
        };
        let export = server.add(config).await.map_err(DaemonError::with_advice)?;
        Ok(Box::new(Nbd { export, clients: Cell::default() }))
    }
}
