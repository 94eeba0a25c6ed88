//! `throttle`: a node that holds requests back until the limits of its group let them go.

mod channel;
mod group;
mod limits;
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
use crate::node::{BlockNode, Channel, Geometry, ResizeError, Resized, Watcher};
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
        let common = Common::new(common, &*child)?;
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

    fn let_grow(&self) {
        self.child.let_grow();
    }

    fn memory_alignment(&self) -> u32 {
        self.child.memory_alignment()
    }

    fn watch(&self, watcher: Watcher) {
        self.child.watch(watcher);
    }

    fn resize(self: Arc<Self>, size: u64, event_loop: &EventLoop) -> Resized {
        let event_loop = event_loop.clone();
        Box::pin(async move {
            ResizeError::check(size, self.geometry().read_only)?;
            self.child.clone().resize(size, &event_loop).await
        })
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.child.clone().open_channel(event_loop)?;
        Ok(ThrottleChannel::new(self, event_loop, child))
    }
}
