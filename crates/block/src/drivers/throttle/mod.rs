//! `throttle`: a node that holds requests back until the limits of its group let them go.

mod channel;
mod driver;
mod group;
mod limits;
pub(crate) mod options;
mod schedule;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

use self::channel::ThrottleChannel;
pub use self::group::ThrottleGroup;
pub use self::limits::{Limit, LimitsError, MAX, ThrottleLimits};
use super::common::Common;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry};
use crate::options::BlockdevOptions;

/// A node that is another node, at the pace of a group.
pub(crate) struct ThrottleNode {
    name: String,
    common: Common,
    group: Arc<ThrottleGroup>,
    child: Arc<dyn BlockNode>,
}

impl ThrottleNode {
    /// Puts a node on top of `child`.
    pub(crate) fn new(
        name: String,
        common: &BlockdevOptions,
        group: Arc<ThrottleGroup>,
        child: Arc<dyn BlockNode>,
    ) -> Result<Self, OpenError> {
        let common = Common::new(common, &*child);
        Ok(ThrottleNode { name, common, group, child })
    }
}

impl BlockNode for ThrottleNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.common.geometry(self.child.geometry())
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn compresses(&self) -> bool {
        self.child.compresses()
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.child.clone().open_channel(event_loop)?;
        Ok(ThrottleChannel::new(self, event_loop, child))
    }
}
