//! Other options for nodes: `blockdev-reopen`.

use block::driver::ChildOption;
use block::options::{BlockdevOptions, BlockdevRef};
use block::permissions::ChildUse;

use super::{Child, Inventory, writes_to};
use crate::error::OptionError;

impl Inventory {
    /// Returns the inventory with a node's other options, and those of the nodes defined inside it.
    ///
    /// `present` returns the name of the child that a node has, by its role: that of a file which only an image names, too.
    ///
    /// # Errors
    ///
    /// There is no such node, a job that uses the node does not bear it, the node becomes read-only while a user writes to
    /// it, or two users of a node exclude each other.
    pub fn with_reopened(
        &self,
        options: &BlockdevOptions,
        present: &dyn Fn(&str, &str) -> Option<String>,
    ) -> Result<Inventory, OptionError> {
        let name = options.node_name.as_deref().unwrap_or_default();
        let mut inventory = self.clone();
        inventory.reopen(name, options, present)?;
        inventory.check_height(name)?;
        inventory.check_permissions()?;
        Ok(inventory)
    }

    fn reopen(
        &mut self,
        name: &str,
        options: &BlockdevOptions,
        present: &dyn Fn(&str, &str) -> Option<String>,
    ) -> Result<(), OptionError> {
        self.is_settled(name)?;
        self.bear_reopen(name, options, present)?;
        self.is_active(name)?;
        let Some(node) = self.nodes.get(name) else {
            let message = format!("Failed to find node with node-name='{name}'");
            return Err(OptionError::new(message));
        };
        if options.force_share != node.force_share {
            return Err(OptionError::new("Cannot change the option 'force-share'"));
        }
        let mut objects = Vec::new();
        for (kind, id) in options.driver.objects() {
            objects.push(self.object(kind, id)?);
        }
        let (before, mut children, mut inside) = (node.children.clone(), Vec::new(), Vec::new());
        let mut told = options.driver.children();
        // QSD looks at the backing image first.
        told.sort_by_key(|child| child.role != "backing");
        for ChildOption { role, used_as, node: child } in told {
            let old = before.iter().find(|child| child.role == role);
            match child {
                // A file that this image names, which is not in the inventory.
                BlockdevRef::Name(below)
                    if below.starts_with('#')
                        && !self.nodes.contains_key(below)
                        && present(name, role).as_deref() == Some(below) => {}
                BlockdevRef::Name(below) => {
                    if !self.nodes.contains_key(below) {
                        let message = format!("Cannot find device='' nor node-name='{below}'");
                        return Err(OptionError::new(message));
                    }
                    if below == name || self.lies_on(below, name) {
                        let message = format!(
                            "Making '{below}' a {role} child of '{name}' would create a cycle"
                        );
                        return Err(OptionError::new(message));
                    }
                    let owned = old.is_some_and(|child| child.owned && child.name == *below);
                    children.push(Child { role, used_as, name: below.clone(), owned });
                }
                BlockdevRef::Inline(options) => {
                    // The registry refuses one that is new. Files that an image names are not in the inventory.
                    if let Some(old) = old {
                        children.push(old.clone());
                        inside.push((old.name.clone(), &**options));
                    }
                }
            }
        }
        let owned = before.iter().filter(|child| child.owned);
        let gone: Vec<_> = owned
            .filter(|old| !children.iter().any(|child| child.name == old.name))
            .map(|old| old.name.clone())
            .collect();
        if let Some(node) = self.nodes.get_mut(name) {
            node.read_only = options.read_only;
            node.stays_read_only = options.stays_read_only;
            (node.objects, node.children) = (objects, children);
        }
        gone.iter().for_each(|name| self.forget_nested(name));
        if options.read_only && self.is_written(name) {
            let message = format!("Read-only block node '{name}' cannot support read-write users");
            return Err(OptionError::new(message));
        }
        for (below, options) in inside {
            self.reopen(&below, options, present)?;
        }
        Ok(())
    }

    /// Checks that jobs bear other options of a node. Jobs on chains do, unless they write to a node that becomes read-only,
    /// or need an image behind it that changes.
    ///
    /// # Errors
    ///
    /// A job does not, in QSD's words.
    fn bear_reopen(
        &self,
        name: &str,
        options: &BlockdevOptions,
        present: &dyn Fn(&str, &str) -> Option<String>,
    ) -> Result<(), OptionError> {
        for job in self.jobs.values().filter(|job| job.uses(name)) {
            let Some(written) = &job.chain.writes else { return Err(job.conflict(name)) };
            if written == name && options.read_only {
                let message =
                    format!("Read-only block node '{name}' cannot support read-write users");
                return Err(OptionError::new(message));
            }
            if !job.chain.links.iter().any(|image| image == name) {
                continue;
            }
            let before = present(name, "backing");
            let children = options.driver.children();
            let backing = children.iter().find(|child| child.role == "backing");
            let after = backing.and_then(|child| match child.node {
                BlockdevRef::Name(wanted) => Some(self.below_filter(wanted).to_owned()),
                // The node that is there, or refused.
                BlockdevRef::Inline(_) => before.clone(),
            });
            match before {
                before if before == after => {}
                Some(before) => {
                    return Err(OptionError::new(format!(
                        "Cannot change frozen 'backing' link from '{name}' to '{before}'"
                    )));
                }
                None => return Err(job.conflict(name)),
            }
        }
        Ok(())
    }

    /// Removes a node that was defined inside another one, unless something else uses it.
    fn forget_nested(&mut self, name: &str) {
        let is_used = self.nodes.values().any(|node| node.lies_on(name))
            || self.exports.values().any(|export| export.nodes.iter().any(|node| node == name));
        if is_used {
            return;
        }
        let gone = self.nodes.remove(name);
        let owned = gone.into_iter().flat_map(|node| node.children).filter(|child| child.owned);
        owned.for_each(|child| self.forget_nested(&child.name));
    }

    /// Returns how many nodes lie below a node, on the longest way.
    pub fn height(&self, name: &str) -> usize {
        let Some(node) = self.nodes.get(name) else { return 0 };
        node.children.iter().map(|child| 1 + self.height(&child.name)).max().unwrap_or(0)
    }

    /// Whether an export may write to a node, or to one that writes to it; or a format, which writes by itself.
    fn is_written(&self, name: &str) -> bool {
        self.exports.values().any(|e| e.options.writable && e.nodes.iter().any(|node| node == name))
            || self.nodes.iter().any(|(above, node)| {
                let mut uses = node.children.iter().filter(|child| child.name == name);
                uses.any(|child| {
                    child.used_as.always_writes()
                        || !node.read_only
                            && (matches!(child.used_as, ChildUse::Metadata)
                                || writes_to(child) && self.is_written(above))
                })
            })
    }
}
