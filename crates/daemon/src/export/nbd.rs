//! Exports over NBD.

use std::future::ready;
use std::sync::Arc;

use control::{ExportOptions, NbdOptions};
use exports::nbd::{NbdExport, NbdExportConfig};
use exports::vhost_user::ExportError;
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::{Asked, Daemon, DaemonError, Described, InFlightOf, Later, Running, Stopped, counted};

impl Running for NbdExport {
    fn is_connected(&self) -> bool {
        self.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        Box::pin(self.hung_up_are_gone())
    }

    fn queue_stats(&self) -> &[Arc<QueueStats>] {
        self.queue_stats()
    }

    fn queues(&self) -> Vec<QueueStatistics> {
        self.queues().map(counted).collect()
    }

    fn in_flight(&self) -> Later<InFlightOf> {
        Box::pin(self.in_flight())
    }

    /// Does nothing: an inactive node serves reads and fails writes with `EPERM`.
    fn set_paused(&self, _paused: bool) -> Later<()> {
        Box::pin(ready(()))
    }

    fn flush(&self) -> Asked<()> {
        Box::pin(self.flush())
    }

    fn describe(&self) -> Option<Asked<Described>> {
        None
    }

    fn quiesce(&self, flush: bool) -> Asked<Stopped> {
        let paused = self.pause(flush);
        Box::pin(async move { paused.await.map(Stopped::Clients) })
    }

    fn restart_queues(&self) -> Asked<()> {
        self.resume();
        Box::pin(ready(Ok(())))
    }

    fn resume(&self) {
        self.resume();
    }

    fn prepare(&self, _client: exports::vfio_user::SavedClient) -> Result<(), String> {
        Err("the export is not over vfio-user".to_owned())
    }

    fn begin(&self, stopped: Option<Stopped>) -> Later<()> {
        match stopped {
            Some(Stopped::Clients(clients)) => self.begin(clients),
            Some(Stopped::Rings(_) | Stopped::File { .. } | Stopped::Controller(_)) | None => {}
        }
        Box::pin(ready(()))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        Some(Box::pin(self.disconnect_clients()))
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin((*self).stop_telling(on_quiet))
    }
}

impl Daemon {
    pub(super) async fn start_nbd(
        &mut self,
        options: &ExportOptions,
        nbd: &NbdOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let Some(server) = &self.nbd_server else {
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
        Ok(Box::new(export))
    }
}
