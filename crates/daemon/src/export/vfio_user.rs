//! Exports over vfio-user.

use std::future::ready;
use std::path::PathBuf;
use std::sync::Arc;

use control::{Addr, AhciOptions, Doorbells, ExportOptions, NvmeOptions};
use exports::vfio_user::{DoorbellMode, VfioUserConfig, VfioUserExport};
use exports::vhost_user::handover::SavedServer;
use exports::vhost_user::{ExportError, Listen};
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::super::upgrade::{Part, TakenPart, part};
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running, counted};

impl Running for VfioUserExport {
    fn is_connected(&self) -> bool {
        self.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        Box::pin(ready(()))
    }

    fn device(&self) -> Option<PathBuf> {
        None
    }

    fn spare_nobody(&self) {}

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

    fn describe(&self) -> Option<Asked<Part>> {
        let described = self
            .describe()
            .map(|server| part(|fds| Ok(fds.server(server))))
            .map_err(|error| format!("duplicating a descriptor failed: {error}"));
        Some(Box::pin(ready(described)))
    }

    fn quiesce(&self, flush: bool) -> Asked<Part> {
        let paused = self.pause(flush);
        Box::pin(async move {
            let client = paused.await?;
            Ok(part(|fds| fds.vfio_user(client)))
        })
    }

    fn restart_queues(&self) -> Asked<()> {
        Box::pin(self.run())
    }

    fn resume(&self) {
        self.resume();
    }

    fn prepare(&self, TakenPart { json, document }: TakenPart<'_>) -> Result<(), String> {
        let client = document.vfio_user(&json)?;
        client.map_or(Ok(()), |client| self.prepare(client))
    }

    fn begin(&self) -> Later<()> {
        self.begin();
        Box::pin(ready(()))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin((*self).stop_telling(on_quiet))
    }
}

impl Daemon {
    pub(super) async fn start_ahci(
        &mut self,
        options: &ExportOptions,
        own: &AhciOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let config = self.vfio_user(options, &own.addr, own.serial.as_deref(), own.max_memory)?;
        let nodes = options.nodes().map(|name| self.nodes.get(name));
        let nodes = nodes.collect::<Result<_, _>>()?;
        let export = VfioUserExport::ahci(&self.control, config, nodes).await;
        Ok(Box::new(export.map_err(DaemonError::with_advice)?))
    }

    pub(super) async fn start_nvme(
        &mut self,
        options: &ExportOptions,
        own: &NvmeOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let config = self.vfio_user(options, &own.addr, own.serial.as_deref(), own.max_memory)?;
        let nodes = options.nodes().map(|name| self.nodes.get(name));
        let nodes = nodes.collect::<Result<_, _>>()?;
        let doorbells = match own.doorbells {
            Doorbells::Auto => DoorbellMode::Auto,
            Doorbells::Trapped => DoorbellMode::Trapped,
            Doorbells::Mapped => DoorbellMode::Mapped,
        };
        let (control, queues) = (&self.control, own.num_queues);
        let export = VfioUserExport::nvme(control, config, nodes, queues, doorbells).await;
        Ok(Box::new(export.map_err(DaemonError::with_advice)?))
    }

    fn vfio_user(
        &mut self,
        options: &ExportOptions,
        addr: &Addr,
        serial: Option<&str>,
        max_memory: Option<u64>,
    ) -> Result<VfioUserConfig, DaemonError> {
        let taken = self.origin.export(&options.id);
        let listen = match taken {
            Some(TakenPart { json, document }) => {
                let server = document.server(&json).map_err(DaemonError::new)?;
                let SavedServer { listener, file, session: _ } = server;
                Listen::TakenOver(Arc::new(listener), file)
            }
            None => self.listen(addr)?,
        };
        Ok(VfioUserConfig {
            id: options.id.clone(),
            listen,
            io_threads: self.threads.handles(&options.iothreads)?,
            writable: options.writable,
            writethrough: options.writethrough,
            serial: serial.unwrap_or(&options.id).to_owned(),
            max_memory,
        })
    }
}
