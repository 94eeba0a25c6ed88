//! A node whose writes are watched: by a write threshold, by dirty bitmaps.
//!
//! A node that nothing watches has no [`Tracked`] above it, and costs nothing.

mod channel;
mod threshold;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

use self::channel::TrackedChannel;
pub(crate) use self::threshold::ThresholdSender;
pub use self::threshold::{Exceeded, Threshold};
use std::os::fd::OwnedFd;

use crate::inherited::OpenImage;
use crate::node::{BackingName, BlockNode, Channel, Geometry, ImageDetails, LetGo, Renaming};

/// What watches the writes of a node; for all threads.
pub struct Tracking {
    /// The write threshold.
    pub threshold: Threshold,
}

impl Tracking {
    /// Of the node of that name. Exceeded thresholds are reported to `reports`.
    pub(crate) fn new(name: &str, reports: Option<ThresholdSender>) -> Tracking {
        Tracking { threshold: Threshold::new(name, reports) }
    }
}

/// A node, with what watches its writes.
pub(crate) struct Tracked {
    node: Arc<dyn BlockNode>,
    tracking: Arc<Tracking>,
}

impl Tracked {
    pub(crate) fn new(node: Arc<dyn BlockNode>, tracking: Arc<Tracking>) -> Tracked {
        Tracked { node, tracking }
    }
}

impl BlockNode for Tracked {
    fn name(&self) -> &str {
        self.node.name()
    }

    fn geometry(&self) -> Geometry {
        self.node.geometry()
    }

    fn below(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.node.clone())
    }

    fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        self.node.journal()
    }

    fn let_go(self: Arc<Self>) -> LetGo {
        self.node.clone().let_go()
    }

    fn details(&self) -> Option<ImageDetails> {
        self.node.details()
    }

    fn set_backing_name(
        self: Arc<Self>,
        name: Option<BackingName>,
        event_loop: &EventLoop,
    ) -> Renaming {
        self.node.clone().set_backing_name(name, event_loop)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let node = self.node.clone().open_channel(event_loop)?;
        Ok(Rc::new(TrackedChannel::new(node, self.tracking.clone())))
    }
}
