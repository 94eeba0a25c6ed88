//! Exports over VDUSE.

use std::future::ready;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use control::{ExportOptions, VduseOptions};
use event_loop::{EventLoop, JoinHandle};
use exports::vduse::wire::FOLDER;
use exports::vduse::{VduseConfig, VduseError, VduseExport, record_folder};
use exports::vhost_user::ExportError;
use serde_json::Value as Json;
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::super::upgrade::{Part, TakenPart, part};
use super::turns::Turns;
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running};

/// An export with its device.
struct Vduse {
    id: String,
    export: Rc<VduseExport>,
    event_loop: EventLoop,
    turns: Rc<Turns>,
}

impl Vduse {
    /// Serves the device again, after what runs already.
    fn resumed(&self) -> JoinHandle<Result<(), String>> {
        let (id, export) = (self.id.clone(), self.export.clone());
        self.turns.run(&self.event_loop, async move {
            export.begin().await.map_err(|VduseError { what, .. }| {
                log::error!("export {id}: {what}; its requests wait: restart the daemon");
                what
            })
        })
    }
}

impl Running for Vduse {
    fn is_connected(&self) -> bool {
        self.export.is_connected()
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
        self.export.queue_stats()
    }

    fn queues(&self) -> Vec<QueueStatistics> {
        let of = |(number, thread, stats): &(usize, _, _)| super::counted((*number, thread, stats));
        self.export.queues().iter().map(of).collect()
    }

    fn in_flight(&self) -> Later<InFlightOf> {
        Box::pin(self.export.in_flight())
    }

    fn set_paused(&self, paused: bool) -> Later<()> {
        Box::pin(self.export.set_paused(paused))
    }

    fn flush(&self) -> Asked<()> {
        let flushed = self.export.flush();
        Box::pin(async move { flushed.await.map_err(|error| error.to_string()) })
    }

    fn describe(&self) -> Option<Asked<Part>> {
        let file = self.export.hand_over();
        Some(Box::pin(async move {
            let file = file.map_err(|error| format!("duplicating failed: {error}"))?;
            Ok(part(move |fds| Ok(fds.vduse(file))))
        }))
    }

    fn quiesce(&self, flush: bool) -> Asked<Part> {
        let export = self.export.clone();
        let quiesce = async move { export.quiesce(flush).await };
        let quiesced = self.turns.run(&self.event_loop, quiesce);
        Box::pin(async move {
            let quiesced = quiesced.await.map_err(|gone| gone.to_string())?;
            quiesced.map_err(|error| error.to_string())?;
            Ok(part(|_| Ok(Json::Null)))
        })
    }

    fn restart_queues(&self) -> Asked<()> {
        let resumed = self.resumed();
        Box::pin(async move { resumed.await.map_err(|gone| gone.to_string())? })
    }

    fn resume(&self) {
        self.resumed();
    }

    fn prepare(&self, _state: TakenPart<'_>) -> Result<(), String> {
        Ok(())
    }

    fn begin(&self) -> Later<()> {
        let resumed = self.resumed();
        Box::pin(async move {
            let _ = resumed.await;
        })
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        let Vduse { id, export, event_loop, turns } = *self;
        Box::pin(async move {
            // The tasks that run have references to the export.
            let _ = turns.run(&event_loop, ready(())).await;
            match Rc::into_inner(export) {
                Some(export) => export.stop_telling(on_quiet).await,
                None => {
                    log::error!("export {id}: its device is in use by a task, and stays");
                    on_quiet();
                    Ok(())
                }
            }
        })
    }
}

impl Daemon {
    pub(super) async fn start_vduse(
        &mut self,
        options: &ExportOptions,
        own: &VduseOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let handed_over = self.origin.export(&options.id);
        let handed_over =
            handed_over.map(|TakenPart { json, document }| document.vduse(&json)).transpose();
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
        let handed_over = handed_over.map_err(DaemonError::new)?;
        let export = VduseExport::start(&self.control, config, handed_over).await?;
        log::info!("export {}: {FOLDER}/{}", options.id, own.name);
        Ok(Box::new(Vduse {
            id: options.id.clone(),
            export: Rc::new(export),
            event_loop: self.control.clone(),
            turns: Rc::default(),
        }))
    }
}

impl From<VduseError> for DaemonError {
    fn from(VduseError { what, hint }: VduseError) -> Self {
        hint.iter().fold(DaemonError::new(what), |error, hint| error.with_hint(hint))
    }
}
