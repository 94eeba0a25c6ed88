//! Policies on errors: the action after a request of an export has failed.
//!
//! An export without a policy does not use this module. One with a policy uses its node through a
//! [`with_policy`] node, whose channels record requests so that they can be repeated. A request whose
//! error stops the export is held, and so are all later requests on all loops, until
//! [`ErrorPolicy::resume`]. Then they are carried out in order, and the policy applies again.

mod channel;

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use event_loop::{BottomHalf, EventLoop, mailbox};
use nix::errno::Errno;

use self::channel::PolicyChannel;
use crate::job::OnError;
use crate::node::{BlockNode, Channel, Geometry};
use crate::request::{Op, Request};

/// Minimum interval between two reports of ignored errors, in nanoseconds. QEMU limits its events in the
/// same way.
const TELL_EVERY_NS: u64 = 1_000_000_000;

/// An error that the policy was applied to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// The export's node, or that of its logical unit.
    pub node_name: String,
    /// What the request was for.
    pub op: Op,
    /// The action: `Ignore` or `Stop`. The device tracks errors that are reported to the guest.
    pub action: OnError,
    /// The error.
    pub errno: Errno,
    /// First byte of the request, in bytes from the disk's beginning.
    pub offset: u64,
    /// Number of ignored errors since the last report that were not reported.
    pub untold: u64,
}

impl IoError {
    /// Whether the request is a read or a block status; all others count as writes.
    pub fn is_read(&self) -> bool {
        is_read(self.op)
    }
}

fn is_read(op: Op) -> bool {
    matches!(op, Op::Read | Op::BlockStatus)
}

/// The state of an export after its last errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoStatus {
    /// No request is held.
    Ok,
    /// The export is stopped by `ENOSPC`.
    NoSpace,
    /// The export is stopped by another error.
    Failed,
}

/// An export's policy and its state, shared by all loops.
pub struct ErrorPolicy {
    /// `rerror`.
    on_read: OnError,
    /// `werror`.
    on_write: OnError,
    stopped: AtomicBool,
    no_space: AtomicBool,
    /// Loop time of the last resume.
    resumed_ns: AtomicU64,
    /// Loop time from which on the next ignored error is sent.
    tell_from_ns: AtomicU64,
    /// Ignored errors since the last report that were not reported.
    untold: AtomicU64,
    told: mailbox::Sender<IoError>,
    channels: Mutex<Vec<(u64, BottomHalf)>>,
}

impl ErrorPolicy {
    /// Returns a policy and the receiver of its errors.
    ///
    /// The receiver gets the error that stops the export, and at most one ignored error per second.
    pub fn new(on_read: OnError, on_write: OnError) -> (Arc<Self>, mailbox::Receiver<IoError>) {
        let (told, receiver) = mailbox::channel();
        let policy = ErrorPolicy {
            on_read,
            on_write,
            stopped: AtomicBool::new(false),
            no_space: AtomicBool::new(false),
            resumed_ns: AtomicU64::new(0),
            tell_from_ns: AtomicU64::new(0),
            untold: AtomicU64::new(0),
            told,
            channels: Mutex::default(),
        };
        (Arc::new(policy), receiver)
    }

    /// Returns whether requests are held.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Returns the state after the last errors.
    pub fn status(&self) -> IoStatus {
        match (self.is_stopped(), self.no_space.load(Ordering::Relaxed)) {
            (false, _) => IoStatus::Ok,
            (true, true) => IoStatus::NoSpace,
            (true, false) => IoStatus::Failed,
        }
    }

    /// Returns the loop time of the last resume, in nanoseconds; 0: never.
    pub fn resumed_ns(&self) -> u64 {
        self.resumed_ns.load(Ordering::Relaxed)
    }

    /// Lets the held requests continue. `now_ns` is loop time, in nanoseconds.
    pub fn resume(&self, now_ns: u64) {
        self.resumed_ns.store(now_ns, Ordering::Relaxed);
        // A request that a loop holds after this store is released by the bottom half.
        self.stopped.store(false, Ordering::Release);
        lock(&self.channels).iter().for_each(|(_, bottom_half)| bottom_half.schedule());
    }

    /// The action for an error.
    fn action(&self, is_read: bool, errno: Errno) -> OnError {
        match if is_read { self.on_read } else { self.on_write } {
            OnError::Enospc if errno == Errno::ENOSPC => OnError::Stop,
            OnError::Enospc => OnError::Report,
            action => action,
        }
    }

    /// Stops the export, and reports the first error that stops it.
    fn stop(&self, error: IoError) {
        if !self.stopped.swap(true, Ordering::AcqRel) {
            self.no_space.store(error.errno == Errno::ENOSPC, Ordering::Relaxed);
            // At the end of the daemon there is no receiver.
            let _ = self.told.send(error);
        }
    }

    /// Reports an ignored error, unless one was reported within the last second.
    fn tell(&self, mut error: IoError, now_ns: u64) {
        let from = self.tell_from_ns.load(Ordering::Relaxed);
        let next = now_ns.saturating_add(TELL_EVERY_NS);
        if now_ns >= from
            && let Ok(_) =
                self.tell_from_ns.compare_exchange(from, next, Ordering::Relaxed, Ordering::Relaxed)
        {
            error.untold = self.untold.swap(0, Ordering::Relaxed);
            let _ = self.told.send(error);
        } else {
            self.untold.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn join(&self, bottom_half: BottomHalf) -> u64 {
        let mut channels = lock(&self.channels);
        let number = channels.last().map_or(0, |(last, _)| last + 1);
        channels.push((number, bottom_half));
        number
    }

    fn leave(&self, number: u64) {
        lock(&self.channels).retain(|(other, _)| *other != number);
    }
}

/// Wraps a node for an export with that policy.
pub fn with_policy(node: Arc<dyn BlockNode>, policy: Arc<ErrorPolicy>) -> Arc<dyn BlockNode> {
    Arc::new(PolicyNode { node, policy })
}

struct PolicyNode {
    node: Arc<dyn BlockNode>,
    policy: Arc<ErrorPolicy>,
}

impl BlockNode for PolicyNode {
    fn name(&self) -> &str {
        self.node.name()
    }

    fn geometry(&self) -> Geometry {
        self.node.geometry()
    }

    fn child(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.node.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.node.clone().open_channel(event_loop)?;
        Ok(Rc::new(Root { node: self, event_loop: event_loop.clone(), child }))
    }
}

/// The channel of the export itself. Its flushes are not the guest's, so they must not wait for an
/// operator. The export's queues get their channels from it.
struct Root {
    node: Arc<PolicyNode>,
    event_loop: EventLoop,
    child: Rc<dyn Channel>,
}

impl Channel for Root {
    fn submit(&self, request: Request) {
        self.child.submit(request);
    }

    fn for_queue(&self) -> Option<Rc<dyn Channel>> {
        Some(PolicyChannel::new(self.node.clone(), &self.event_loop, self.child.clone()))
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
