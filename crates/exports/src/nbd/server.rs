//! The server: clients are accepted and negotiated with on the control loop, then handed over to an
//! I/O thread of the export they have chosen.

mod hand_over;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};

use block::node::{BlockNode, Changes, Geometry, Watcher};
use block::track::DirtyBitmap;
use event_loop::{EventLoop, LoopHandle, Slab, oneshot, take_turns, trim_heap};
use guest_memory::release;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use stats::InFlight;
use stats::QueueStats;
use tls::Acceptor;

use super::handshake::{Failure, Limits, Negotiated, Secured, negotiate};
use super::listener::{Listener, NbdListen};
use super::session::handshake::ExportInfo;
use super::session::transmission::{Agreed, MAX_BITMAPS};
use super::state::End;
use super::wire::{MAX_PAYLOAD, MAX_STRING};
use super::worker::{Client, WorkerHandle};
use crate::vhost_user::ExportError;

/// Clients accepted in a row before other tasks of the loop get their turn.
const TURN: u32 = 16;

/// Clients that may leave before their memory is given back from the heap: some 60 KiB each.
const UNTRIMMED: u32 = 128;

/// Nanoseconds until the memory of clients that have left is given back. Meanwhile their I/O threads free the last of it,
/// and more clients may leave.
const TRIM_NS: u64 = 1_000_000_000;

/// What `--nbd-server` says.
#[derive(Debug)]
pub struct NbdServerConfig {
    /// `addr`.
    pub listen: NbdListen,
    /// `max-connections`: number of clients at the same time; 0: any number. The next ones wait to be accepted.
    pub max_connections: u32,
    /// `handshake-max-seconds`: a client that has not chosen an export after so many seconds is disconnected; 0:
    /// no limit.
    pub handshake_max_seconds: u32,
    /// `tls-creds` and `tls-authz`: clients are served with TLS only. `None`: without.
    pub tls: Option<Acceptor>,
    /// Accept no client until [`resume`](NbdServer::resume). Until then, clients that connect wait.
    pub held: bool,
}

/// What `--export type=nbd` says.
pub struct NbdExportConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `name`: what clients call it.
    pub name: String,
    /// `description`, for people; may be empty.
    pub description: String,
    /// `node-name`.
    pub node: Arc<dyn BlockNode>,
    /// `iothread`: at least one; connections are dealt out to them in turn.
    pub io_threads: Vec<LoopHandle>,
    /// `writable`.
    pub writable: bool,
    /// `writethrough`: what is written is on stable storage before the reply.
    pub writethrough: bool,
    /// `allocation-depth`: there is a context `qemu:allocation-depth`.
    pub allocation_depth: bool,
    /// `bitmaps`: there is a context `qemu:dirty-bitmap:NAME` of each. They are busy until the export has stopped.
    pub bitmaps: Vec<Arc<DirtyBitmap>>,
}

/// A server with its exports. Lives on the control loop.
pub struct NbdServer {
    shared: Rc<Shared>,
    listener: Rc<Listener>,
    ended: oneshot::Receiver<()>,
}

/// An export of a server. Dropping it leaves it as it is; see [`stop`](Self::stop).
pub struct NbdExport {
    shared: Rc<Shared>,
    export: Rc<Export>,
    _bitmaps: BusyBitmaps,
}

/// Bitmaps of an export, marked as busy until this is dropped.
struct BusyBitmaps(Arc<[Arc<DirtyBitmap>]>);

impl BusyBitmaps {
    fn new(bitmaps: Vec<Arc<DirtyBitmap>>) -> BusyBitmaps {
        bitmaps.iter().for_each(|bitmap| bitmap.set_busy(true));
        BusyBitmaps(bitmaps.into())
    }
}

impl Drop for BusyBitmaps {
    fn drop(&mut self) {
        self.0.iter().for_each(|bitmap| bitmap.set_busy(false));
    }
}

struct Shared {
    event_loop: EventLoop,
    max_connections: u32,
    handshake_max_seconds: u32,
    tls: Option<Acceptor>,
    limits: Limits,
    exports: RefCell<Vec<Rc<Export>>>,
    connections: Cell<u32>,
    /// Clients that have left since the heap was trimmed.
    untrimmed: Cell<u32>,
    /// A task trims it.
    trims: Cell<bool>,
    stopping: Cell<bool>,
    /// Nobody is taken for now.
    held: Cell<bool>,
    changed: Changed,
    /// Told when a client has left.
    left: Changed,
}

struct Export {
    id: String,
    /// Replaced when the node gets another size.
    info: RefCell<Arc<ExportInfo>>,
    io_threads: Vec<LoopHandle>,
    workers: Vec<WorkerHandle>,
    /// Who gets the next connection.
    next: Cell<usize>,
    stats: Vec<Arc<QueueStats>>,
    /// Sockets of the connected clients.
    sockets: RefCell<Vec<Arc<OwnedFd>>>,
}

impl NbdServer {
    /// Begins to listen.
    ///
    /// Clients can connect when this returns. There are no exports yet: a server that is not
    /// [held](NbdServerConfig::held) sends the clients away.
    ///
    /// # Errors
    ///
    /// The socket cannot be listened on.
    pub fn start(event_loop: &EventLoop, config: NbdServerConfig) -> Result<Self, ExportError> {
        let NbdServerConfig { listen, max_connections, handshake_max_seconds, tls, held } = config;
        let held = Cell::new(held);
        let listener = Rc::new(Listener::new(event_loop, listen)?);
        let shared = Rc::new(Shared {
            event_loop: event_loop.clone(),
            max_connections,
            handshake_max_seconds,
            tls,
            limits: Limits::new(),
            exports: RefCell::default(),
            connections: Cell::new(0),
            untrimmed: Cell::new(0),
            trims: Cell::new(false),
            stopping: Cell::new(false),
            held,
            changed: Changed::default(),
            left: Changed::default(),
        });
        let (end, ended) = oneshot::channel();
        let (accepting, on) = (shared.clone(), listener.clone());
        event_loop.spawn(async move {
            accepting.accept(&on).await;
            drop(on);
            end.send(());
        });
        Ok(NbdServer { shared, listener, ended })
    }

    /// Returns whether there is an export of that name.
    pub fn has_export(&self, name: &str) -> bool {
        self.shared.has_export(name)
    }

    /// Offers a node.
    ///
    /// # Errors
    ///
    /// The name is taken or too long, or the node cannot be used from one of the I/O threads.
    pub fn add(
        &self,
        config: NbdExportConfig,
    ) -> impl Future<Output = Result<NbdExport, ExportError>> + use<> {
        self.shared.clone().add(config)
    }

    /// Stops accepting clients, and removes the socket.
    ///
    /// Clients without an export are disconnected. Exports continue until they are stopped. When the future completes,
    /// the address can be bound again.
    pub async fn stop(self) {
        self.shared.stopping.set(true);
        self.shared.changed.tell();
        // Its task is gone only with the loop.
        let _ = self.ended.await;
        // Only a loop that has stopped keeps another reference.
        if let Some(listener) = Rc::into_inner(self.listener) {
            listener.close().await;
        }
    }

    /// Stops the server as [`stop`](Self::stop) does, and leaves a unix socket's file.
    ///
    /// For the end of the daemon: QEMU's removes the file only at `nbd-server-stop`.
    pub async fn stop_leaving_file(self) {
        self.listener.leave_file();
        self.stop().await;
    }
}

impl NbdExport {
    /// Returns the export's `id`.
    pub fn id(&self) -> &str {
        &self.export.id
    }

    /// Returns whether a client uses it.
    pub fn is_connected(&self) -> bool {
        !self.export.sockets.borrow().is_empty()
    }

    /// Completes when every client that has hung up counts as left.
    ///
    /// See [`is_connected`](Self::is_connected). The client's I/O thread may notice the hang-up late, and
    /// finishes the client's last requests first.
    pub fn hung_up_are_gone(&self) -> impl Future<Output = ()> + use<> {
        let (shared, export) = (self.shared.clone(), self.export.clone());
        async move {
            let is_left = || export.sockets.borrow().iter().any(|socket| has_hung_up(socket));
            shared.left.until(|| !is_left()).await;
        }
    }

    /// Returns what it has done on each of its threads.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        &self.export.stats
    }

    /// Returns what it has done on each of its threads, numbered as they were given.
    pub fn queues(&self) -> impl Iterator<Item = (usize, &LoopHandle, &Arc<QueueStats>)> {
        let threads = self.export.io_threads.iter().zip(&self.export.stats).enumerate();
        threads.map(|(number, (thread, stats))| (number, thread, stats))
    }

    /// Returns the requests in flight, with the numbers of their connections.
    ///
    /// Connections are counted on each thread.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        let asked: Vec<_> = self.export.workers.iter().map(WorkerHandle::in_flight).collect();
        async move {
            let mut all = Vec::new();
            for answer in asked {
                // Once its loop has ended, a worker has no requests.
                all.extend(answer.await.unwrap_or_default());
            }
            all
        }
    }

    /// Returns the threads that serve it.
    pub fn io_threads(&self) -> &[LoopHandle] {
        &self.export.io_threads
    }

    /// Stops offering the export, finishes requests, and flushes the node.
    ///
    /// The export's clients are disconnected.
    ///
    /// # Errors
    ///
    /// When the flush failed, or a loop has stopped before.
    pub async fn stop(self) -> Result<(), ExportError> {
        self.stop_telling(|| {}).await
    }

    /// Stops the export as [`stop`](Self::stop) does.
    ///
    /// Calls `on_quiet` before the flush.
    ///
    /// No request is in flight when `on_quiet` is called.
    ///
    /// # Errors
    ///
    /// As of [`stop`](Self::stop). If a loop has stopped before, `on_quiet` is not called.
    pub async fn stop_telling(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        let is_other = |other: &Rc<Export>| !Rc::ptr_eq(other, &self.export);
        self.shared.exports.borrow_mut().retain(is_other);
        // All at once, and all of them even if one fails.
        let stopped: Vec<_> = self.export.workers.iter().map(WorkerHandle::stop).collect();
        let mut are_quiet = true;
        for answer in stopped {
            are_quiet &= answer.await.is_ok();
        }
        if are_quiet {
            on_quiet();
        }
        let flushed: Vec<_> = self.export.workers.iter().map(WorkerHandle::flush).collect();
        let mut result = Ok(());
        for answer in flushed {
            match answer.await {
                Ok(Ok(())) => {}
                Ok(Err(errno)) => result = Err(ExportError::Flush(errno.into())),
                Err(gone) => result = Err(gone.into()),
            }
        }
        for worker in &self.export.workers {
            worker.end().await;
        }
        result
    }
}

impl Export {
    fn watch(&self, node: &Arc<dyn BlockNode>) -> Changes {
        let (watcher, changes) = Watcher::new();
        node.watch(watcher);
        // The geometry may have changed before the watcher was registered.
        self.resized(node.geometry().size);
        changes
    }

    /// Takes over the node's new size: for new clients, and to check requests of all clients. The protocol has
    /// no message that tells connected clients.
    ///
    /// `block_resize` is refused while the export uses the node. The size changes when the node is reopened
    /// (`raw` with another `size`), or activated after another process has resized the image.
    fn resized(&self, size: u64) {
        let before = self.info.borrow().clone();
        if before.size == size {
            return;
        }
        self.info.replace(Arc::new(ExportInfo { size, ..(*before).clone() }));
        self.workers.iter().for_each(|worker| worker.resized(size));
    }
}

/// Returns the size of requests that do not make the node read, modify and write.
fn preferred_block(geometry: &Geometry) -> u32 {
    let block = geometry.request_alignment.max(4096);
    block.checked_next_power_of_two().filter(|block| *block <= MAX_PAYLOAD).unwrap_or(4096)
}

/// Follows changes of an export's node for as long as there are both.
async fn follow(export: Weak<Export>, node: WeakNode, mut changes: Changes) {
    while changes.next().await.is_some() {
        let (Some(export), Some(node)) = (export.upgrade(), node.upgrade()) else { return };
        export.resized(node.geometry().size);
    }
}

type WeakNode = std::sync::Weak<dyn BlockNode>;

impl Shared {
    fn has_export(&self, name: &str) -> bool {
        self.exports.borrow().iter().any(|export| export.info.borrow().name == name)
    }

    async fn add(self: Rc<Self>, config: NbdExportConfig) -> Result<NbdExport, ExportError> {
        let NbdExportConfig { id, name, description, node, io_threads, writable, .. } = config;
        for (what, text) in [("export name", &name), ("description", &description)] {
            if text.len() > MAX_STRING {
                return Err(ExportError::Config(format!("{what} '{text}' too long")));
            }
            if text.contains('\0') {
                return Err(ExportError::Config(format!("{what} contains NUL")));
            }
        }
        if config.bitmaps.len() > MAX_BITMAPS {
            let why = format!("an export cannot have more than {MAX_BITMAPS} bitmaps");
            return Err(ExportError::Config(why));
        }
        let bitmaps = BusyBitmaps::new(config.bitmaps);
        if io_threads.is_empty() {
            return Err(ExportError::Config("an export needs an I/O thread".into()));
        }
        let geometry = node.geometry();
        if writable && geometry.read_only {
            return Err(ExportError::Config("Cannot export read-only node as writable".into()));
        }
        if self.has_export(&name) {
            let taken = format!("NBD server already has export named '{name}'");
            return Err(ExportError::Config(taken));
        }
        let mut workers = Vec::with_capacity(io_threads.len());
        for io_thread in &io_threads {
            let (node, bitmaps) = (node.clone(), bitmaps.0.clone());
            let failed = |error| ExportError::Attach { io_thread: io_thread.name().into(), error };
            let spawned = WorkerHandle::spawn(io_thread, node, bitmaps, config.writethrough).await;
            match spawned.map_err(Into::into).and_then(|made| made.map_err(failed)) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    // The caller may close the node next.
                    for worker in &workers {
                        worker.end().await;
                    }
                    return Err(error);
                }
            }
        }
        let stats = workers.iter().map(|worker| worker.stats().clone()).collect();
        let info = Arc::new(ExportInfo {
            name,
            description,
            size: geometry.size,
            read_only: !writable,
            multi_conn: self.max_connections != 1,
            preferred_block: preferred_block(&geometry),
            allocation_depth: config.allocation_depth,
            bitmaps: bitmaps.0.iter().map(|bitmap| bitmap.name().to_owned()).collect(),
        });
        let export = Rc::new(Export {
            id,
            info: RefCell::new(info),
            io_threads,
            workers,
            next: Cell::new(0),
            stats,
            sockets: RefCell::default(),
        });
        self.exports.borrow_mut().push(export.clone());
        let changes = export.watch(&node);
        self.event_loop.spawn(follow(Rc::downgrade(&export), Arc::downgrade(&node), changes));
        Ok(NbdExport { shared: self, export, _bitmaps: bitmaps })
    }

    async fn accept(self: &Rc<Self>, listener: &Listener) {
        for taken in 1u32.. {
            if taken.is_multiple_of(TURN) {
                take_turns().await;
            }
            let has_room =
                || self.max_connections == 0 || self.connections.get() < self.max_connections;
            let takes = || has_room() && !self.held.get();
            let resumed_or_left = first(self.changed.until(takes), self.left.until(takes));
            if self.or_stop(resumed_or_left).await.is_none() {
                return;
            }
            let mut accepted = None;
            let accept = async { accepted = Some(listener.accept().await) };
            // Checked first: while the server is held, a new connection may belong to another
            // process.
            let held = self.changed.until(|| self.held.get());
            if self.or_stop(first(held, accept)).await.is_none() {
                return;
            }
            match accepted {
                None => {}
                Some(Ok(socket)) => {
                    let me = self.clone();
                    self.count(async move { me.serve(socket).await });
                }
                Some(Err(error)) => {
                    log::error!("NBD server: takes no more clients: accept failed: {error}");
                    self.or_stop(std::future::pending::<()>()).await;
                    return;
                }
            }
        }
    }

    /// Serves a client, which counts as one until it has ended.
    fn count(self: &Rc<Self>, client: impl Future<Output = ()> + 'static) {
        self.connections.set(self.connections.get() + 1);
        let me = self.clone();
        self.event_loop.spawn(async move {
            client.await;
            me.connections.set(me.connections.get() - 1);
            me.left.tell();
            me.untrimmed.set(me.untrimmed.get() + 1);
            if me.untrimmed.get() >= UNTRIMMED && !me.trims.replace(true) {
                // Once more for clients that leave meanwhile.
                while me.untrimmed.replace(0) > 0 {
                    me.event_loop.sleep_until(me.event_loop.now_ns() + TRIM_NS).await;
                    release(Trim);
                }
                me.trims.set(false);
            }
        });
    }

    /// Serves a client to its end.
    async fn serve(&self, socket: OwnedFd) {
        let socket = Arc::new(socket);
        // Boxed: its memory is given back with the end of the handshake.
        let shaken = self.or_stop(Box::pin(self.shake_hands(&socket))).await.flatten();
        let Some((export, agreed, secured)) = shaken else { return };
        if self.or_stop(self.changed.until(|| !self.held.get())).await.is_some() {
            let left = Default::default();
            self.attend(&export, Client { socket, agreed, secured, left }).await;
        }
    }

    /// Serves a client that has chosen an export to its end.
    async fn attend(&self, export: &Export, client: Client) {
        let workers = &export.workers;
        let turn = export.next.get() % workers.len();
        export.next.set(turn + 1);
        let Some(worker) = workers.get(turn) else { return };
        let id = &export.id;
        match &client.secured {
            None => log::info!("export {id}: client connected"),
            Some(tls) => {
                log::info!("export {id}: client connected, {}", tls.session.description());
            }
        }
        let socket = client.socket.clone();
        export.sockets.borrow_mut().push(socket.clone());
        // It may have another one since the handshake.
        let agreed = Agreed { size: export.info.borrow().size, ..client.agreed };
        let served = worker.serve(Client { agreed, ..client }).await;
        export.sockets.borrow_mut().retain(|other| !Arc::ptr_eq(other, &socket));
        match served {
            Ok(End::Left) => log::info!("export {id}: client disconnected"),
            Ok(End::Stopped) => log::info!("export {id}: stopping, closed the connection"),
            Ok(end) => log::warn!("export {id}: closed the connection: {end}"),
            Err(_) => log::warn!("export {id}: closed the connection: no memory for it"),
        }
    }

    /// The export that a client chooses; `None`: it does not, or not in time.
    async fn shake_hands(
        &self,
        socket: &Arc<OwnedFd>,
    ) -> Option<(Rc<Export>, Agreed, Option<Box<Secured>>)> {
        let infos = || self.exports.borrow().iter().map(|e| e.info.borrow().clone()).collect();
        let negotiation =
            negotiate(&self.event_loop, socket, self.tls.as_ref(), &self.limits, infos);
        let negotiation = pin!(negotiation);
        let deadline = match self.handshake_max_seconds {
            0 => u64::MAX,
            n => self.event_loop.now_ns().saturating_add(u64::from(n) * 1_000_000_000),
        };
        let late = self.event_loop.sleep_until(deadline);
        // Failures before an export is chosen are logged at debug level: otherwise any stranger
        // could fill the log.
        match first(negotiation, late).await {
            Some(Ok(Negotiated { export: info, agreed, secured })) => {
                // It may have been stopped meanwhile.
                let exports = self.exports.borrow();
                let export = exports.iter().find(|export| export.info.borrow().name == info.name);
                return export.cloned().map(|export| (export, agreed, secured));
            }
            Some(Err(Failure::Left)) => log::debug!("NBD server: client left"),
            Some(Err(Failure::Rules(error))) => {
                log::debug!("NBD server: client sent away: {error}")
            }
            Some(Err(Failure::Socket(errno))) => {
                log::debug!("NBD server: client lost: {}", errno.desc());
            }
            // TLS failures are warnings: a certificate is usually misconfigured.
            Some(Err(Failure::Tls(error))) => {
                log::warn!("NBD server: client sent away: TLS failed: {error}");
            }
            Some(Err(Failure::LeftTls)) => log::warn!(
                "NBD server: client sent away: it left in the middle of TLS's handshake; it may not \
                 trust the server's certificate"
            ),
            Some(Err(Failure::Late)) | None => {
                log::debug!("NBD server: client sent away: its handshake took too long");
            }
        }
        None
    }

    /// What the future gives, or `None` when the server is stopped first.
    async fn or_stop<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        first(future, self.changed.until(|| self.stopping.get())).await
    }
}

/// Trims the heap when it is dropped.
struct Trim;

impl Drop for Trim {
    fn drop(&mut self) {
        trim_heap();
    }
}

/// Whether the client has closed its sending side.
pub(super) fn has_hung_up(socket: &OwnedFd) -> bool {
    has_event(socket, PollFlags::from_bits_retain(libc::POLLRDHUP))
}

/// Whether the client has closed both directions. Of TCP, that is known once it has refused data.
pub(super) fn is_gone(socket: &OwnedFd) -> bool {
    has_event(socket, PollFlags::empty())
}

fn has_event(socket: &OwnedFd, events: PollFlags) -> bool {
    let mut polled = [PollFd::new(socket.as_fd(), events)];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// What the future gives, or `None` when `end` comes first.
pub(super) async fn first<T>(
    future: impl Future<Output = T>,
    end: impl Future<Output = ()>,
) -> Option<T> {
    let (mut future, mut end) = (pin!(future), pin!(end));
    poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        end.as_mut().poll(cx).map(|()| None)
    })
    .await
}

/// Tells tasks of one loop that something has changed. Each task has a place of its own, so a client costs the same
/// whether there are few others or thousands.
#[derive(Default)]
struct Changed(RefCell<Slab<Waker>>);

impl Changed {
    fn tell(&self) {
        let waiting: Vec<_> = self.0.borrow().values().cloned().collect();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until `condition` holds.
    async fn until(&self, condition: impl Fn() -> bool) {
        let mut place = Place { changed: self, token: None };
        poll_fn(|cx| {
            if condition() {
                return Poll::Ready(());
            }
            place.wait(cx.waker());
            Poll::Pending
        })
        .await;
    }
}

/// The place of a task that waits, given back when the task waits no more.
struct Place<'a> {
    changed: &'a Changed,
    token: Option<u32>,
}

impl Place<'_> {
    fn wait(&mut self, waker: &Waker) {
        let mut waiting = self.changed.0.borrow_mut();
        match self.token.and_then(|token| waiting.get_mut(token)) {
            Some(kept) => kept.clone_from(waker),
            None => self.token = Some(waiting.insert(waker.clone())),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            self.changed.0.borrow_mut().remove(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A future that awaits another one by value has room for it several times.
    #[test]
    fn a_connected_client_costs_little_memory() {
        fn size<F: Future>(_: impl FnOnce(&'static Shared, OwnedFd) -> F) -> usize {
            size_of::<F>()
        }
        assert!(size(Shared::serve) <= 6 << 10, "{}", size(Shared::serve));
        fn handshake<F: Future>(
            _: impl FnOnce(&'static Shared, &'static Arc<OwnedFd>) -> F,
        ) -> usize {
            size_of::<F>()
        }
        let handshake = handshake(Shared::shake_hands);
        assert!(handshake <= 12 << 10, "{handshake}");
    }
}
