//! `snapshot-access`: a disk as it was when the [copy-before-write](super::copy_before_write) node above it was opened.

mod driver;
mod options;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

pub(super) use self::options::SNAPSHOT_ACCESS;
use crate::drivers::common::as_discards;
use crate::node::{BlockNode, Channel, Geometry};
use crate::options::Discard;

/// What a node's disk was.
struct SnapshotAccessNode {
    name: String,
    /// The copy-before-write node, which is in use.
    _child: Arc<dyn BlockNode>,
    snapshot: Arc<dyn BlockNode>,
    discard: Discard,
}

impl BlockNode for SnapshotAccessNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.snapshot.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.snapshot.clone())
    }

    fn can_forget(&self) -> bool {
        true
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let snapshot = self.snapshot.clone().open_channel(event_loop)?;
        Ok(as_discards(self.discard, snapshot))
    }
}
