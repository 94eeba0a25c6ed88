//! `blockdev-set-active`: gives an image to another process, or takes it back.

use control::ExportOptions;

use super::{Daemon, DaemonError};

impl Daemon {
    /// `blockdev-set-active`. While its node is inactive, a vhost-user export leaves requests in the queues
    /// for the process that serves them next.
    pub(super) async fn set_active(
        &mut self,
        name: Option<&str>,
        active: bool,
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
            result = self.change_activity(name, active).await;
            if result.is_err() {
                break;
            }
            changed.push(name);
        }
        match &result {
            Ok(()) => self.inventory = inventory,
            Err(_) => {
                for name in changed.into_iter().rev() {
                    if let Err(error) = self.change_activity(name, !active).await {
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

    async fn change_activity(&mut self, name: &str, active: bool) -> Result<(), DaemonError> {
        if !active {
            return Ok(self.nodes.inactivate(&self.control, name).await?);
        }
        let patience = self.lock_patience();
        loop {
            match self.nodes.activate(name).await {
                Err(error) if self.waits_for(&error) => self.wait_for_lock(error, patience).await?,
                activated => return Ok(activated?),
            }
        }
    }

    /// Activates the node for an export that does not allow an inactive node, as QSD does.
    pub(super) async fn be_active_for(
        &mut self,
        export: &ExportOptions,
    ) -> Result<(), DaemonError> {
        for node in export.nodes().filter(|_| !export.allow_inactive) {
            if self.inventory.is_active(node).is_err() {
                self.set_active(Some(node), true).await?;
            }
        }
        Ok(())
    }
}
