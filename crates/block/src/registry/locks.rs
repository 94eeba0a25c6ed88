//! Image locks that are given up before their nodes are closed.

use super::NodeRegistry;
use crate::drivers::file::Claims;
use crate::options::Driver;

impl NodeRegistry {
    /// All is being taken down, and nodes are used only by way of those in `busy` from here on: gives up
    /// the locks of images that lie below none of these, nor below a format that writes its metadata
    /// when it is closed. Flushes of these images may follow.
    pub fn give_up_locks(&self, busy: &[String]) {
        // A node that is being given another size is still written to.
        if self.resizing.try_lock().is_err() {
            return;
        }
        let writes = |info: &super::NodeInfo<'_>| {
            let is_format = matches!(info.options.driver, Driver::Qcow2(_));
            info.active && is_format && !info.node.geometry().read_only
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
            // To claim less is refused by nobody.
            let _ = lock.change(Claims::none());
        }
    }
}
