//! Policies on errors: what becomes of a request that an export's node has failed.
//!
//! An export without a policy has none of this. One with a policy uses its node through a
//! [`with_policy`] node, whose channels keep what is needed to do a request again. A request whose error
//! is to stop the export is held there, and so is what comes after it, on all loops, until
//! [`ErrorPolicy::resume`]: then they are done in their order, and the policy counts again.

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
use crate::request::Request;

/// The answer to a held request that is given up, because its queue stops before it was done again: it
/// is neither done nor failed.
pub const GIVEN_UP: Errno = Errno::ERESTART;

/// Of errors that do not stop an export, one in so many nanoseconds is told: as in QEMU, nobody is
/// flooded.
const TELL_EVERY_NS: u64 = 1_000_000_000;

/// An error that the policy was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// The export's node, or that of its logical unit.
    pub node_name: String,
    /// Of a read, or a question for what is stored where; others count as writes.
    pub is_read: bool,
    /// What was done: `Ignore` or `Stop`. The device tracks errors that are reported to the guest.
    pub action: OnError,
    /// Why it failed.
    pub errno: Errno,
    /// Where the request begins, in bytes.
    pub offset: u64,
    /// Ignored errors that were left out since the last one that was sent.
    pub untold: u64,
}

/// What an export's last errors have come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoStatus {
    /// No request is held.
    Ok,
    /// The export is stopped, since there is no space.
    NoSpace,
    /// The export is stopped by another error.
    Failed,
}

/// An export's policy, and what it has come to; shared by all loops.
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
    /// Ignored errors that were left out since the last one that was sent.
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

    /// Whether requests are held.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// What the last errors have come to.
    pub fn status(&self) -> IoStatus {
        match (self.is_stopped(), self.no_space.load(Ordering::Relaxed)) {
            (false, _) => IoStatus::Ok,
            (true, true) => IoStatus::NoSpace,
            (true, false) => IoStatus::Failed,
        }
    }

    /// Loop time at which requests went on for the last time, nanoseconds; 0: never.
    pub fn resumed_ns(&self) -> u64 {
        self.resumed_ns.load(Ordering::Relaxed)
    }

    /// Lets the requests that are held go on. `now_ns` is loop time.
    pub fn resume(&self, now_ns: u64) {
        self.resumed_ns.store(now_ns, Ordering::Relaxed);
        // What a loop holds from here on, it holds before its bell rings.
        self.stopped.store(false, Ordering::Release);
        lock(&self.channels).iter().for_each(|(_, bell)| bell.schedule());
    }

    /// What is done about an error.
    fn action(&self, is_read: bool, errno: Errno) -> OnError {
        match if is_read { self.on_read } else { self.on_write } {
            OnError::Enospc if errno == Errno::ENOSPC => OnError::Stop,
            OnError::Enospc => OnError::Report,
            action => action,
        }
    }

    /// The export stops, if it has not; the first error that stops it is told.
    fn stop(&self, error: IoError) {
        if !self.stopped.swap(true, Ordering::AcqRel) {
            self.no_space.store(error.errno == Errno::ENOSPC, Ordering::Relaxed);
            // A daemon that ends does not listen.
            let _ = self.told.send(error);
        }
    }

    /// Sends an error that is ignored, unless one was sent within the last second.
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

    fn join(&self, bell: BottomHalf) -> u64 {
        let mut channels = lock(&self.channels);
        let number = channels.last().map_or(0, |(last, _)| last + 1);
        channels.push((number, bell));
        number
    }

    fn leave(&self, number: u64) {
        lock(&self.channels).retain(|(other, _)| *other != number);
    }
}

/// The node as an export with that policy uses it.
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

    fn below(&self) -> Option<Arc<dyn BlockNode>> {
        Some(self.node.clone())
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let child = self.node.clone().open_channel(event_loop)?;
        Ok(Rc::new(Root { node: self, event_loop: event_loop.clone(), child }))
    }
}

/// The channel of an export itself, whose own flushes are not the guest's: nobody is to wait for them
/// until an operator says so. Its queues get theirs from it.
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
