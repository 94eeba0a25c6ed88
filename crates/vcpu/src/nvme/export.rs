//! The export that a driver attaches to.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use block::node::BlockNode;
use event_loop::{LoopConfig, PollParams};
use exports::serve::Served;
use exports::vfio_user::{DoorbellMode, VfioUserConfig, VfioUserExport};
use exports::vhost_user::Listen;

use crate::machine::Machine;

/// A running vfio-user-nvme export with one I/O queue, on the machine's first I/O thread and a control thread of its own.
/// Dropping it stops it and waits until nothing is in flight.
pub struct NvmeExport {
    path: PathBuf,
    _served: Served,
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
        let config = VfioUserConfig {
            id: "nvme".into(),
            listen: Listen::Path(path.clone()),
            io_threads: vec![machine.loop_of(0).clone()],
            writable: false,
            writethrough: false,
            serial: "vcpu".into(),
            max_memory: None,
        };
        let served = Served::start(event_loop, move |control, service| async move {
            let export = VfioUserExport::nvme(&control, config, vec![disk], 1, doorbells).await?;
            export.begin();
            service.runs().await;
            export.stop_telling(|| {}).await
        });
        Ok(NvmeExport { path, _served: served.context("starting the NVMe export")? })
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
