//! Exports over ublk.

use std::future::ready;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use control::{ExportOptions, UblkOptions};
use event_loop::{EventLoop, JoinHandle};
use exports::ublk::control::{Control, Here};
use exports::ublk::{UblkConfig, UblkError, UblkExport};
use exports::vhost_user::ExportError;
use serde_json::Value as Json;
use stats::QueueStats;

use super::super::statistics::QueueStatistics;
use super::super::upgrade::document::{Collected, Document};
use super::super::upgrade::{Part, TakenPart, part};
use super::turns::Turns;
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running};
use crate::spawner::BySpawner;

/// An export with its device.
struct Ublk {
    id: String,
    export: Rc<UblkExport>,
    event_loop: EventLoop,
    turns: Rc<Turns>,
}

impl Ublk {
    fn in_turn<T: 'static>(&self, task: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.turns.run(&self.event_loop, task)
    }
}

impl Running for Ublk {
    fn is_connected(&self) -> bool {
        self.export.is_connected()
    }

    /// Stops the device unless it is open. In a task of its own: a command to the kernel has to be seen to its end.
    fn hung_up_are_gone(&self) -> Later<()> {
        let stopped = self.event_loop.spawn(self.export.try_stop());
        Box::pin(async move {
            let _ = stopped.await;
        })
    }

    fn device(&self) -> Option<PathBuf> {
        Some(self.export.path())
    }

    fn spare_nobody(&self) {
        self.export.spare_nobody();
    }

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

    /// Does nothing: an inactive node serves reads and fails writes with `EPERM`.
    fn set_paused(&self, _paused: bool) -> Later<()> {
        Box::pin(ready(()))
    }

    fn flush(&self) -> Asked<()> {
        let flushed = self.export.flush();
        Box::pin(async move { flushed.await.map_err(|error| error.to_string()) })
    }

    fn describe(&self) -> Option<Asked<Part>> {
        let dev_id = self.export.dev_id();
        Some(Box::pin(ready(Ok(part(move |_| Ok(Collected::ublk(dev_id)))))))
    }

    fn quiesce(&self, flush: bool) -> Asked<Part> {
        let export = self.export.clone();
        let quiesced = self.in_turn(async move { export.quiesce(flush).await });
        Box::pin(async move {
            quiesced.await.map_err(|gone| gone.to_string())??;
            Ok(part(|_| Ok(Json::Null)))
        })
    }

    fn restart_queues(&self) -> Asked<()> {
        let export = self.export.clone();
        let resumed = self.in_turn(async move { export.resume().await });
        Box::pin(async move {
            let resumed = resumed.await.map_err(|gone| gone.to_string())?;
            resumed.map_err(|error| error.what)
        })
    }

    fn resume(&self) {
        self.in_turn(resumed(self.id.clone(), self.export.clone()));
    }

    fn prepare(&self, _state: TakenPart<'_>) -> Result<(), String> {
        Ok(())
    }

    fn begin(&self) -> Later<()> {
        let resumed = self.in_turn(resumed(self.id.clone(), self.export.clone()));
        Box::pin(async move {
            let _ = resumed.await;
        })
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin(async move { self.export.stop_telling(on_quiet).await })
    }
}

/// Serves a device that was quiesced.
async fn resumed(id: String, export: Rc<UblkExport>) {
    if let Err(UblkError { what, .. }) = export.resume().await {
        let path = export.path();
        log::error!("export {id}: {what}; requests of {} wait: restart the daemon", path.display());
    }
}

impl Daemon {
    pub(super) async fn start_ublk(
        &mut self,
        options: &ExportOptions,
        own: &UblkOptions,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let event_loop = self.control.clone();
        let control: Rc<dyn Control> = match (&self.process.sandbox, &self.process.spawner) {
            (None, _) => Rc::new(Here(event_loop.clone())),
            (Some(_), Some(spawner)) => {
                Rc::new(BySpawner { spawner: spawner.clone(), event_loop: event_loop.clone() })
            }
            (Some(_), None) => {
                return Err(DaemonError::new(
                    "there is no process that could make the device: with --user or --sandbox upgrade=off, ublk \
                     exports are on the command line",
                ));
            }
        };
        let handed_over = self.origin.export(&options.id);
        let handed_over = handed_over.map(|part| Document::ublk(&part.json)).transpose();
        let config = UblkConfig {
            id: options.id.clone(),
            node: self.nodes.get(&options.node_name)?,
            io_threads: self.threads.handles(&options.iothreads)?,
            writable: options.writable,
            writethrough: options.writethrough,
            queues: own.queues,
            depth: own.depth,
            dev_id: own.dev_id,
            recovery: own.recovery,
        };
        let handed_over = handed_over.map_err(DaemonError::new)?;
        let export = UblkExport::start(&event_loop, config, control, handed_over).await?;
        log::info!("export {}: {}", options.id, export.path().display());
        Ok(Box::new(Ublk {
            id: options.id.clone(),
            export: Rc::new(export),
            event_loop,
            turns: Rc::default(),
        }))
    }
}

impl From<UblkError> for DaemonError {
    fn from(UblkError { what, hint }: UblkError) -> Self {
        hint.iter().fold(DaemonError::new(what), |error, hint| error.with_hint(hint))
    }
}
