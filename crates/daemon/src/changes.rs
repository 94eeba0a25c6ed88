//! Adding and removing: what options of the command line and commands of monitors come to.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use block::options::BlockdevOptions;
use block::{ConnectContext, Connections, LEFT_LOCKED, OpenError, OpenedApart};
use control::qmp::events::BLOCK_EXPORT_DELETED;
use control::{
    Action, ExportOptions, FdName, Inventory, MetricsOptions, MonitorOptions, NbdAddr,
    NbdServerOptions, Step,
};
use event_loop::oneshot;
use exports::nbd::{NbdListen, NbdServer, NbdServerConfig};
use serde_json::json;

use super::chardev::{self, Chardev};
use super::commands::{Answer, DeleteMode};
use super::errors::{policy_of, watch};
use super::exports::ExportState;
use super::monitor::{Clients, Monitor};
use super::state::not_recorded;
use super::{Daemon, DaemonError, Message, metrics, open_files};

/// Connections that nodes need, by the node's name.
pub(super) type NodeConnections = BTreeMap<String, Connections>;

/// Connections that are being made.
type Connecting = Pin<Box<dyn Future<Output = Result<NodeConnections, OpenError>>>>;

/// Time between two attempts to open an image that a killed process may have left locked: no event announces the end of
/// the lock.
const LOOK_AGAIN_NS: u64 = 5_000_000;

/// Tells all clients that an export is gone.
pub(super) fn tell_export_deleted(clients: &Clients, id: &str) {
    clients.tell(&BLOCK_EXPORT_DELETED, json!({"id": id}));
}

impl Daemon {
    /// Carries out a command line.
    pub(super) async fn make(&mut self, steps: &[Step]) -> Result<(), DaemonError> {
        for step in steps {
            self.add(step).await.map_err(|error| error.of(&step.shown()))?;
        }
        Ok(())
    }

    /// Adds what a command describes. Other commands are executed while a node connects to its servers, which may take
    /// half a minute, and while it is opened.
    pub(super) async fn add_for_monitor(&mut self, step: Step) -> Result<Answer, DaemonError> {
        self.add_until(step, self.lock_patience()).await
    }

    /// Does the same. `patience`: the deadline for waiting for a locked image.
    async fn add_until(&mut self, step: Step, patience: u64) -> Result<Answer, DaemonError> {
        let Some(connecting) = self.connect_for_step(&step)? else {
            return self.add_apart(step, NodeConnections::new(), patience).await;
        };
        Ok(Answer::after(connecting, move |daemon, connected| {
            Box::pin(async move {
                let connections = connected.map_err(DaemonError::from)?;
                Ok(daemon.add_apart(step, connections, patience).await?)
            })
        }))
    }

    /// Adds what a command describes. A node is opened on another thread, and other commands are executed meanwhile, unless
    /// jobs use the nodes that it refers to.
    async fn add_apart(
        &mut self,
        step: Step,
        mut connections: NodeConnections,
        patience: u64,
    ) -> Result<Answer, DaemonError> {
        if let Action::Blockdev(options) = &step.action {
            self.check_paths(&step.action)?;
            let name = options.node_name.as_deref().unwrap_or_default();
            if let Ok(inventory) = self.inventory.with(&step)?.with_opening(name) {
                let connections = connections.remove(name).unwrap_or_default();
                let opening = self.nodes.begin_opening(options, connections)?;
                self.inventory = inventory;
                return Ok(Answer::after(opening.on_a_thread(), move |daemon, opened| {
                    Box::pin(async move { Ok(daemon.opened(step, opened, patience).await?) })
                }));
            }
        }
        self.add_connected(&step, connections).await?;
        Ok(().into())
    }

    /// Adds a node that was opened on another thread. Waits for a lock as [`open_node`](Self::open_node) does.
    async fn opened(
        &mut self,
        step: Step,
        opened: Result<OpenedApart, OpenError>,
        patience: u64,
    ) -> Result<Answer, DaemonError> {
        let Action::Blockdev(options) = &step.action else { return Ok(().into()) };
        let name = options.node_name.as_deref().unwrap_or_default();
        let inventory = self.inventory.opened(name);
        let error = match opened.and_then(|opened| self.nodes.finish_opening(opened)) {
            Ok(()) => {
                self.inventory = self.with_generated_names(&inventory, options);
                self.take_bitmaps().await?;
                return Ok(().into());
            }
            Err(error) => error,
        };
        // Nothing could come to use the node.
        self.inventory = inventory.without_node(name).unwrap_or(inventory);
        let now = self.control.now_ns();
        if !self.waits_for(&error) || now >= patience {
            return Err(error.into());
        }
        let pause = self.control.sleep_until(now + LOOK_AGAIN_NS);
        Ok(Answer::after(pause, move |daemon, ()| {
            Box::pin(async move { Ok(daemon.add_until(step, patience).await?) })
        }))
    }

    /// Begins the connections that nodes need for what a command describes, if they need any.
    ///
    /// # Errors
    ///
    /// The command would fail anyway.
    fn connect_for_step(&mut self, step: &Step) -> Result<Option<Connecting>, DaemonError> {
        let connecting: Option<Connecting> = match &step.action {
            Action::Blockdev(options) => {
                self.check_paths(&step.action)?;
                self.inventory.with(step)?;
                let name = options.node_name.clone().unwrap_or_default();
                self.connect(options).map(|connecting| {
                    let connected = async move { Ok([(name, connecting.await?)].into()) };
                    Box::pin(connected) as Connecting
                })
            }
            Action::Export(options) => {
                self.check_paths(&step.action)?;
                self.inventory.with(step)?;
                self.connect_for(options)?.map(|connecting| Box::pin(connecting) as Connecting)
            }
            _ => None,
        };
        Ok(connecting)
    }

    /// Adds what an option, or a command, describes.
    pub(super) async fn add(&mut self, step: &Step) -> Result<(), DaemonError> {
        self.add_connected(step, NodeConnections::new()).await
    }

    /// Does the same, with connections made beforehand.
    async fn add_connected(
        &mut self,
        step: &Step,
        mut connections: NodeConnections,
    ) -> Result<(), DaemonError> {
        self.check_paths(&step.action)?;
        let mut inventory = self.inventory.with(step)?;
        match &step.action {
            Action::Object(options) => self.make_object(options)?,
            Action::Blockdev(options) => {
                let name = options.node_name.as_deref().unwrap_or_default();
                self.open_node(options, connections.remove(name)).await?;
                inventory = self.with_generated_names(&inventory, options);
                self.take_bitmaps().await?;
            }
            Action::Export(options) => {
                self.be_active_for(options, &mut connections).await?;
                self.lock_images_for(options).await?;
                let nodes: Vec<_> =
                    options.nodes().map(|node| self.nodes.get(node)).collect::<Result<_, _>>()?;
                let policy = policy_of(options, &self.control, &self.clients);
                let export = self.start_export(options, policy.as_ref()).await?;
                watch(options, &nodes, &*export, &self.control, &self.clients);
                // While the daemon starts, exports begin later and all together: see `let_in`.
                if self.origin.serves {
                    drop(export.begin());
                }
                self.exports.add(options, export, nodes, policy);
            }
            Action::Chardev(options) => {
                let name = format!("chardev {}", options.id);
                let chardev = match self.origin.listener(&name) {
                    Some((fd, file)) => Chardev::taken_over(&self.control, fd, file)?,
                    None => {
                        Chardev::open(&self.control, options, &mut self.entrances.given).await?
                    }
                };
                self.entrances.add_chardev(&options.id, name, chardev)?;
            }
            Action::Monitor(options) => self.start_monitor(options),
            Action::NbdServer(options) => self.start_nbd_server(options)?,
            Action::Metrics(options) => self.start_metrics(options)?,
        }
        self.inventory = inventory;
        Ok(())
    }

    /// Returns the inventory with the generated names of the nodes inside a node that was opened.
    pub(super) fn with_generated_names(
        &self,
        inventory: &Inventory,
        options: &BlockdevOptions,
    ) -> Inventory {
        let top = options.node_name.as_deref().unwrap_or_default();
        inventory.with_generated_names(top, |node, role| {
            let children = self.nodes.info(node)?.children;
            let child = children.iter().find(|child| child.role == role)?;
            Some(child.edge.node().name().to_owned())
        })
    }

    /// Opens a node. An image that a killed daemon was writing to stays locked until the kernel has
    /// finished its last requests: which is waited for, as they must not overtake those of ours. No
    /// event tells of it.
    pub(super) async fn open_node(
        &mut self,
        options: &BlockdevOptions,
        mut connections: Option<Connections>,
    ) -> Result<(), DaemonError> {
        let patience = self.lock_patience();
        loop {
            let connections = match connections.take() {
                Some(connections) => connections,
                None => match self.connect(options) {
                    Some(connecting) => connecting.await?,
                    None => Connections::default(),
                },
            };
            let opened = self.nodes.begin_opening(options, connections)?.on_a_thread().await?;
            match self.nodes.finish_opening(opened) {
                Err(error) if self.waits_for(&error) => {
                    self.wait_for_lock(error, patience).await?;
                }
                opened => return Ok(opened?),
            }
        }
    }

    /// Locks the images of an export. Waits for locks that a killed process has left, as in [`open_node`](Self::open_node).
    async fn lock_images_for(&self, export: &ExportOptions) -> Result<(), DaemonError> {
        let patience = self.lock_patience();
        for node in export.nodes() {
            loop {
                match self.nodes.get(node) {
                    Err(error) if self.waits_for(&error) => {
                        self.wait_for_lock(error, patience).await?
                    }
                    Err(error) => return Err(error.into()),
                    Ok(_) => break,
                }
            }
        }
        Ok(())
    }

    /// Begins the connections that a node needs, if it needs any.
    pub(super) fn connect(
        &mut self,
        options: &BlockdevOptions,
    ) -> Option<impl Future<Output = Result<Connections, OpenError>> + use<>> {
        let given = RefCell::new(&mut self.entrances.given);
        let inherited = |fd: &FdName| {
            let socket = given.borrow_mut().connected(fd);
            socket.map_err(|error| OpenError::new(error.to_string()))
        };
        let context = ConnectContext {
            event_loop: &self.control,
            credentials: self.nodes.known_credentials(),
            nodes: &self.nodes,
            inherited: &inherited,
        };
        Connections::begin(&context, options)
    }

    /// Whether an image may soon be free that could not be opened. One that a process may have open
    /// that cannot be looked into is waited for only before the daemon serves: afterwards that is the rule
    /// in the sandbox, and a client of a monitor waits for the answer.
    pub(super) fn waits_for(&self, error: &OpenError) -> bool {
        error.is_left_locked() || !self.origin.serves && error.may_be_left_locked()
    }

    /// Returns the deadline for waiting for a locked image without a known owner, in nanoseconds.
    pub(super) fn lock_patience(&self) -> u64 {
        self.control.now_ns() + LEFT_LOCKED.as_nanos() as u64
    }

    /// Waits briefly before another attempt, until the deadline `patience`.
    pub(super) async fn wait_for_lock(
        &self,
        error: OpenError,
        patience: u64,
    ) -> Result<(), DaemonError> {
        if self.control.now_ns() >= patience {
            return Err(error.into());
        }
        self.control.sleep_until(self.control.now_ns() + LOOK_AGAIN_NS).await;
        Ok(())
    }

    /// `blockdev-reopen`. Nodes are opened anew one after the other: when one cannot be, or the state file
    /// cannot be written, that node keeps its options, and those before it have changed.
    pub(super) async fn reopen(
        &mut self,
        mut nodes: Vec<BlockdevOptions>,
    ) -> Result<(), DaemonError> {
        // A node that writes becomes read-only before the nodes below it, and writable after them.
        let height = |options: &BlockdevOptions| {
            self.inventory.height(options.node_name.as_deref().unwrap_or_default())
        };
        nodes.sort_by_key(|options| match options.read_only {
            true => (false, usize::MAX - height(options)),
            false => (true, height(options)),
        });
        let mut inventory = self.inventory.clone();
        for options in &nodes {
            let name = options.node_name.as_deref().unwrap_or_default();
            if let Some((_, filter)) =
                self.nodes.job_filters().find(|(_, filter)| filter.name() == name)
            {
                return Err(DaemonError::new(format!(
                    "Block format '{}' used by node '{name}' does not support reopening files",
                    filter.driver
                )));
            }
            inventory = inventory.with_reopened(options, &|node, role| self.child(node, role))?;
        }
        for options in &nodes {
            self.check_paths(&Action::Blockdev(options.clone()))?;
        }
        let mut done = Vec::new();
        for options in &nodes {
            let name = options.node_name.as_deref().unwrap_or_default();
            match self.reopen_one(name, options).await {
                Ok(before) => done.extend(before.map(|before| (name, before))),
                Err(error) => {
                    // The command changes all nodes or none.
                    for (name, before) in done.into_iter().rev() {
                        if let Err(why) = self.reopen_one(name, &before).await {
                            log::error!(
                                "node '{name}': restoring its previous options failed: {why}"
                            );
                        }
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Gives one node other options. Returns the previous ones.
    async fn reopen_one(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
    ) -> Result<Option<BlockdevOptions>, DaemonError> {
        let _moving = self.agenda.moving();
        let (before, inventory) = (self.nodes.told_options(name), self.inventory.clone());
        // The reopened node may accept writes from now on: until the state file has it, requests are held.
        let held = self.nodes.reopen(name, options).await?;
        if let Some(tracking) = self.nodes.tracking(name) {
            tracking.secure(name, &self.control).await;
        }
        self.inventory =
            self.inventory.with_reopened(options, &|node, role| self.child(node, role))?;
        let Err(error) = self.record().await else { return Ok(before) };
        let Some(before) = before else { return Err(not_recorded(error)) };
        if let Err(why) = self.nodes.undo_reopen(name, &before, held).await {
            log::error!(
                "node '{name}': restoring its previous options failed: {why}; a restart opens it \
                 with the previous options, unless a later change is written to the state file"
            );
            return Err(not_recorded(error));
        }
        self.inventory = inventory;
        // The new file may be in place, if only the fsync of its folder failed.
        let _ = self.record().await;
        Err(error)
    }

    /// The name of the child that a node has in a role.
    fn child(&self, node: &str, role: &str) -> Option<String> {
        let children = self.nodes.info(node)?.children;
        Some(children.iter().find(|child| child.role == role)?.edge.node().known_name())
    }

    /// Checks that no job has put a filter of that name above its source.
    ///
    /// Exports and nodes can use such a filter; other commands are refused.
    pub(super) fn is_no_filter(&self, name: &str) -> Result<(), DaemonError> {
        match self.nodes.is_filter(name) {
            true => Ok(self.inventory.free_of_jobs(name)?),
            false => Ok(()),
        }
    }

    /// `blockdev-del`. Completes when the node is closed, by another thread.
    pub(super) fn delete_node(
        &mut self,
        name: &str,
    ) -> Result<impl Future<Output = ()> + use<>, DaemonError> {
        let inventory = self.inventory.without_node(name)?;
        let closed = self.nodes.remove_apart(name)?;
        self.inventory = inventory;
        Ok(closed)
    }

    /// Begins a `block_resize`. Other commands are executed until its end: librbd may wait for half a minute.
    pub(super) async fn resize(
        &mut self,
        device: Option<&str>,
        node_name: Option<&str>,
        size: i64,
    ) -> Result<Answer, DaemonError> {
        // No node has a device on it.
        if let Some(name) = node_name {
            self.is_no_filter(name)?;
        }
        let Some(name) = node_name.filter(|name| self.nodes.node(name).is_ok()) else {
            let (device, name) = (device.unwrap_or_default(), node_name.unwrap_or_default());
            let message = format!("Cannot find device='{device}' nor node-name='{name}'");
            return Err(DaemonError::new(message));
        };
        let Ok(size) = u64::try_from(size) else {
            return Err(DaemonError::new("Parameter 'size' expects a >0 size"));
        };
        let inventory = self.inventory.with_resize(name)?;
        let resizing = self.nodes.resize(name, size, &self.control)?;
        self.inventory = inventory;
        let name = name.to_owned();
        Ok(Answer::after(resizing, move |daemon, resized| {
            Box::pin(async move {
                daemon.inventory = daemon.inventory.resized(&name);
                resized.map_err(DaemonError::new)?;
                Ok(().into())
            })
        }))
    }

    /// `block-export-del`: has the export end. When it has, [`export_ended`](Self::export_ended) is
    /// called, and then what is returned completes, whichever way.
    pub(super) async fn delete_export(
        &mut self,
        id: &str,
        mode: DeleteMode,
    ) -> Result<oneshot::Receiver<()>, DaemonError> {
        match mode {
            DeleteMode::Safe => self.exports.hung_up_are_gone(id).await,
            DeleteMode::Hard => self.exports.spare_nobody(id),
        }
        let refused = match (self.exports.state(id), mode) {
            (None, _) => format!("Export '{id}' is not found"),
            (Some(ExportState::ShuttingDown), _) => {
                format!("Export '{id}' is already shutting down")
            }
            (Some(ExportState::InUse), DeleteMode::Safe) => format!("export '{id}' still in use"),
            (Some(ExportState::InUse | ExportState::Idle), _) => return Ok(self.exports.stop(id)),
        };
        Err(DaemonError::new(refused))
    }

    /// `nbd-server-stop`: takes no more clients, and has all of its exports end; what is returned
    /// completes when they have, as with [`delete_export`](Self::delete_export).
    pub(super) async fn stop_nbd_server(
        &mut self,
    ) -> Result<Vec<oneshot::Receiver<()>>, DaemonError> {
        let inventory = self.inventory.without_nbd_server()?;
        if let Some(server) = self.entrances.nbd_server.take() {
            server.stop().await;
        }
        let exports: Vec<String> = inventory.nbd_exports().cloned().collect();
        self.inventory = inventory;
        let serving = |id: &&String| self.exports.state(id) != Some(ExportState::ShuttingDown);
        let ids: Vec<&String> = exports.iter().filter(serving).collect();
        Ok(ids.into_iter().map(|id| self.exports.stop(id)).collect())
    }

    /// An export has ended: what it used may go from now on.
    pub(super) fn export_ended(&mut self, id: &str) {
        self.inventory = self.inventory.without_export(id);
        tell_export_deleted(&self.clients, id);
        self.exports.forget(id);
    }

    fn start_nbd_server(&mut self, options: &NbdServerOptions) -> Result<(), DaemonError> {
        let taken = self.origin.nbd_listeners();
        let listen = match &options.addr {
            _ if !taken.is_empty() => {
                let shared = |(socket, file)| (Arc::new(socket), file);
                NbdListen::TakenOver(taken.into_iter().map(shared).collect())
            }
            NbdAddr::Unix { path } => self.entrances.given.listen_at(path)?.into(),
            NbdAddr::Abstract { name, tight } => {
                NbdListen::Abstract { name: name.clone(), tight: *tight }
            }
            NbdAddr::Vsock { cid, port } => NbdListen::Vsock { cid: *cid, port: *port },
            NbdAddr::Inet { host, port, to, ipv4, ipv6 } => {
                let (host, port, to, ipv4, ipv6) = (host.clone(), *port, *to, *ipv4, *ipv6);
                let is_wanted = |addr: &SocketAddr| if addr.is_ipv4() { ipv4 } else { ipv6 };
                match self.entrances.given.at_host(&host, port..=to, is_wanted)? {
                    sockets if !sockets.is_empty() => NbdListen::Fds(sockets),
                    _ => NbdListen::Inet { host, port, to, ipv4, ipv6 },
                }
            }
            NbdAddr::Fd { fd } => NbdListen::Fds(vec![self.entrances.given.listener(fd)?]),
        };
        let config = NbdServerConfig {
            listen,
            max_connections: open_files::connections(options.max_connections),
            handshake_max_seconds: options.handshake_max_seconds,
            tls: self.acceptor(options)?,
            held: !self.origin.serves,
        };
        let server = NbdServer::start(&self.control, config);
        self.entrances.nbd_server = Some(server.map_err(DaemonError::with_advice)?);
        Ok(())
    }

    fn start_metrics(&mut self, options: &MetricsOptions) -> Result<(), DaemonError> {
        let name = self.entrances.next_metrics();
        let listener = match self.origin.listener(&name) {
            Some((fd, file)) => chardev::taken_over(&self.control, fd, file)?,
            None => chardev::listen(&self.control, &options.addr, &mut self.entrances.given)?,
        };
        self.entrances.record(name, listener.hand_over().map_err(DaemonError::new)?);
        let mailbox = self.agenda.mailbox.clone();
        let ask = Rc::new(move |answer| mailbox.push(Message::Statistics(answer)));
        let (event_loop, turn) = (self.control.clone(), self.entrances.turn());
        let server = metrics::Server { event_loop, ask, turn };
        self.control.spawn(server.run(listener));
        Ok(())
    }

    fn start_monitor(&mut self, options: &MonitorOptions) {
        let id = options.chardev.clone();
        // The inventory has it.
        let Some(chardev) = self.entrances.take_chardev(&id) else { return };
        let mailbox = self.agenda.mailbox.clone();
        let monitor = Monitor {
            id,
            event_loop: self.control.clone(),
            pretty: options.pretty,
            clients: self.clients.clone(),
            turn: self.entrances.turn(),
            requests: move |request| mailbox.push(Message::Request(request)),
            here: RefCell::default(),
        };
        self.control.spawn(monitor.run(chardev));
    }
}
