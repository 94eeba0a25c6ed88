//! `snapshot-access`: a disk as it was when the [copy-before-write](super::copy_before_write) node above it was opened.

mod driver;
mod options;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::EventLoop;

pub(super) use self::options::SNAPSHOT_ACCESS;
use crate::node::{BlockNode, Channel, Geometry};
use crate::request::{Op, Request};

/// What a node's disk was.
struct SnapshotAccessNode {
    name: String,
    /// The copy-before-write node, which is in use.
    _child: Arc<dyn BlockNode>,
    snapshot: Arc<dyn BlockNode>,
    /// `discard=unmap`: discards are carried out.
    discards: bool,
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
        Ok(match self.discards {
            true => snapshot,
            false => Rc::new(IgnoresDiscards(snapshot)),
        })
    }
}

struct IgnoresDiscards(Rc<dyn Channel>);

impl Channel for IgnoresDiscards {
    fn submit(&self, request: Request) {
        match request.op {
            Op::Discard => request.complete(Ok(())),
            _ => self.0.submit(request),
        }
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
