//! Gives up image locks before their nodes are closed.

use super::NodeRegistry;
use crate::driver::Layer;
use crate::drivers::file::Claims;

impl NodeRegistry {
    /// Releases image locks at shutdown. Only the nodes in `busy` are still in use.
    ///
    /// Keeps locks of images below a busy node, and below a format that writes metadata when it is
    /// closed. Images without their lock may still be flushed.
    pub fn give_up_locks(&self, busy: &[String]) {
        // A node that is being resized is still written to.
        if self.resizing.is_any() {
            return;
        }
        let writes = |info: &super::NodeInfo<'_>| {
            info.active
                && info.options.driver.layer() == Layer::Format
                && !info.node.geometry().read_only
        };
        let formats = self.all().filter(writes).map(|info| info.name.to_owned());
        let mut needed: Vec<String> = busy.iter().cloned().chain(formats).collect();
        let mut at = 0;
        while let Some(name) = needed.get(at) {
            let children = self.nodes.get(name).map_or(&[][..], |entry| &entry.children);
            let below = children.iter().map(|child| child.edge.node().name().to_owned());
            let below: Vec<_> = below.filter(|name| !needed.contains(name)).collect();
            needed.extend(below);
            at += 1;
        }
        let idle = self.locks.iter().filter(|(name, _)| !needed.contains(name));
        for lock in idle.filter_map(|(_, lock)| lock.upgrade()) {
            // Claiming less cannot conflict.
            let _ = lock.change(Claims::none());
        }
    }
}
