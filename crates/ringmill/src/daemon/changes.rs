//! Adding and removing: what options of the command line and commands of monitors come to.

use control::qmp::DeleteMode;
use control::{Action, Addr, ExportKind, ExportOptions, MonitorOptions, Step, VhostUserOptions};
use exports::vhost_user::{Listen, VhostUserBlkConfig, VhostUserExport, VhostUserScsiConfig};
use serde_json::json;

use super::chardev::Chardev;
use super::monitor::{Clients, Monitor};
use super::{Daemon, DaemonError, Message};

/// Tells all clients that an export is gone.
pub(super) fn tell_export_deleted(clients: &Clients, id: &str) {
    clients.tell("BLOCK_EXPORT_DELETED", json!({"id": id}));
}

impl Daemon {
    /// Carries out a command line.
    pub(super) async fn make(&mut self, steps: &[Step]) -> Result<(), DaemonError> {
        for step in steps {
            self.add(&step.action).await.map_err(|error| error.of(&step.origin))?;
        }
        Ok(())
    }

    /// Adds what an option, or a command, describes.
    pub(super) async fn add(&mut self, action: &Action) -> Result<(), DaemonError> {
        let graph = self.graph.with(action)?;
        match action {
            Action::Object(iothread) => self.threads.add(iothread)?,
            Action::Blockdev(options) => drop(self.nodes.open(options)?),
            Action::Export(options) => {
                let export = self.start_export(options).await?;
                self.exports.add(options, export);
            }
            Action::Chardev(options) => {
                let chardev = Chardev::open(&self.control, options).await?;
                self.chardevs.insert(options.id.clone(), chardev);
            }
            Action::Monitor(options) => self.start_monitor(options),
        }
        self.graph = graph;
        Ok(())
    }

    /// `object-del`.
    pub(super) fn delete_object(&mut self, id: &str) -> Result<(), DaemonError> {
        let graph = self.graph.without_object(id)?;
        self.threads.remove(id);
        self.graph = graph;
        Ok(())
    }

    /// `blockdev-del`.
    pub(super) fn delete_node(&mut self, name: &str) -> Result<(), DaemonError> {
        let graph = self.graph.without_node(name)?;
        self.nodes.remove(name)?;
        self.graph = graph;
        Ok(())
    }

    /// `block-export-del`: has the export end. When it has, [`export_ended`](Self::export_ended) is
    /// called.
    pub(super) fn delete_export(&mut self, id: &str, mode: DeleteMode) -> Result<(), DaemonError> {
        match (self.exports.is_connected(id), mode) {
            (None, _) => Err(DaemonError::new(format!("Export '{id}' is not found"))),
            (Some(true), DeleteMode::Safe) => {
                Err(DaemonError::new(format!("export '{id}' still in use")))
            }
            _ => {
                self.exports.stop(id);
                Ok(())
            }
        }
    }

    /// An export has ended: what it used may go from now on.
    pub(super) fn export_ended(&mut self, id: &str) {
        self.exports.forget(id);
        self.graph = self.graph.without_export(id);
        tell_export_deleted(&self.clients, id);
    }

    async fn start_export(
        &mut self,
        options: &ExportOptions,
    ) -> Result<VhostUserExport, DaemonError> {
        let vhost_user = options.vhost_user();
        let listen = match &vhost_user.addr {
            Addr::Unix { path } => Listen::Path(path.clone()),
            Addr::Fd { fd } => Listen::inherited(*fd).map_err(DaemonError::new)?,
        };
        let node = |name: &String| self.nodes.get(name).map_err(DaemonError::from);
        let (id, control) = (options.id.clone(), self.control.clone());
        let io_threads = self.threads.handles(&options.iothreads)?;
        let VhostUserOptions { num_queues, logical_block_size, pin_memory, .. } = *vhost_user;
        let (writable, writethrough) = (options.writable, options.writethrough);
        let started = match &options.kind {
            ExportKind::VhostUserBlk(_) => {
                let config = VhostUserBlkConfig {
                    serial: id.clone(),
                    id,
                    listen,
                    node: node(&options.node_name)?,
                    io_threads,
                    num_queues,
                    writable,
                    writethrough,
                    logical_block_size,
                    pin_memory,
                };
                VhostUserExport::blk(control, config).await
            }
            ExportKind::VhostUserScsi { .. } => {
                let config = VhostUserScsiConfig {
                    id,
                    listen,
                    nodes: options.nodes().map(node).collect::<Result<_, _>>()?,
                    io_threads,
                    num_queues,
                    writable,
                    writethrough,
                    logical_block_size,
                    pin_memory,
                };
                VhostUserExport::scsi(control, config).await
            }
        };
        started.map_err(DaemonError::with_advice)
    }

    fn start_monitor(&mut self, options: &MonitorOptions) {
        let id = options.chardev.clone();
        // The graph has it.
        let Some(chardev) = self.chardevs.remove(&id) else { return };
        let mailbox = self.mailbox.clone();
        let monitor = Monitor {
            id,
            event_loop: self.control.clone(),
            pretty: options.pretty,
            clients: self.clients.clone(),
            requests: move |request| mailbox.push(Message::Request(request)),
        };
        self.control.spawn(monitor.run(chardev));
    }
}
