//! A copy-on-read node.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

use crate::drivers::common::Common;
use crate::error::OpenError;
use crate::job::{Before, Bitmap, CacheRoom, CbwChannel, OnCbwError, Snapshot, What};
use crate::node::{BlockNode, Channel, Geometry, NoWaiting, RemoteImage, cluster_size};
use crate::options::BlockdevOptions;

/// Bytes of a part when the image does not tell the size of its clusters.
const PART: u64 = 1 << 16;

/// A node whose image gets each part that is used, before its first use.
///
/// Writes have their parts copied too. A write that did not would have to exclude the copying of its part by a read.
pub(super) struct CopyOnReadNode {
    name: String,
    common: Common,
    child: Arc<dyn BlockNode>,
    /// Parts that may still come from images behind. Parts beyond its end always pass: the image was shorter when the
    /// node was opened, and has no data of other images there.
    snapshot: Arc<Snapshot>,
    /// The image is a cache.
    is_cache: bool,
}

impl CopyOnReadNode {
    /// A node above `child`, which gets the data of images behind it, before the one of depth `end`. `cache`: bytes that the
    /// child takes up at most, if it is a cache; zero means no limit.
    pub(super) fn new(
        name: String,
        options: &BlockdevOptions,
        (end, cache): (u32, Option<u64>),
        child: Arc<dyn BlockNode>,
    ) -> Result<Self, OpenError> {
        let below = child.geometry();
        if below.read_only {
            return Err(OpenError::new("Block node is read-only").with_hint(format!(
                "copy-on-read writes to node '{}', also when nothing else does",
                child.name()
            )));
        }
        let common = Common::new(options, &*child);
        let cluster = cluster_size(&child).unwrap_or(PART).max(PART);
        let left = Bitmap::new(below.size, cluster, true);
        let what = What::Behind(end);
        let snapshot = match cache {
            None => Snapshot::new(left, OnCbwError::BreakGuestWrite, what),
            Some(max_size) => {
                let room = match max_size {
                    0 => u64::MAX,
                    most => most.saturating_sub(child.allocated().unwrap_or(0)),
                };
                let room = CacheRoom::new(name.clone(), room);
                Snapshot::new(left, OnCbwError::BreakSnapshot, what).of_cache(room)
            }
        };
        let (snapshot, is_cache) = (Arc::new(snapshot), cache.is_some());
        Ok(CopyOnReadNode { name, common, child, snapshot, is_cache })
    }
}

impl BlockNode for CopyOnReadNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.common.geometry(self.child.geometry())
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn remote_image(self: Arc<Self>) -> Option<Arc<dyn RemoteImage>> {
        let below = self.child.clone().remote_image();
        match (self.is_cache, below) {
            (true, Some(below)) => Some(Arc::new(Cached(below))),
            (_, below) => below,
        }
    }

    fn compresses(&self) -> bool {
        self.child.compresses()
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.child.geometry();
        let child = self.child.clone().open_channel(event_loop)?;
        let snapshot = self.snapshot.clone();
        let copying = CbwChannel::new(event_loop, child.clone(), child, snapshot, Before::All);
        Ok(self.common.channel(below, copying))
    }
}

/// A cache is the image behind it.
struct Cached(Arc<dyn RemoteImage>);

impl RemoteImage for Cached {
    fn stop_waiting(&self) -> Option<NoWaiting> {
        self.0.stop_waiting()
    }

    fn content(&self) -> Option<String> {
        self.0.content_behind()
    }

    fn may_name_files(&self) -> bool {
        self.0.content_behind().is_none() && self.0.may_name_files()
    }
}
