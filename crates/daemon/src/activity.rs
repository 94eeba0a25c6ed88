//! `blockdev-set-active`: gives an image to another process, or takes it back.

use block::{Connections, OpenError};
use control::ExportOptions;

use super::changes::NodeConnections;
use super::commands::Answer;
use super::{Daemon, DaemonError};

impl Daemon {
    /// `blockdev-set-active`. Other commands are executed while nodes connect to their servers.
    pub(super) async fn set_active_for_monitor(
        &mut self,
        name: Option<String>,
        active: bool,
    ) -> Result<Answer, DaemonError> {
        let (_, names) = self.inventory.with_active(name.as_deref(), active)?;
        let Some(connecting) = active.then(|| self.connect_inactive(&names)).flatten() else {
            self.set_active(name.as_deref(), active, &mut NodeConnections::new()).await?;
            return Ok(().into());
        };
        Ok(Answer::after(connecting, move |daemon, connected| {
            Box::pin(async move {
                let mut connections = connected.map_err(DaemonError::from)?;
                daemon.set_active(name.as_deref(), active, &mut connections).await?;
                Ok(().into())
            })
        }))
    }

    /// Makes a node, or all nodes, active or inactive. While its node is inactive, a vhost-user export leaves
    /// requests in the queues for the process that serves them next. `connections`: made beforehand.
    async fn set_active(
        &mut self,
        name: Option<&str>,
        active: bool,
        connections: &mut NodeConnections,
    ) -> Result<(), DaemonError> {
        let (inventory, names) = self.inventory.with_active(name, active)?;
        if !active {
            for name in &names {
                self.inventory.free_of_jobs(name)?;
            }
            let inventory = &self.inventory;
            let changes = |node: &str| names.iter().any(|name| name == node);
            self.exports.pause(|export| inventory.any_node(export, changes)).await;
        }
        let mut changed = Vec::new();
        let mut result = Ok(());
        for name in &names {
            result = self.change_activity(name, active, connections).await;
            if result.is_err() {
                break;
            }
            changed.push(name);
        }
        match &result {
            Ok(()) => self.inventory = inventory,
            Err(_) => {
                for name in changed.into_iter().rev() {
                    let changed = self.change_activity(name, !active, connections).await;
                    if let Err(error) = changed {
                        log::error!("node {name}: {error}");
                    }
                }
            }
        }
        let (inventory, nodes) = (&self.inventory, &self.nodes);
        let is_inactive = |node: &str| !nodes.is_active(node);
        self.exports.pause(|export| inventory.any_node(export, is_inactive)).await;
        result
    }

    async fn change_activity(
        &mut self,
        name: &str,
        active: bool,
        connections: &mut NodeConnections,
    ) -> Result<(), DaemonError> {
        if !active {
            return Ok(self.nodes.inactivate(&self.control, name).await?);
        }
        let patience = self.lock_patience();
        loop {
            let connected = match connections.remove(name) {
                Some(connected) => connected,
                None => self.connect_again(name).await?,
            };
            match self.nodes.activate(name, connected).await {
                Err(error) if self.waits_for(&error) => self.wait_for_lock(error, patience).await?,
                activated => return Ok(activated?),
            }
        }
    }

    /// Makes the connections that a node needs when it becomes active.
    async fn connect_again(&mut self, name: &str) -> Result<Connections, DaemonError> {
        let names = [name.to_owned()];
        let Some(connecting) = self.connect_inactive(&names) else {
            return Ok(Connections::default());
        };
        Ok(connecting.await?.remove(name).unwrap_or_default())
    }

    /// Begins the connections that inactive nodes need, if they need any.
    fn connect_inactive(
        &mut self,
        names: &[String],
    ) -> Option<impl Future<Output = Result<NodeConnections, OpenError>> + use<>> {
        let mut begun = Vec::new();
        for name in names.iter().filter(|name| !self.nodes.is_active(name)).collect::<Vec<_>>() {
            let options = self.nodes.options(name);
            let connecting = options.and_then(|options| self.connect(&options));
            begun.extend(connecting.map(|connecting| (name.clone(), connecting)));
        }
        (!begun.is_empty()).then_some(async move {
            let mut connections = NodeConnections::new();
            for (name, connecting) in begun {
                connections.insert(name, connecting.await?);
            }
            Ok(connections)
        })
    }

    /// Begins the connections of the nodes that become active [for an export](Self::be_active_for), if they need any.
    ///
    /// # Errors
    ///
    /// A node cannot become active.
    pub(super) fn connect_for(
        &mut self,
        export: &ExportOptions,
    ) -> Result<Option<impl Future<Output = Result<NodeConnections, OpenError>> + use<>>, DaemonError>
    {
        let mut names = Vec::new();
        for node in export.nodes().filter(|_| !export.allow_inactive) {
            names.extend(self.inventory.with_active(Some(node), true)?.1);
        }
        names.sort();
        names.dedup();
        Ok(self.connect_inactive(&names))
    }

    /// Activates the node for an export that does not allow an inactive node, as QSD does.
    pub(super) async fn be_active_for(
        &mut self,
        export: &ExportOptions,
        connections: &mut NodeConnections,
    ) -> Result<(), DaemonError> {
        for node in export.nodes().filter(|_| !export.allow_inactive) {
            if self.inventory.is_active(node).is_err() {
                self.set_active(Some(node), true, connections).await?;
            }
        }
        Ok(())
    }
}
