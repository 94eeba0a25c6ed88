//! The export that a driver attaches to.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

use anyhow::{Result, anyhow};
use block::node::BlockNode;
use event_loop::{IoThread, IoThreadConfig, LoopConfig, PollParams, oneshot};
use exports::vfio_user::{DoorbellMode, VfioUserConfig, VfioUserExport};
use exports::vhost_user::{ExportError, Listen};

use crate::machine::Machine;

/// A running vfio-user-nvme export with one I/O queue, on the machine's first I/O thread and a control thread of its own.
/// Dropping it stops it and waits until nothing is in flight.
pub struct NvmeExport {
    path: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    stopped: mpsc::Receiver<Result<(), ExportError>>,
    _control: IoThread,
}

impl NvmeExport {
    /// Offers a disk as namespace 1, on a socket in the directory of temporary files.
    ///
    /// # Errors
    ///
    /// There is no control thread, or the export cannot be started.
    pub fn start(
        machine: &Machine,
        disk: Arc<dyn BlockNode>,
        doorbells: DoorbellMode,
    ) -> Result<NvmeExport> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vcpu-{}-{number}.sock", std::process::id());
        let path = std::env::temp_dir().join(name);
        // As in the daemon, the control thread does not poll.
        let name = "control".into();
        let event_loop = LoopConfig { name, poll: PollParams::OFF, ..LoopConfig::default() };
        let control = IoThread::spawn(IoThreadConfig { event_loop, ..IoThreadConfig::default() })?;
        let config = VfioUserConfig {
            id: "nvme".into(),
            listen: Listen::Path(path.clone()),
            io_threads: vec![machine.loop_of(0).clone()],
            writable: false,
            writethrough: false,
            serial: "vcpu".into(),
            max_memory: None,
        };
        let (stop, stopping) = oneshot::channel();
        let (begin, begun) = mpsc::sync_channel(1);
        let (end, stopped) = mpsc::sync_channel(1);
        control.handle().spawn(move |event_loop| {
            let on_loop = event_loop.clone();
            event_loop.spawn(async move {
                let export = VfioUserExport::nvme(&on_loop, config, vec![disk], 1, doorbells);
                let export = match export.await {
                    Ok(export) => export,
                    Err(error) => return drop(begin.send(Err(error))),
                };
                export.begin();
                let _ = begin.send(Ok(()));
                let _ = stopping.await;
                let _ = end.send(export.stop_telling(|| {}).await);
            });
        })?;
        begun
            .recv()
            .map_err(|_| anyhow!("the control thread ended"))?
            .map_err(|error| anyhow!("starting the NVMe export: {error}"))?;
        Ok(NvmeExport { path, stop: Some(stop), stopped, _control: control })
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for NvmeExport {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            stop.send(());
        }
        match self.stopped.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::error!("stopping the NVMe export: {error}"),
            Err(_) => log::error!("stopping the NVMe export: its control thread ended"),
        }
    }
}
