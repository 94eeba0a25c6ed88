//! When requests reach a block node: the end of their wait for a loop to take them.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use block::node::{BlockNode, Channel, Geometry};
use block::request::Request;
use event_loop::EventLoop;

use crate::clock;

/// A node that passes everything on to another one, and notes when each request came: on the loop,
/// when the device model submits it.
pub struct SubmissionLog {
    node: Arc<dyn BlockNode>,
    times: Box<[AtomicU64]>,
    count: AtomicUsize,
}

impl SubmissionLog {
    /// Notes the first `capacity` requests to `node`.
    pub fn new(node: Arc<dyn BlockNode>, capacity: usize) -> Arc<Self> {
        let times = (0..capacity).map(|_| AtomicU64::new(0)).collect();
        Arc::new(SubmissionLog { node, times, count: AtomicUsize::new(0) })
    }

    /// When requests were submitted, in their order; CLOCK_MONOTONIC, nanoseconds. To be read once
    /// they have been answered.
    pub fn times(&self) -> Vec<u64> {
        let count = self.count.load(Ordering::Acquire).min(self.times.len());
        self.times[..count].iter().map(|time| time.load(Ordering::Relaxed)).collect()
    }

    fn note(&self) {
        // Read anew: the loop's own time is that of the iteration's beginning.
        let now = clock::now_ns();
        let at = self.count.load(Ordering::Relaxed);
        if let Some(time) = self.times.get(at) {
            time.store(now, Ordering::Relaxed);
        }
        self.count.store(at + 1, Ordering::Release);
    }
}

impl BlockNode for SubmissionLog {
    fn name(&self) -> &str {
        self.node.name()
    }

    fn geometry(&self) -> Geometry {
        self.node.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.node.clone())
    }

    /// One loop's: several would write to the same places.
    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let below = self.node.clone().open_channel(event_loop)?;
        Ok(Rc::new(Logged { below, log: self }))
    }
}

struct Logged {
    below: Rc<dyn Channel>,
    log: Arc<SubmissionLog>,
}

impl Channel for Logged {
    fn submit(&self, request: Request) {
        self.log.note();
        self.below.submit(request);
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }
}
