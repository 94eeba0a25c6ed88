//! Chains of images: what jobs and commands change in them.

use block::node::BackingName;
use nix::errno::Errno;

use super::Daemon;

impl Daemon {
    /// Writes the name of another backing file, or none, to the header of a node's image. Reopens a read-only
    /// node for writing.
    ///
    /// # Errors
    ///
    /// Those of [`FormattedImage::set_backing_name`](block::node::FormattedImage::set_backing_name).
    pub(super) async fn set_backing_name(
        &mut self,
        name: &str,
        backing: Option<BackingName>,
    ) -> Result<(), Errno> {
        let node = self.nodes.node(name).map_err(|_| Errno::ENOENT)?;
        node.set_backing_name(backing, &self.control).await
    }
}
