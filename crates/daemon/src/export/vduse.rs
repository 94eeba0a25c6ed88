//! Exports over VDUSE.

use std::future::ready;
use std::path::PathBuf;
use std::sync::Arc;

use control::{ExportOptions, VduseOptions};
use exports::vduse::wire::FOLDER;
use exports::vduse::{VduseConfig, VduseError, VduseExport, record_folder};
use exports::vhost_user::ExportError;
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::super::upgrade::{Part, TakenPart};
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running};

/// Why an upgrade is refused.
const NO_HAND_OVER: &str = "a vduse-blk export is not handed over: stop the daemon and start the new version, which continues with the device";

/// An export with its device.
struct Vduse(VduseExport);

impl Running for Vduse {
    fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        Box::pin(ready(()))
    }

    fn device(&self) -> Option<PathBuf> {
        None
    }

    /// Does nothing: the device of a driver stays, and waits for the next daemon.
    fn spare_nobody(&self) {}

    fn queue_stats(&self) -> &[Arc<QueueStats>] {
        self.0.queue_stats()
    }

    fn queues(&self) -> Vec<QueueStatistics> {
        let of = |(number, thread, stats): &(usize, _, _)| super::counted((*number, thread, stats));
        self.0.queues().iter().map(of).collect()
    }

    fn in_flight(&self) -> Later<InFlightOf> {
        Box::pin(self.0.in_flight())
    }

    fn set_paused(&self, paused: bool) -> Later<()> {
        Box::pin(self.0.set_paused(paused))
    }

    fn flush(&self) -> Asked<()> {
        let flushed = self.0.flush();
        Box::pin(async move { flushed.await.map_err(|error| error.to_string()) })
    }

    fn describe(&self) -> Option<Asked<Part>> {
        Some(Box::pin(ready(Err(NO_HAND_OVER.to_owned()))))
    }

    fn quiesce(&self, _flush: bool) -> Asked<Part> {
        Box::pin(ready(Err(NO_HAND_OVER.to_owned())))
    }

    fn restart_queues(&self) -> Asked<()> {
        Box::pin(ready(Ok(())))
    }

    fn resume(&self) {}

    fn prepare(&self, _state: TakenPart<'_>) -> Result<(), String> {
        Err(NO_HAND_OVER.to_owned())
    }

    fn begin(&self) -> Later<()> {
        Box::pin(ready(()))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin(self.0.stop_telling(on_quiet))
    }
}

impl Daemon {
    pub(super) async fn start_vduse(
        &mut self,
        options: &ExportOptions,
        own: &VduseOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let config = VduseConfig {
            id: options.id.clone(),
            node: self.nodes.get(&options.node_name)?,
            io_threads: self.threads.handles(&options.iothreads)?,
            writable: options.writable,
            writethrough: options.writethrough,
            name: own.name.clone(),
            queues: own.queues,
            queue_size: own.queue_size,
            logical_block_size: own.logical_block_size,
            serial: own.serial.clone(),
            records: record_folder(),
        };
        let export = VduseExport::start(&self.control, config).await?;
        log::info!("export {}: {FOLDER}/{}", options.id, own.name);
        Ok(Box::new(Vduse(export)))
    }
}

impl From<VduseError> for DaemonError {
    fn from(VduseError { what, hint }: VduseError) -> Self {
        hint.iter().fold(DaemonError::new(what), |error, hint| error.with_hint(hint))
    }
}
