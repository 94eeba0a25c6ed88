//! The order in which nodes are closed when the daemon ends.

use std::collections::BTreeSet;
use std::sync::Weak;

use super::{Kept, NodeRegistry};

impl NodeRegistry {
    /// Closes the nodes that have no users, at shutdown, and drops filters of jobs that have none.
    ///
    /// Leaves out nodes that reach a server: to close them may wait for the server. Calls `closing` with the name of each
    /// node before it is closed.
    pub fn close_idle(&mut self, closing: impl Fn(&str)) {
        // A node that is being resized is still written to.
        while !self.resizing.is_any() {
            let used = self.used_names();
            let filters = self.job_filters();
            let left = filters.filter(|(_, filter)| !used.contains(filter.name()));
            let left: Vec<_> =
                left.map(|(name, filter)| (name.to_owned(), filter.name().to_owned())).collect();
            let is_idle = |name: &str| !used.contains(name) && !self.reaches_a_server(name);
            let tops = self.nodes.iter().filter(|(_, entry)| matches!(entry.node, Kept::Top(_)));
            let idle = tops.filter(|(name, entry)| entry.filters.is_empty() && is_idle(name));
            let idle: Vec<_> = idle.map(|(name, _)| name.clone()).collect();
            if left.is_empty() && idle.is_empty() {
                return;
            }
            left.iter().for_each(|(name, filter)| self.remove_filter(name, filter));
            for name in idle {
                closing(&name);
                self.nodes.remove(&name);
            }
            self.forget_closed();
        }
    }

    /// Closes all nodes in the end. Those that reach a server come last.
    ///
    /// Calls `closing` with the name of each node before it is closed.
    pub fn close_all(mut self, closing: impl Fn(&str)) {
        self.close_idle(&closing);
        // A node above others comes before them: what it writes at its end goes through them.
        while let Some(name) = self.next_to_close() {
            closing(&name);
            self.nodes.remove(&name);
            self.forget_closed();
        }
    }

    fn next_to_close(&self) -> Option<String> {
        let used = self.used_names();
        let tops = || self.nodes.iter().filter(|(_, entry)| matches!(entry.node, Kept::Top(_)));
        let next = tops().find(|(name, _)| !used.contains(*name)).or_else(|| tops().next());
        next.map(|(name, _)| name.clone())
    }

    /// Returns the names of the nodes that have users, including nodes on top of them.
    fn used_names(&self) -> BTreeSet<String> {
        let edges = self.edges.borrow();
        edges.iter().filter_map(Weak::upgrade).map(|edge| edge.node().name().to_owned()).collect()
    }

    /// Returns whether a node, or one below it, uses a server or a library that does.
    fn reaches_a_server(&self, name: &str) -> bool {
        let mut names = vec![name.to_owned()];
        let mut at = 0;
        while let Some(name) = names.get(at) {
            let Some(entry) = self.nodes.get(name) else { return false };
            let needs = entry.options.driver.needs();
            let servers = !needs.sockets.is_empty() || !needs.servers.is_empty();
            if servers
                || needs.abstract_sockets
                || needs.vsock
                || entry.options.driver.kind().library.is_some()
            {
                return true;
            }
            let below = entry.children.iter().map(|child| child.edge.node().name().to_owned());
            let below: Vec<_> = below.filter(|name| !names.contains(name)).collect();
            names.extend(below);
            at += 1;
        }
        false
    }
}
