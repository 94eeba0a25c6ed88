//! Exports over vhost-user.

use std::future::ready;
use std::sync::Arc;

use block::policy::ErrorPolicy;
use control::{Addr, ExportOptions, ScsiOptions, VhostUserOptions};
use exports::vhost_user::handover::SavedRings;
use exports::vhost_user::{ExportError, Listen, TakenOver, VhostUserConfig, VhostUserExport};
use stats::QueueStats;

use super::super::errors::under;
use super::super::statistics::QueueStatistics;
use super::super::upgrade::TakenExport;
use super::{Asked, Daemon, DaemonError, Described, InFlightOf, Later, Running, Stopped, counted};

impl Running for VhostUserExport {
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

    fn set_paused(&self, paused: bool) -> Later<()> {
        Box::pin(self.set_paused(paused))
    }

    fn flush(&self) -> Asked<()> {
        Box::pin(self.hand_over().flush())
    }

    fn describe(&self) -> Option<Asked<Described>> {
        let described = self.hand_over().describe();
        Some(Box::pin(async move { described.await.map(Described::Server) }))
    }

    fn quiesce(&self, flush: bool) -> Asked<Stopped> {
        let stopped = self.hand_over().stop(flush);
        Box::pin(async move { stopped.await.map(Stopped::Rings) })
    }

    fn restart_queues(&self) -> Asked<()> {
        Box::pin(self.hand_over().run())
    }

    fn resume(&self) {
        self.hand_over().resume();
    }

    fn prepare(&self, _client: exports::vfio_user::SavedClient) -> Result<(), String> {
        Err("the export is not over vfio-user".to_owned())
    }

    fn begin(&self, stopped: Option<Stopped>) -> Later<()> {
        let rings = match stopped {
            Some(Stopped::Rings(rings)) => rings,
            Some(Stopped::Clients(_) | Stopped::File { .. } | Stopped::Controller(_)) | None => {
                SavedRings::default()
            }
        };
        Box::pin(self.begin(rings))
    }

    fn disconnect_clients(&self) -> Option<Later<()>> {
        None
    }

    fn stop(self: Box<Self>, on_quiet: Box<dyn FnOnce()>) -> Later<Result<(), ExportError>> {
        Box::pin((*self).stop_telling(on_quiet))
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
            Addr::Unix { path } => Ok(match self.given.at_path(path)? {
                Some(socket) => Listen::Fd(socket),
                None => Listen::Path(path.clone()),
            }),
            Addr::Fd { fd } => self.given.listener(fd).map(Listen::Fd),
        }
    }

    async fn start_vhost_user(
        &mut self,
        options: &ExportOptions,
        vhost_user: &VhostUserOptions,
        policy: Option<&Arc<ErrorPolicy>>,
    ) -> Result<Box<dyn Running>, DaemonError> {
        let taken = self.taken.as_mut().and_then(|taken| taken.export(&options.id));
        let (listen, taken_over) = match taken {
            Some(TakenExport::Server { listener: (fd, file), session }) => {
                (Listen::TakenOver(Arc::new(fd), file), Some(TakenOver { session }))
            }
            Some(TakenExport::Mount { .. }) | None => (self.listen(&vhost_user.addr)?, None),
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
        Ok(Box::new(export))
    }
}
