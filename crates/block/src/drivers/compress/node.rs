//! A compress node.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

use crate::drivers::align::{Aligned, WholeBlocks};
use crate::drivers::common::Common;
use crate::drivers::range_lock::RangeLock;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry, cluster_size};
use crate::options::BlockdevOptions;
use crate::request::Request;

/// Bytes of a cluster when the image does not tell.
const CLUSTER: u64 = 1 << 16;

/// A node above an image that stores writes compressed. Only whole clusters are compressed: a write to a part of a
/// cluster reads the rest.
pub(super) struct CompressNode {
    name: String,
    child: Arc<dyn BlockNode>,
    shared: Arc<Shared>,
}

/// What the node's channels share.
struct Shared {
    common: Common,
    child: Arc<dyn BlockNode>,
    cluster: u64,
    range_lock: RangeLock,
}

impl CompressNode {
    /// A node above `child`, which [compresses](BlockNode::compresses).
    pub(super) fn new(
        name: String,
        options: &BlockdevOptions,
        child: Arc<dyn BlockNode>,
    ) -> Result<Self, OpenError> {
        let common = Common::new(options, &*child);
        let cluster = cluster_size(&child).unwrap_or(CLUSTER);
        let range_lock = RangeLock::new(cluster as usize);
        let shared = Shared { common, child: child.clone(), cluster, range_lock };
        Ok(CompressNode { name, child, shared: Arc::new(shared) })
    }
}

impl BlockNode for CompressNode {
    fn name(&self) -> &str {
        &self.name
    }

    /// Requests are fastest in whole clusters.
    fn geometry(&self) -> Geometry {
        let below = self.shared.common.geometry(self.child.geometry());
        Geometry { physical_block_size: self.shared.cluster as u32, ..below }
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.child.clone().open_channel(event_loop)?;
        let below = self.shared.common.channel(self.child.geometry(), child);
        Ok(Aligned::new(event_loop, &self.shared, Rc::new(Compressing(below))))
    }
}

impl WholeBlocks for Shared {
    fn block(&self) -> u64 {
        self.cluster
    }

    fn range_lock(&self) -> &RangeLock {
        &self.range_lock
    }

    fn end(&self) -> u64 {
        self.child.geometry().size
    }

    /// Checks that the range lies on the disk. The child checks requests of whole clusters.
    fn admit(&self, request: Request) -> Option<Request> {
        let request = self.common.admit(request)?;
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.end() => Some(request),
            _ => {
                let errno = request.op.beyond_end();
                request.complete(Err(errno));
                None
            }
        }
    }
}

/// A channel that asks the image below to compress its writes.
pub(crate) struct Compressing(Rc<dyn Channel>);

impl Compressing {
    /// Returns `channel` itself, or compressing if `compress` is set.
    pub(crate) fn if_asked(compress: bool, channel: Rc<dyn Channel>) -> Rc<dyn Channel> {
        if compress { Rc::new(Compressing(channel)) } else { channel }
    }
}

impl Channel for Compressing {
    fn submit(&self, request: Request) {
        self.0.submit(request.compressed());
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn drain_begin(&self) {
        self.0.drain_begin();
    }

    fn drain_end(&self) {
        self.0.drain_end();
    }
}
