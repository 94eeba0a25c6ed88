//! What stands for a node that is inactive: nothing is open, and nobody's requests are carried out.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;
use nix::errno::Errno;

use crate::node::{BlockNode, Channel, Geometry, ResizeError, Resized};
use crate::request::{Op, Request};

/// An inactive node. Its geometry is what the image had when it was last looked at.
pub(crate) struct InactiveNode {
    name: String,
    geometry: Geometry,
}

impl InactiveNode {
    pub(crate) fn new(name: String, geometry: Geometry) -> Self {
        InactiveNode { name, geometry }
    }
}

impl BlockNode for InactiveNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn resize(self: Arc<Self>, _size: u64, _control: &EventLoop) -> Resized {
        Box::pin(async { Err(ResizeError::NotSupported) })
    }

    fn open_channel(self: Arc<Self>, _event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        Ok(Rc::new(Refuse))
    }
}

struct Refuse;

impl Channel for Refuse {
    fn submit(&self, request: Request) {
        let result = match request.op {
            // What was written was flushed when the node became inactive.
            Op::Flush => Ok(()),
            _ => Err(Errno::EPERM),
        };
        request.complete(result);
    }

    fn in_flight(&self) -> usize {
        0
    }
}
