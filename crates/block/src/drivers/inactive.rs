//! An inactive node: takes no locks, and carries out reads only.

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
    /// The image, opened for reading without a lock. `None`: opening the image failed.
    reader: Option<Arc<dyn BlockNode>>,
}

impl InactiveNode {
    pub(crate) fn new(
        name: String,
        geometry: Geometry,
        reader: Option<Arc<dyn BlockNode>>,
    ) -> Self {
        InactiveNode { name, geometry, reader }
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

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let reader = self.reader.clone().map(|reader| reader.open_channel(event_loop));
        Ok(Rc::new(Reads(reader.transpose()?)))
    }
}

/// Reads return what the image holds at the time: another process may be writing to the image.
struct Reads(Option<Rc<dyn Channel>>);

impl Channel for Reads {
    fn submit(&self, request: Request) {
        match (request.op, &self.0) {
            (Op::Read, Some(reader)) => reader.submit(request),
            // What was written was flushed when the node became inactive.
            (Op::Flush, _) => request.complete(Ok(())),
            (
                Op::Read
                | Op::Write { .. }
                | Op::Discard
                | Op::WriteZeroes { .. }
                | Op::BlockStatus,
                _,
            ) => request.complete(Err(Errno::EPERM)),
        }
    }

    fn in_flight(&self) -> usize {
        self.0.as_ref().map_or(0, |reader| reader.in_flight())
    }

    fn drain_begin(&self) {
        self.0.iter().for_each(|reader| reader.drain_begin());
    }

    fn drain_end(&self) {
        self.0.iter().for_each(|reader| reader.drain_end());
    }
}
