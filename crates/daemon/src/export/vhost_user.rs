//! Exports over vhost-user.

use std::cell::Cell;
use std::future::ready;
use std::path::PathBuf;
use std::sync::Arc;

use block::policy::ErrorPolicy;
use control::{Addr, ExportOptions, ScsiOptions, VhostUserOptions};
use exports::vhost_user::handover::{SavedRings, SavedServer};
use exports::vhost_user::{ExportError, Listen, TakenOver, VhostUserConfig, VhostUserExport};
use stats::QueueStats;

use super::super::errors::under;
use super::super::statistics::QueueStatistics;
use super::super::upgrade::{Part, TakenPart, part};
use super::{Asked, Daemon, DaemonError, InFlightOf, Later, Running, counted};

/// An export, with the state of its predecessor until it begins.
struct VhostUser {
    export: VhostUserExport,
    rings: Cell<SavedRings>,
}

impl Running for VhostUser {
    fn is_connected(&self) -> bool {
        self.export.is_connected()
    }

    fn hung_up_are_gone(&self) -> Later<()> {
        Box::pin(ready(()))
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

    fn set_paused(&self, paused: bool) -> Later<()> {
        Box::pin(self.export.set_paused(paused))
    }

    fn flush(&self) -> Asked<()> {
        Box::pin(self.export.hand_over().flush())
    }

    fn describe(&self) -> Option<Asked<Part>> {
        let described = self.export.hand_over().describe();
        Some(Box::pin(async move {
            let server = described.await?;
            Ok(part(|fds| Ok(fds.server(server))))
        }))
    }

    fn quiesce(&self, flush: bool) -> Asked<Part> {
        let stopped = self.export.hand_over().stop(flush);
        Box::pin(async move {
            let rings = stopped.await?;
            Ok(part(|fds| Ok(fds.rings(rings))))
        })
    }

    fn restart_queues(&self) -> Asked<()> {
        Box::pin(self.export.hand_over().run())
    }

    fn resume(&self) {
        self.export.hand_over().resume();
    }

    fn prepare(&self, TakenPart { json, document }: TakenPart<'_>) -> Result<(), String> {
        self.rings.set(document.rings(&json)?);
        Ok(())
    }

    fn begin(&self) -> Later<()> {
        Box::pin(self.export.begin(self.rings.take()))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin(self.export.stop_telling(on_quiet))
    }
}

impl Daemon {
    pub(super) async fn start_blk(
        &mut self,
        options: &ExportOptions,
        own: &VhostUserOptions,
        policy: Option<&Arc<ErrorPolicy>>,
    ) -> Result<Box<dyn Running>, DaemonError> {
        self.start_vhost_user(options, own, policy).await
    }

    pub(super) async fn start_scsi(
        &mut self,
        options: &ExportOptions,
        own: &ScsiOptions,
        policy: Option<&Arc<ErrorPolicy>>,
    ) -> Result<Box<dyn Running>, DaemonError> {
        self.start_vhost_user(options, &own.options, policy).await
    }

    /// Returns the socket or path to listen on. A socket passed to the daemon for the path takes
    /// precedence.
    pub(super) fn listen(&mut self, addr: &Addr) -> Result<Listen, DaemonError> {
        match addr {
            Addr::Unix { path } => self.entrances.given.listen_at(path),
            Addr::Fd { fd } => self.entrances.given.listener(fd).map(Listen::Fd),
        }
    }

    async fn start_vhost_user(
        &mut self,
        options: &ExportOptions,
        vhost_user: &VhostUserOptions,
        policy: Option<&Arc<ErrorPolicy>>,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let taken = self.origin.export(&options.id);
        let (listen, taken_over) = match taken {
            Some(TakenPart { json, document }) => {
                let server = document.server(&json).map_err(DaemonError::new)?;
                let SavedServer { listener, file, session } = server;
                (Listen::TakenOver(Arc::new(listener), file), Some(TakenOver { session }))
            }
            None => (self.listen(&vhost_user.addr)?, None),
        };
        let config = VhostUserConfig {
            id: options.id.clone(),
            listen,
            taken_over,
            io_threads: self.threads.handles(&options.iothreads)?,
            num_queues: vhost_user.num_queues,
            writable: options.writable,
            writethrough: options.writethrough,
            logical_block_size: vhost_user.logical_block_size,
            pin_memory: vhost_user.pin_memory,
            max_memory: vhost_user.max_memory,
            held: true,
        };
        let control = self.control.clone();
        let started = if options.kind.more_nodes().is_some() {
            let nodes = options.nodes().map(|name| Ok(under(policy, self.nodes.get(name)?)));
            let nodes = nodes.collect::<Result<_, DaemonError>>()?;
            VhostUserExport::scsi(control, config, nodes).await
        } else {
            let node = under(policy, self.nodes.get(&options.node_name)?);
            VhostUserExport::blk(control, config, node, options.id.clone()).await
        };
        let export = started.map_err(DaemonError::with_advice)?;
        if options.nodes().any(|node| !self.nodes.is_active(node)) {
            // Pause before the export takes its first request.
            export.set_paused(true).await;
        }
        Ok(Box::new(VhostUser { export, rings: Cell::default() }))
    }
}
