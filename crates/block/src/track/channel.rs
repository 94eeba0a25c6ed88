//! A loop's channel to a node whose writes are watched.

use std::rc::Rc;
use std::sync::Arc;

use super::Tracking;
use crate::node::Channel;
use crate::request::Request;

pub(super) struct TrackedChannel {
    node: Rc<dyn Channel>,
    tracking: Arc<Tracking>,
}

impl TrackedChannel {
    pub(super) fn new(node: Rc<dyn Channel>, tracking: Arc<Tracking>) -> TrackedChannel {
        TrackedChannel { node, tracking }
    }
}

impl Channel for TrackedChannel {
    fn submit(&self, request: Request) {
        if !request.op.only_reads() {
            self.tracking.threshold.check(request.offset.saturating_add(request.len));
        }
        self.node.submit(request);
    }

    fn in_flight(&self) -> usize {
        self.node.in_flight()
    }

    fn drain_begin(&self) {
        self.node.drain_begin();
    }

    fn drain_end(&self) {
        self.node.drain_end();
    }
}
