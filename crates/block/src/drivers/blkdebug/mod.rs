//! `blkdebug`: a node that makes requests fail by rules, to test the nodes above it.
//!
//! [`rules`] selects the requests, [`limits`] splits the requests that are carried out, and `channel` does
//! the work. A request that no rule matches passes at the cost of a lock.

mod channel;
mod config;
mod driver;
mod limits;
pub(super) mod options;
mod rules;
pub(crate) mod settings;

use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use event_loop::EventLoop;

use self::channel::BlkdebugChannel;
use self::limits::Limits;
use self::rules::Rules;
use super::align::{Aligned, WholeBlocks};
use super::common::Common;
use super::range_lock::RangeLock;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry};
use crate::options::{BlkdebugOptions, BlockdevOptions};
use crate::request::Request;

/// A node that is another node, with faults.
pub(crate) struct BlkdebugNode {
    name: String,
    common: Common,
    limits: Limits,
    rules: Arc<Mutex<Rules>>,
    range_lock: RangeLock,
    child: Arc<dyn BlockNode>,
}

impl BlkdebugNode {
    /// Puts a node on top of `child`. The messages are QEMU's.
    pub(crate) fn new(
        name: String,
        common: &BlockdevOptions,
        options: &BlkdebugOptions,
        child: Arc<dyn BlockNode>,
    ) -> Result<Self, OpenError> {
        let below = child.geometry();
        let limits = Limits::new(options, below.request_alignment.into())?;
        if !below.size.is_multiple_of(limits.align) {
            let Limits { align, .. } = limits;
            return Err(OpenError::new(format!("Cannot meet constraints with align {align}"))
                .with_hint(format!("The image's size is {}, which is no multiple", below.size)));
        }
        let mut options = options.clone();
        if let Some(path) = &options.config {
            let (mut inject_error, mut set_state) = config::read(path)?;
            options.inject_error.append(&mut inject_error);
            options.set_state.append(&mut set_state);
        }
        Ok(BlkdebugNode {
            name,
            common: Common::new(common, &*child),
            range_lock: RangeLock::new(limits.align as usize),
            limits,
            rules: Arc::new(Mutex::new(Rules::new(&options))),
            child,
        })
    }
}

impl BlkdebugNode {
    /// Goes on with the rules of the node that this one takes the place of.
    fn with_rules(self, rules: Arc<Mutex<Rules>>) -> Self {
        BlkdebugNode { rules, ..self }
    }
}

impl BlockNode for BlkdebugNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let below = self.common.geometry(self.child.geometry());
        let Limits { align, opt_discard, .. } = self.limits;
        let granularity = u64::from(below.discard_granularity).max(opt_discard);
        Geometry {
            request_alignment: u32::try_from(align).unwrap_or(below.request_alignment),
            discard_granularity: u32::try_from(granularity).unwrap_or(below.discard_granularity),
            ..below
        }
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.child.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.child.clone().open_channel(event_loop)?;
        let below = u64::from(self.child.geometry().request_alignment);
        let channel = BlkdebugChannel::new(self.clone(), event_loop, child);
        // What the node below would make whole blocks of itself is left to it.
        Ok(match self.limits.align > below {
            true => Aligned::new(event_loop, &self, channel),
            false => channel,
        })
    }
}

impl WholeBlocks for BlkdebugNode {
    fn block(&self) -> u64 {
        self.limits.align
    }

    fn range_lock(&self) -> &RangeLock {
        &self.range_lock
    }

    fn admit(&self, request: Request) -> Option<Request> {
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.child.geometry().size => self.common.admit(request),
            _ => {
                let errno = request.op.beyond_end();
                request.complete(Err(errno));
                None
            }
        }
    }
}
