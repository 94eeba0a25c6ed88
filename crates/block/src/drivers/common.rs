//! What the options that all drivers have mean for a node that lies on another one.

use std::rc::Rc;
use std::sync::Arc;

use nix::errno::Errno;

use super::detect_zeroes::detect_zeroes;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry};
use crate::options::{BlockdevOptions, DetectZeroes, Discard};
use crate::request::{Op, Request};

/// The options, as far as requests on their way down meet them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Common {
    read_only: bool,
    discard: Discard,
    detect_zeroes: DetectZeroes,
}

/// Checks that an image may write to the node below, unless its options say that it only reads. The message is
/// QEMU's.
pub(crate) fn check_writable(
    options: &BlockdevOptions,
    child: &Arc<dyn BlockNode>,
) -> Result<(), OpenError> {
    // With a child that fell back to reading (`auto-read-only`), the error comes later, from the user that writes.
    let is_final = child.geometry().read_only && child.why_read_only().is_none();
    if is_final && !options.read_only && !options.auto_read_only {
        return Err(OpenError::new(format!("Block node '{}' is read-only", child.name()))
            .with_hint("read-only=on opens the image on top of it"));
    }
    Ok(())
}

/// Returns `child`, above which discards are ignored if the options say so. Of a node that is for reading, but for discards.
pub(crate) fn as_discards(discard: Discard, child: Rc<dyn Channel>) -> Rc<dyn Channel> {
    let common = Common { read_only: false, discard, detect_zeroes: DetectZeroes::Off };
    match discard {
        Discard::Unmap => child,
        Discard::Ignore => Rc::new(Admitting { common, child }),
    }
}

impl Common {
    /// Of a node on top of `child`. As in QEMU, it is read-only if the child is; a user that writes is refused.
    pub(crate) fn new(options: &BlockdevOptions, child: &dyn BlockNode) -> Self {
        Common {
            read_only: child.geometry().read_only || options.read_only,
            discard: options.discard,
            detect_zeroes: options.detect_zeroes,
        }
    }

    /// Returns the geometry of the node below, restricted by the options.
    pub(crate) fn geometry(&self, below: Geometry) -> Geometry {
        let read_only = below.read_only || self.read_only;
        Geometry {
            read_only,
            discard: below.discard && self.discard == Discard::Unmap && !read_only,
            write_zeroes: below.write_zeroes && !read_only,
            write_cache: below.write_cache && !read_only,
            ..below
        }
    }

    /// Whether requests to a node with that geometry below pass as they are.
    pub(crate) fn changes_nothing(&self, below: Geometry) -> bool {
        self.detect_zeroes == DetectZeroes::Off && self.geometry(below) == below
    }

    /// Returns `child`, above which requests are [admitted](Self::admit). The node below has that geometry.
    pub(crate) fn channel(self, below: Geometry, child: Rc<dyn Channel>) -> Rc<dyn Channel> {
        match self.changes_nothing(below) {
            true => child,
            false => Rc::new(Admitting { common: self, child }),
        }
    }

    /// Takes a request on its way. `None`: it was answered.
    pub(crate) fn admit(&self, mut request: Request) -> Option<Request> {
        if self.read_only && !request.op.only_reads() {
            request.complete(Err(Errno::EROFS));
            return None;
        }
        if self.detect_zeroes != DetectZeroes::Off {
            detect_zeroes(self.detect_zeroes, &mut request);
        }
        match &mut request.op {
            Op::Discard if self.discard == Discard::Ignore => {
                request.complete(Ok(()));
                return None;
            }
            Op::WriteZeroes { may_unmap, .. } if self.discard == Discard::Ignore => {
                *may_unmap = false;
            }
            _ => {}
        }
        Some(request)
    }
}

/// A channel with the options applied to its requests.
struct Admitting {
    common: Common,
    child: Rc<dyn Channel>,
}

impl Channel for Admitting {
    fn submit(&self, request: Request) {
        if let Some(request) = self.common.admit(request) {
            self.child.submit(request);
        }
    }

    fn in_flight(&self) -> usize {
        self.child.in_flight()
    }

    fn drain_begin(&self) {
        self.child.drain_begin();
    }

    fn drain_end(&self) {
        self.child.drain_end();
    }
}
