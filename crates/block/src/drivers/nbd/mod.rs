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
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::{EventLoop, IoThread, LoopHandle, mailbox, sync::lock};
use nbd_wire::flag;
use nix::errno::Errno;

use super::align::{Aligned, WholeBlocks};
use super::live::{self, Live};
use super::range_lock::RangeLock;
use crate::error::OpenError;
use crate::listeners::Listeners;
use crate::node::{BlockNode, Channel, Geometry, NoWaiting, RemoteImage};
use crate::options::BlockdevOptions;
use crate::request::Request;
use agreed::Agreed;
use channel::Connection;
use connect::{Connected, Target};
use remote::{Job, Remote, keep, refuse};

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

/// An export of an NBD server.
pub(crate) struct NbdNode {
    shared: Arc<Shared>,
    /// The connection that was made when the node was opened, until a loop takes it.
    first: Mutex<Option<Connected>>,
    /// The loop that has taken it and keeps it as long as the node exists.
    keeper: Mutex<Option<Keeper>>,
    changeable: Arc<Changeable>,
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
    /// Makes further connections. `None`: there are none.
    connector: Option<Arc<IoThread>>,
    agreed: Agreed,
    options: Live,
    range_lock: RangeLock,
    /// Tell the connections that their requests are not to wait any longer.
    impatience: Listeners,
    /// How many want requests not to wait.
    impatient: Arc<AtomicUsize>,
}

/// The first connection of a node, and the means to make others.
pub(crate) struct Opened {
    connected: Connected,
    target: Target,
}

/// Connects to the server for a new node, in a task.
async fn connect(event_loop: &EventLoop, mut target: Target) -> Result<Opened, OpenError> {
    let connected = connect::open(event_loop, &target).await;
    target.inherited = None;
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
        let agreed = connected.agreed;
        let theirs = agreed.has(flag::READ_ONLY);
        if theirs && !common.read_only && !common.auto_read_only {
            return Err(OpenError::os("Could not open image", Errno::EACCES)
                .with_hint("The server offers the export read-only: open it with read-only=on"));
        }
        let is_inherited = target.is_inherited();
        let shared = Shared {
            name,
            target,
            connector: (!is_inherited).then(|| connector.clone()),
            agreed,
            options: Live::new(common),
            range_lock: RangeLock::new(agreed.minimum as usize),
            impatience: Listeners::default(),
            impatient: Arc::default(),
        };
        let shared = Arc::new(shared);
        let (first, keeper) = match is_inherited {
            true => (None, Some(Keeper::start(&connector, shared.clone(), connected)?)),
            false => (Some(connected), None),
        };
        Ok(NbdNode {
            changeable: Arc::new(Changeable(shared.clone())),
            shared,
            first: Mutex::new(first),
            keeper: Mutex::new(keeper),
        })
    }
}

impl Keeper {
    /// Keeps a connection that cannot be made again on the connector's loop, which outlasts all I/O threads.
    fn start(
        connector: &IoThread,
        shared: Arc<Shared>,
        connected: Connected,
    ) -> Result<Keeper, OpenError> {
        let (sender, receiver) = mailbox::channel();
        let handle = connector.handle().clone();
        let start = move |event_loop: &EventLoop| {
            let channel = shared.channel(event_loop, Some(connected));
            let on_loop = event_loop.clone();
            event_loop.spawn(async move {
                match channel {
                    Ok(channel) => keep(on_loop, channel, receiver).await,
                    Err(_) => refuse(receiver).await,
                }
            });
        };
        let started = handle.spawn(start);
        started.map_err(|gone| OpenError::new(format!("I/O thread nbd-connect: {gone}")))?;
        Ok(Keeper { handle, jobs: Arc::new(sender) })
    }
}

/// Options of an open node that can change.
pub(crate) struct Changeable(Arc<Shared>);

impl Changeable {
    /// Gives the node other options. Returns how to take them back. The message is QEMU's.
    pub(crate) fn change(
        &self,
        common: &BlockdevOptions,
    ) -> Result<impl FnOnce() + use<>, OpenError> {
        if self.0.agreed.has(flag::READ_ONLY) && !common.read_only {
            return Err(OpenError::new("Can't reopen read-only NBD mount as read/write"));
        }
        let (shared, before) = (self.0.clone(), self.0.options.set(live::Options::of(common)));
        Ok(move || {
            shared.options.set(before);
        })
    }
}

impl NbdNode {
    pub(crate) fn changeable(&self) -> Arc<Changeable> {
        self.changeable.clone()
    }
}

impl BlockNode for NbdNode {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn remote_image(self: Arc<Self>) -> Option<Arc<dyn RemoteImage>> {
        Some(self)
    }

    fn open_channel(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn Channel>> {
        let mut keeper = lock(&self.keeper);
        let kept = keeper.as_ref().filter(|keeper| keeper.handle.spawn(|_| {}).is_ok());
        let agreed = &self.shared.agreed;
        // A read-only export is the same on all connections.
        let several = (agreed.has(flag::CAN_MULTI_CONN) || agreed.has(flag::READ_ONLY))
            && !self.shared.target.is_inherited();
        if let Some(keeper) = kept.filter(|_| !several) {
            return Ok(Remote::new(event_loop, self.clone(), keeper.jobs.clone()));
        }
        let is_first = kept.is_none();
        let first = lock(&self.first).take();
        let channel = self.shared.channel(event_loop, first)?;
        if is_first {
            let (sender, receiver) = mailbox::channel();
            event_loop.spawn(keep(event_loop.clone(), channel.clone(), receiver));
            *keeper = Some(Keeper { handle: event_loop.handle(), jobs: Arc::new(sender) });
        }
        Ok(channel)
    }
}

impl RemoteImage for NbdNode {
    fn stop_waiting(&self) -> Option<NoWaiting> {
        let waits_no_longer = NoWaiting::new(self.shared.impatient.clone());
        self.shared.impatience.tell();
        Some(waits_no_longer)
    }
}

impl Shared {
    /// Takes a connection, or makes one.
    fn channel(
        self: &Arc<Self>,
        event_loop: &EventLoop,
        connected: Option<Connected>,
    ) -> io::Result<Rc<dyn Channel>> {
        let connection = Connection::new(event_loop, self, connected);
        let connection = connection.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(match self.agreed.minimum {
            1 => connection,
            _ => Aligned::new(event_loop, self, connection),
        })
    }

    /// How long requests wait without a connection, nanoseconds.
    fn delay_ns(&self) -> u64 {
        if self.impatient.load(Ordering::Acquire) > 0 {
            return 0;
        }
        u64::from(self.target.options.reconnect_delay) * 1_000_000_000
    }

    fn size(&self) -> u64 {
        self.agreed.size.next_multiple_of(SECTOR)
    }

    fn is_read_only(&self, options: live::Options) -> bool {
        options.read_only() || self.agreed.has(flag::READ_ONLY)
    }

    fn geometry(&self) -> Geometry {
        let (agreed, options) = (&self.agreed, self.options.get());
        let read_only = self.is_read_only(options);
        let has = |bit| agreed.has(bit) && !read_only;
        Geometry {
            size: self.size(),
            read_only,
            physical_block_size: agreed.preferred.clamp(512, 64 << 10),
            request_alignment: agreed.minimum,
            discard: has(flag::SEND_TRIM) && options.unmaps(),
            discard_granularity: agreed.preferred.max(512),
            write_zeroes: has(flag::SEND_WRITE_ZEROES),
            write_cache: has(flag::SEND_FLUSH) && !options.no_flush(),
        }
    }

    /// Applies the node's options to a request. `Some`: its answer.
    fn prepare(&self, request: &mut Request) -> Option<Result<(), Errno>> {
        let options = self.options.get();
        if self.is_read_only(options) && !request.op.only_reads() {
            return Some(Err(Errno::EROFS));
        }
        match request.offset.checked_add(request.len) {
            Some(end) if end <= self.size() => options.apply(request),
            _ => Some(Err(request.op.beyond_end())),
        }
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
