//! Chains of images: what jobs and commands change in them.

use block::node::BackingName;
use nix::errno::Errno;

use super::Daemon;

impl Daemon {
    /// Has a node's image name another backing file, or none. A node that is open for reading is opened for writing
    /// before.
    ///
    /// # Errors
    ///
    /// Those of [`BlockNode::set_backing_name`](block::node::BlockNode::set_backing_name).
    pub(super) async fn set_backing_name(
        &mut self,
        name: &str,
        backing: Option<BackingName>,
    ) -> Result<(), Errno> {
        let node = self.nodes.node(name).map_err(|_| Errno::ENOENT)?;
        node.set_backing_name(backing, &self.control).await
    }
}
