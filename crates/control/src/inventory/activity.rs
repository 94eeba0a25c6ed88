//! Active and inactive nodes, and which other nodes change with one.

use block::driver::ChildOption;
use block::options::{BlockdevOptions, BlockdevRef};
use block::permissions::ChildUse;

use super::Inventory;
use crate::error::OptionError;
use crate::export::ExportOptions;

impl Inventory {
    /// Returns the inventory with a node, or all nodes, active or inactive.
    ///
    /// Also returns which explicitly opened nodes change, in an order in which each node lies on nodes that have the
    /// new state.
    ///
    /// A node is activated with all nodes below it. It is inactivated with those below it that no active node uses. If an
    /// export keeps one of those active, nothing changes.
    ///
    /// # Errors
    ///
    /// In QSD's words: the node does not exist, an active node lies on it, or an export does not permit it.
    pub fn with_active(
        &self,
        name: Option<&str>,
        active: bool,
    ) -> Result<(Inventory, Vec<String>), OptionError> {
        let (mut inventory, mut order) = (self.clone(), Vec::new());
        let names: Vec<String> = match name {
            Some(name) if !self.nodes.contains_key(name) => {
                let message = format!("Failed to find node with node-name='{name}'");
                return Err(OptionError::new(message));
            }
            Some(name) => vec![name.to_owned()],
            // Roots only; the others change with them.
            None => {
                self.nodes.keys().filter(|name| !self.has_above(name, |_| true)).cloned().collect()
            }
        };
        for top in names {
            if active {
                inventory.activate(&top, &mut order);
                continue;
            }
            let node = inventory.nodes.get(&top);
            if node.is_some_and(|node| !node.inactive) && inventory.has_active_above(&top) {
                return Err(OptionError::new("Node has active parent node"));
            }
            if !inventory.inactivate(&top, &mut order) {
                let what = if name.is_some() { "node" } else { "all nodes" };
                let message = format!("Failed to inactivate {what}: Operation not permitted");
                return Err(
                    OptionError::new(message).hint("allow-inactive=on lets an export bear it.")
                );
            }
        }
        inventory.check_permissions()?;
        Ok((inventory, order))
    }

    /// Checks that a node is active, as inactive nodes permit no other operation.
    ///
    /// # Errors
    ///
    /// The node is inactive.
    pub fn is_active(&self, name: &str) -> Result<(), OptionError> {
        match self.nodes.get(name).is_some_and(|node| node.inactive) {
            true => Err(OptionError::new(format!("Node '{name}' is inactive"))
                .hint("blockdev-set-active makes it active.")),
            false => Ok(()),
        }
    }

    fn has_above(&self, name: &str, which: impl Fn(&super::Node) -> bool) -> bool {
        self.nodes.values().any(|node| which(node) && node.lies_on(name))
    }

    fn has_active_above(&self, name: &str) -> bool {
        self.has_above(name, |node| !node.inactive)
    }

    /// Whether an export keeps a node active: any that may write to it, and any of a type that does not serve reads
    /// of an inactive node.
    fn is_kept(&self, name: &str) -> bool {
        self.exports.values().any(|export| {
            let ExportOptions { allow_inactive, writable, kind, .. } = &export.options;
            export.nodes.iter().any(|node| node == name)
                && !allow_inactive
                && (*writable || !kind.reads_inactive())
        })
    }

    pub(super) fn activate(&mut self, name: &str, order: &mut Vec<String>) {
        let Some(node) = self.nodes.get(name).filter(|node| node.inactive).cloned() else { return };
        for child in &node.children {
            self.activate(&child.name, order);
        }
        if let Some(node) = self.nodes.get_mut(name) {
            node.inactive = false;
        }
        if !node.nested {
            order.push(name.to_owned());
        }
    }

    /// Returns `false` if an export keeps the node active, or the node copies data by itself.
    fn inactivate(&mut self, name: &str, order: &mut Vec<String>) -> bool {
        let Some(node) = self.nodes.get(name).filter(|node| !node.inactive).cloned() else {
            return true;
        };
        // The filter copies to its target for as long as it exists.
        let copies = node.children.iter().any(|child| child.used_as == ChildUse::CopyTarget);
        if copies || self.is_kept(name) {
            return false;
        }
        if let Some(node) = self.nodes.get_mut(name) {
            node.inactive = true;
        }
        if !node.nested {
            order.push(name.to_owned());
        }
        // Nodes defined inside it are closed with it.
        let (owned, used): (Vec<_>, Vec<_>) = node.children.iter().partition(|child| child.owned);
        owned.iter().all(|child| self.inactivate(&child.name, order))
            && used.iter().all(|child| {
                self.has_active_above(&child.name) || self.inactivate(&child.name, order)
            })
    }

    /// Sets the activity of a new node and of the nodes defined inside it. If the node is active, checks that the nodes
    /// below are.
    pub(super) fn with_options_active(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
    ) -> Result<(), OptionError> {
        if !options.active {
            self.set_inactive(name);
            return Ok(());
        }
        for ChildOption { role, node: child, .. } in options.driver.children() {
            let (below, active) = match child {
                BlockdevRef::Name(below) => (below.as_str(), self.is_active(below).is_ok()),
                BlockdevRef::Inline(below) => {
                    (below.node_name.as_deref().unwrap_or_default(), below.active)
                }
            };
            if !active {
                let message =
                    format!("Inactive '{below}' can't be a {role} child of active '{name}'");
                return Err(OptionError::new(message));
            }
        }
        Ok(())
    }

    fn set_inactive(&mut self, name: &str) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        node.inactive = true;
        for child in node.children.clone().iter().filter(|child| child.owned) {
            self.set_inactive(&child.name);
        }
    }
}
