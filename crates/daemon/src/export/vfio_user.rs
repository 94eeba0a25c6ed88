//! Exports over vfio-user.

use std::future::ready;
use std::sync::Arc;

use control::{Addr, AhciOptions, ExportOptions, NvmeOptions};
use exports::vfio_user::{VfioUserConfig, VfioUserExport};
use exports::vhost_user::ExportError;
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::{Asked, Daemon, DaemonError, Described, InFlightOf, Later, Running, Stopped, counted};

/// Why a daemon with such an export is not replaced.
const NO_HAND_OVER: &str = "vfio-user exports cannot be handed over to another process; shut the guest \
                            down, remove the export, and add it again after the upgrade";

impl Running for VfioUserExport {
    fn is_connected(&self) -> bool {
        self.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        Box::pin(ready(()))
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

    /// Requests go on, to a node that refuses them.
    fn set_paused(&self, _paused: bool) -> Later<()> {
        Box::pin(ready(()))
    }

    fn flush(&self) -> Asked<()> {
        Box::pin(self.flush())
    }

    fn describe(&self) -> Option<Asked<Described>> {
        Some(Box::pin(ready(Err(NO_HAND_OVER.to_owned()))))
    }

    fn quiesce(&self, _flush: bool) -> Asked<Stopped> {
        Box::pin(ready(Err(NO_HAND_OVER.to_owned())))
    }

    fn restart_queues(&self) -> Asked<()> {
        Box::pin(ready(Ok(())))
    }

    fn resume(&self) {}

    fn begin(&self, _stopped: Option<Stopped>) -> Later<()> {
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
        let config = self.vfio_user(options, &own.addr, own.serial.as_deref())?;
        let node = self.nodes.get(&options.node_name)?;
        let export = VfioUserExport::ahci(&self.control, config, node).await;
        Ok(Box::new(export.map_err(DaemonError::with_advice)?))
    }

    pub(super) async fn start_nvme(
        &mut self,
        options: &ExportOptions,
        own: &NvmeOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let config = self.vfio_user(options, &own.addr, own.serial.as_deref())?;
        let nodes = options.nodes().map(|name| self.nodes.get(name));
        let nodes = nodes.collect::<Result<_, _>>()?;
        let export = VfioUserExport::nvme(&self.control, config, nodes, own.num_queues).await;
        Ok(Box::new(export.map_err(DaemonError::with_advice)?))
    }

    fn vfio_user(
        &mut self,
        options: &ExportOptions,
        addr: &Addr,
        serial: Option<&str>,
    ) -> Result<VfioUserConfig, DaemonError> {
        Ok(VfioUserConfig {
            id: options.id.clone(),
            listen: self.listen(addr)?,
            io_threads: self.threads.handles(&options.iothreads)?,
            writable: options.writable,
            writethrough: options.writethrough,
            serial: serial.unwrap_or(&options.id).to_owned(),
        })
    }
}
