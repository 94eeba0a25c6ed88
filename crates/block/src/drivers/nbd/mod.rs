//! `nbd`: an image on another machine, or in another process, behind an NBD server.
//!
//! From the socket inwards: `connect` connects and negotiates, [`agreed`] is the result;
//! `channel` is a connection on its loop, `state` and `slots` are its requests in flight;
//! `remote` leads to the connection of another loop.
//!
//! [`agreed`]: agreed::Agreed

mod agreed;
mod channel;
mod connect;
mod driver;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod hostile;
pub(crate) mod options;
mod remote;
mod slots;
mod state;

use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use event_loop::{EventLoop, IoThread, LoopHandle, mailbox, sync::lock};
use nbd_wire::flag;
use nix::errno::Errno;

use super::align::{Aligned, WholeBlocks};
use super::detect_zeroes::detect_zeroes;
use super::range_lock::RangeLock;
use crate::error::OpenError;
use crate::node::{BlockNode, Channel, Geometry};
use crate::options::{BlockdevOptions, DetectZeroes, Discard};
use crate::request::{Op, Request};
use agreed::Agreed;
use channel::Connection;
use connect::{Connected, Target};
use remote::{Job, Remote, keep};

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

/// An export of an NBD server.
pub(crate) struct NbdNode {
    shared: Arc<Shared>,
    /// The connection that was made when the node was opened, until a loop takes it.
    first: Mutex<Option<Connected>>,
    /// The loop that has taken it and keeps it as long as the node exists.
    keeper: Mutex<Option<Keeper>>,
}

/// The loop with the first connection.
struct Keeper {
    handle: LoopHandle,
    jobs: Arc<mailbox::Sender<Job>>,
}

/// Data that connections share.
struct Shared {
    name: String,
    target: Target,
    connector: Arc<IoThread>,
    agreed: Agreed,
    geometry: Geometry,
    discard: Discard,
    detect_zeroes: DetectZeroes,
    range_lock: RangeLock,
}

/// The first connection of a node, and the means to make others.
pub(crate) struct Opened {
    connected: Connected,
    target: Target,
}

/// Connects to the server for a new node, in a task.
async fn connect(event_loop: &EventLoop, target: Target) -> Result<Opened, OpenError> {
    let connected = connect::open(event_loop, &target).await;
    let connected = connected.map_err(|error| OpenError::new(error.to_string()))?;
    Ok(Opened { connected, target })
}

impl NbdNode {
    /// Creates a node from a connection. The thread `connector` makes all others, and must not wait for a loop
    /// on which the node is used.
    pub(crate) fn new(
        name: String,
        common: &BlockdevOptions,
        opened: Opened,
        connector: Arc<IoThread>,
    ) -> Result<Self, OpenError> {
        let Opened { connected, target } = opened;
        let mut agreed = connected.agreed;
        let theirs = agreed.has(flag::READ_ONLY);
        if theirs && !common.read_only && !common.auto_read_only {
            return Err(OpenError::os("Could not open image", Errno::EACCES)
                .with_hint("The server offers the export read-only: open it with read-only=on"));
        }
        if common.cache.no_flush {
            agreed.flags &= !(flag::SEND_FLUSH | flag::SEND_FUA);
        }
        let read_only = theirs || common.read_only;
        let discards = agreed.has(flag::SEND_TRIM) && common.discard == Discard::Unmap;
        let geometry = Geometry {
            size: agreed.size.next_multiple_of(SECTOR),
            read_only,
            physical_block_size: agreed.preferred.clamp(512, 64 << 10),
            request_alignment: agreed.minimum,
            discard: discards && !read_only,
            discard_granularity: agreed.preferred.max(512),
            write_zeroes: agreed.has(flag::SEND_WRITE_ZEROES) && !read_only,
            write_cache: agreed.has(flag::SEND_FLUSH) && !read_only,
        };
        let shared = Shared {
            name,
            target,
            connector,
            agreed,
            geometry,
            discard: common.discard,
            detect_zeroes: common.detect_zeroes,
            range_lock: RangeLock::new(agreed.minimum as usize),
        };
        Ok(NbdNode {
            shared: Arc::new(shared),
            first: Mutex::new(Some(connected)),
            keeper: Mutex::default(),
        })
    }
}

impl BlockNode for NbdNode {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let mut keeper = lock(&self.keeper);
        let kept = keeper.as_ref().filter(|keeper| keeper.handle.spawn(|_| {}).is_ok());
        let agreed = &self.shared.agreed;
        // A read-only export is the same on all connections.
        let several = agreed.has(flag::CAN_MULTI_CONN) || agreed.has(flag::READ_ONLY);
        if let Some(keeper) = kept.filter(|_| !several) {
            return Ok(Remote::new(event_loop, self.clone(), keeper.jobs.clone()));
        }
        let is_first = kept.is_none();
        let first = lock(&self.first).take();
        let connection = Connection::new(event_loop, &self.shared, first);
        let connection = connection.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let channel: Rc<dyn Channel> = match agreed.minimum {
            1 => connection,
            _ => Aligned::new(event_loop, &self.shared, connection),
        };
        if is_first {
            let (sender, receiver) = mailbox::channel();
            event_loop.spawn(keep(event_loop.clone(), channel.clone(), receiver));
            *keeper = Some(Keeper { handle: event_loop.handle(), jobs: Arc::new(sender) });
        }
        Ok(channel)
    }
}

impl Shared {
    /// How long requests wait without a connection, nanoseconds.
    fn delay_ns(&self) -> u64 {
        u64::from(self.target.options.reconnect_delay) * 1_000_000_000
    }

    /// Applies the node's options to a request. `Some`: its answer.
    fn prepare(&self, request: &mut Request) -> Option<Result<(), Errno>> {
        if self.geometry.read_only && !request.op.only_reads() {
            return Some(Err(Errno::EROFS));
        }
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.geometry.size => {}
            _ => return Some(Err(Errno::EIO)),
        }
        if self.detect_zeroes != DetectZeroes::Off {
            detect_zeroes(self.detect_zeroes, request);
        }
        match &mut request.op {
            // Memory that was taken away no longer has the guest's data.
            Op::Write { .. } if request.bufs.is_lost() => return Some(Err(Errno::EFAULT)),
            Op::Discard if self.discard == Discard::Ignore => return Some(Ok(())),
            Op::WriteZeroes { may_unmap, .. } if self.discard == Discard::Ignore => {
                *may_unmap = false;
            }
            _ => {}
        }
        None
    }
}

impl WholeBlocks for Shared {
    fn block(&self) -> u64 {
        self.agreed.minimum.into()
    }

    fn range_lock(&self) -> &RangeLock {
        &self.range_lock
    }

    fn admit(&self, mut request: Request) -> Option<Request> {
        match self.prepare(&mut request) {
            Some(result) => {
                request.complete(result);
                None
            }
            None => Some(request),
        }
    }
}
