//! A node that the second I/O thread cannot use.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::node::{BlockNode, Channel, Geometry};
use event_loop::EventLoop;

/// Opens one channel to a node only.
pub(crate) struct Once {
    node: Arc<dyn BlockNode>,
    is_open: AtomicBool,
}

impl Once {
    pub(crate) fn over(node: Arc<dyn BlockNode>) -> Arc<Once> {
        Arc::new(Once { node, is_open: AtomicBool::new(false) })
    }
}

impl BlockNode for Once {
    fn name(&self) -> &str {
        "once"
    }

    fn geometry(&self) -> Geometry {
        self.node.geometry()
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        match self.is_open.swap(true, Ordering::Relaxed) {
            true => Err(io::Error::other("not twice")),
            false => self.node.clone().open_channel(event_loop),
        }
    }
}
