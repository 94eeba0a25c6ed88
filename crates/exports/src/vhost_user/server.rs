//! The server of an export: serves one front end after the other, from first message to last request.
//!
//! It is a task on the control loop, which serves all exports. While one front end is connected the
//! next waits in the socket's backlog, as with qemu-storage-daemon.

#![forbid(unsafe_code)]

mod hand_over;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use block::node::{Changes, Watcher};
use event_loop::{EventLoop, LoopHandle, oneshot};
use stats::InFlight;

use self::hand_over::Waiting;
use super::backend::Backend;
use super::backend_channel::BackendChannel;
use super::connection::{self, Incoming};
use super::descriptors::Desk;
use super::device::Device;
use super::error::{ConnectionError, ExportError, RequestError};
use super::handover::{Saved, SavedRings};
use super::inflight;
use super::listener::{Listen, Listener};
use super::orders::{Begin, Beginning, HandOver, Order, TakenOver};
use super::pinning::Pinning;
use super::session::{Action, Session, Step};
use super::wire::{Message, Reply, Request, request_name};
use super::worker::{ExportLog, WorkerHandle, in_flight_of, set_all_paused};
use crate::message_socket::{MessageSocket, in_time};
use crate::orders::Orders;

/// Refused requests after which a front end is disconnected: each costs a line in the log.
const MAX_REFUSED: u32 = 32;
/// Maximum number of queues.
///
/// Messages such as SET_VRING_KICK have 8 bits for the queue's index.
pub const MAX_QUEUES: u16 = 256;

/// How guests' memory is mapped.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions {
    /// It is registered with the rings of the I/O threads.
    pub pin: bool,
    /// Bytes that a front end may have mapped.
    pub max: u64,
}

/// A device offered over a vhost-user socket. Dropping it stops it without waiting.
pub struct Server {
    stop: oneshot::Sender<()>,
    /// Completes when no front end is served and no request is in flight.
    quiet: oneshot::Receiver<()>,
    ended: oneshot::Receiver<Result<(), ExportError>>,
    connected: Arc<AtomicBool>,
    /// The workers of the service, while it serves.
    workers: Weak<Vec<WorkerHandle>>,
    hand_over: HandOver,
    /// Starts a server that was created with `begins_with`.
    begin: Cell<Option<oneshot::Sender<Begin>>>,
}

impl Server {
    /// Offers a device under the name `id`. Front ends can connect when this returns.
    ///
    /// Queue i runs on I/O thread i modulo their number. `memory`:
    /// see [`VhostUserConfig`](super::VhostUserConfig). With `begins_with`, no front end is served until
    /// [`begin`](Self::begin), but the memory of a session from another process is mapped before.
    ///
    /// # Errors
    ///
    /// The numbers contradict each other, the socket cannot be listened on, the device cannot work on one of the
    /// threads, or a session from another process cannot be continued.
    pub async fn start(
        control_loop: EventLoop,
        id: String,
        listen: Listen,
        device: Arc<dyn Device>,
        io_threads: &[LoopHandle],
        memory: MemoryOptions,
        begins_with: Option<TakenOver>,
    ) -> Result<Server, ExportError> {
        let num_queues = device.num_queues();
        if num_queues == 0 || num_queues > MAX_QUEUES {
            let allowed = format!("num-queues must be from 1 to {MAX_QUEUES}, not {num_queues}");
            return Err(ExportError::Config(allowed));
        }
        if io_threads.is_empty() {
            return Err(ExportError::Config("an export needs an I/O thread".into()));
        }
        let pinning = memory.pin.then(|| Pinning::new(id.clone()));
        // Threads without a queue need no worker, and pin no memory.
        let io_threads = io_threads.get(..usize::from(num_queues)).unwrap_or(io_threads);
        let mut workers = Vec::with_capacity(io_threads.len());
        let log = ExportLog { control: control_loop.handle(), id: id.as_str().into() };
        let attached = attach_all(&mut workers, io_threads, &device, pinning.as_ref(), &log).await;
        let listener = match attached.and_then(|()| Listener::new(&control_loop, listen)) {
            Ok(listener) => listener,
            Err(error) => {
                // The caller may close the node next.
                for worker in workers {
                    worker.end().await;
                }
                return Err(error);
            }
        };
        let (watcher, changes) = Watcher::new();
        device.watch(&watcher);
        drop(watcher);
        // The backing node may have changed since the device was created.
        device.refresh();
        let (hand_over, orders) = HandOver::new();
        let (stop, stop_request) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let (tell_quiet, quiet) = oneshot::channel();
        let connected = Arc::new(AtomicBool::new(false));
        let workers = Arc::new(workers);
        let of_service = Arc::downgrade(&workers);
        let service = Service {
            event_loop: control_loop.clone(),
            id,
            device,
            workers,
            pinning,
            max_memory: memory.max,
            connected: connected.clone(),
            channel: RefCell::new(None),
            orders: Orders::new(stop_request, orders),
            desk: Rc::default(),
        };
        let (ready, is_ready) = oneshot::channel();
        let (begin, beginning) = oneshot::channel();
        let beginning =
            begins_with.map(|taken| Beginning { session: taken.session, ready, begin: beginning });
        let begin = Cell::new(beginning.is_some().then_some(begin));
        let waits = beginning.is_some();
        control_loop.spawn(async move {
            service.serve_until_stopped(listener, changes, beginning).await;
            tell_quiet.send(());
            end.send(service.flush_and_end().await);
        });
        if waits {
            is_ready.await?.map_err(ExportError::Config)?;
        }
        Ok(Server { stop, quiet, ended, connected, workers: of_service, hand_over, begin })
    }

    /// Starts serving, first the session from another process.
    ///
    /// Completes when the rings run.
    pub fn begin(&self, rings: SavedRings) -> impl Future<Output = ()> + use<> {
        let (running, run) = oneshot::channel();
        if let Some(begin) = self.begin.take() {
            begin.send((rings, running));
        }
        // A server that has ended runs nothing.
        async move { run.await.unwrap_or_default() }
    }

    /// Returns the handle for a handover.
    pub fn hand_over(&self) -> &HandOver {
        &self.hand_over
    }

    /// Returns whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Returns the requests in flight with their queues. Called on the control loop.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        in_flight_of(self.workers.upgrade().as_deref().map_or(&[], Vec::as_slice))
    }

    /// Makes all rings leave requests in the queue, or take them again.
    ///
    /// Applies to later front ends too.
    pub fn set_paused(&self, paused: bool) -> impl Future<Output = ()> + use<> {
        set_all_paused(self.workers.upgrade().as_deref().map_or(&[], Vec::as_slice), paused)
    }

    /// Stops taking requests, finishes those in flight, and flushes.
    ///
    /// The socket is removed, and `on_quiet` is called before the flush.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop had stopped before.
    pub async fn stop(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        self.stop.send(());
        if self.quiet.await.is_ok() {
            on_quiet();
        }
        self.ended.await?
    }
}

/// Why serving a front end ended.
enum End {
    Left,
    Stopped,
}

struct Service {
    event_loop: EventLoop,
    id: String,
    device: Arc<dyn Device>,
    workers: Arc<Vec<WorkerHandle>>,
    pinning: Option<Arc<Pinning>>,
    /// Bytes that a front end may have mapped.
    max_memory: u64,
    connected: Arc<AtomicBool>,
    /// The channel to the connected front end.
    channel: RefCell<Option<BackendChannel>>,
    orders: Orders<Order>,
    /// Inspects the descriptors of front ends.
    desk: Rc<Desk>,
}

impl Service {
    async fn serve_until_stopped(
        &self,
        listener: Listener,
        changes: Changes,
        beginning: Option<Beginning>,
    ) {
        let mut serving = pin!(self.serve_all(listener, beginning));
        let mut telling = pin!(self.tell_changes(changes));
        let mut told_all = false;
        std::future::poll_fn(|cx| {
            told_all = told_all || telling.as_mut().poll(cx).is_ready();
            serving.as_mut().poll(cx)
        })
        .await;
    }

    async fn flush_and_end(self) -> Result<(), ExportError> {
        let flushed = self.flush().await;
        // Without a front end there are no other references to the workers.
        for worker in Arc::try_unwrap(self.workers).unwrap_or_default() {
            worker.end().await;
        }
        flushed
    }

    /// Tells the connected front end of changes of the device.
    async fn tell_changes(&self, mut changes: Changes) {
        while changes.next().await.is_some() {
            if !self.device.refresh() || !self.connected.load(Ordering::Relaxed) {
                continue;
            }
            let id = &self.id;
            let told = self.channel.borrow().as_ref().map(BackendChannel::config_changed);
            match told {
                Some(Ok(())) => log::info!("export {id}: told the front end of the new size"),
                Some(Err(errno)) => {
                    let why = errno.desc();
                    log::warn!("export {id}: could not tell the front end of the new size: {why}");
                }
                None => log::warn!(
                    "export {id}: the front end has no way to be told of the new size \
                     (VHOST_USER_PROTOCOL_F_BACKEND_REQ); its guest sees it after a restart"
                ),
            }
        }
    }

    async fn serve_all(&self, listener: Listener, beginning: Option<Beginning>) {
        let id = &self.id;
        let who = format!("export {id}");
        if let Some(beginning) = beginning {
            self.go_on(&listener, beginning).await;
        }
        loop {
            let next = async {
                self.desk.settled().await;
                listener.accept(&who).await
            };
            match self.orders.unless_stopped(self.orders.unless_ordered(next)).await {
                Some(Err(order)) => self.obey(&listener, None, order).await,
                Some(Ok(Ok(socket))) => {
                    let connection =
                        MessageSocket::new(&self.event_loop, socket, self.desk.clone());
                    log::info!("export {id}: front end connected");
                    self.serve(&listener, connection, None).await;
                }
                Some(Ok(Err(error))) => {
                    log::error!("export {id}: takes no more front ends: accept failed: {error}");
                    self.orders.unless_stopped(std::future::pending::<()>()).await;
                }
                None => return,
            }
        }
    }

    /// Serves a front end until it disconnects, and then finishes requests in flight. `beginning`: another
    /// process has served it before.
    async fn serve(
        &self,
        listener: &Listener,
        connection: MessageSocket,
        beginning: Option<(Vec<Saved>, Waiting)>,
    ) {
        let id = &self.id;
        self.connected.store(true, Ordering::Relaxed);
        match self.serve_to_end(listener, connection, beginning).await {
            Ok(End::Left) => log::info!("export {id}: front end disconnected"),
            Ok(End::Stopped) => {
                log::info!("export {id}: stopping, closed the connection");
            }
            Err(error) => log::warn!("export {id}: closed the connection: {error}"),
        }
        self.connected.store(false, Ordering::Relaxed);
    }

    async fn serve_to_end(
        &self,
        listener: &Listener,
        mut connection: MessageSocket,
        beginning: Option<(Vec<Saved>, Waiting)>,
    ) -> Result<End, ConnectionError> {
        let mut session = Session::new(self.device.clone());
        let mut backend = Backend::new(
            self.id.clone(),
            self.workers.clone(),
            self.pinning.clone(),
            self.max_memory,
        );
        let begun = match beginning {
            Some((messages, waiting)) => {
                self.repeat(messages, waiting, &mut session, &mut backend).await
            }
            None => Some(()),
        };
        let end = match begun {
            Some(()) => self.converse(listener, &mut connection, &mut session, &mut backend).await,
            None => Ok(End::Stopped),
        };
        self.channel.replace(None);
        // Only now does nothing write to the guest's memory: it is unmapped. The connection ends after that,
        // because a front end then reads the used rings, and submits requests that are missing there
        // again elsewhere.
        if let Err(error) = backend.end().await {
            log::error!("export {}: {error}", self.id);
        }
        self.device.keep_write_cache(None);
        drop(connection);
        end
    }

    async fn converse(
        &self,
        listener: &Listener,
        connection: &mut MessageSocket,
        session: &mut Session,
        backend: &mut Backend,
    ) -> Result<End, ConnectionError> {
        let mut refused = 0;
        loop {
            // A handover happens between two messages.
            match self
                .orders
                .unless_stopped(self.orders.unless_ordered(connection.readable()))
                .await
            {
                None => return Ok(End::Stopped),
                Some(Err(order)) => {
                    self.obey(listener, Some((connection, session, backend)), order).await;
                    continue;
                }
                Some(Ok(())) => {}
            }
            let incoming = in_time(&self.event_loop, connection::receive(connection));
            let incoming = match self.orders.unless_stopped(incoming).await {
                None => return Ok(End::Stopped),
                Some(incoming) => incoming?,
            };
            let Some(Incoming { header, payload, fds }) = incoming else { return Ok(End::Left) };
            let result = match fds.and_then(|fds| Message::parse(header.code, &payload, fds)) {
                Ok(message) => carry_out(&self.channel, session, backend, message).await,
                Err(error) => Err(error.into()),
            };
            let wants_ack = header.need_reply
                && session.has_reply_ack()
                && !Request::from_code(header.code).is_some_and(Request::has_reply);
            let reply = match result {
                Ok(Some(reply)) => reply,
                Ok(None) if wants_ack => Reply::ACK.into(),
                Ok(None) => {
                    self.device.answered();
                    continue;
                }
                Err(error) if wants_ack => {
                    let request = request_name(header.code);
                    log::warn!("export {}: refused {request}: {error}", self.id);
                    refused += 1;
                    if refused > MAX_REFUSED {
                        return Err(ConnectionError::TooManyRefused);
                    }
                    Reply::NACK.into()
                }
                // Without an answer the front end would assume success.
                Err(error) => {
                    let request = request_name(header.code);
                    return Err(ConnectionError::Request { request, error });
                }
            };
            let Answer { reply, fd } = reply;
            let bytes = reply.encode(header.code);
            let sent = in_time(&self.event_loop, connection.send(&bytes, fd));
            let Some(sent) = self.orders.unless_stopped(sent).await else {
                return Ok(End::Stopped);
            };
            if !sent? {
                return Ok(End::Left);
            }
            self.device.answered();
        }
    }

    /// Makes answered writes durable. One thread's flush applies to the whole node.
    async fn flush(&self) -> Result<(), ExportError> {
        let Some(worker) = self.workers.first() else { return Ok(()) };
        worker
            .ask(|worker, answer| worker.flush(answer))
            .await?
            .map_err(|errno| ExportError::Flush(errno.into()))
    }
}

/// A reply and its descriptor.
struct Answer {
    reply: Reply,
    fd: Option<OwnedFd>,
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Answer { reply, fd: None }
    }
}

/// Starts a worker on each thread, and prepares the device for its loop.
async fn attach_all(
    workers: &mut Vec<WorkerHandle>,
    io_threads: &[LoopHandle],
    device: &Arc<dyn Device>,
    pinning: Option<&Arc<Pinning>>,
    log: &ExportLog,
) -> Result<(), ExportError> {
    for io_thread in io_threads {
        let pinning = pinning.cloned();
        let worker = WorkerHandle::spawn(io_thread, device.clone(), pinning, log.clone())?;
        let attached = worker.ask(|worker, answer| answer.send(worker.attach()));
        workers.push(worker);
        let failed = |error| ExportError::Attach { io_thread: io_thread.name().into(), error };
        attached.await?.map_err(failed)?;
    }
    Ok(())
}

/// Carries out a message. Returns the reply, for a request with a specific reply.
async fn carry_out(
    channel: &RefCell<Option<BackendChannel>>,
    session: &mut Session,
    backend: &mut Backend,
    message: Message,
) -> Result<Option<Answer>, RequestError> {
    let action = match session.handle(message)? {
        Step::Done => return Ok(None),
        Step::Reply(reply) => return Ok(Some(reply.into())),
        Step::Do(action) => action,
    };
    match action {
        Action::Note(text) => log::warn!("export {}: {text}", backend.id()),
        Action::SetMemory(regions) => backend.set_memory(regions).await?,
        Action::AddRegion(region) => backend.add_region(region).await?,
        Action::RemoveRegion(region) => backend.remove_region(region).await?,
        Action::StartRing { index, setup } => {
            let started = backend.start_ring(index, setup).await;
            if started.is_ok() {
                session.ring_started(index);
            }
            started?;
        }
        Action::StopRing { index } => {
            let base = backend.end_ring(index).await?;
            return Ok(Some(session.ring_stopped(index, base).into()));
        }
        Action::SetCall { index, call } => backend.set_call(index, call).await?,
        Action::SetErr { index, err } => backend.set_err(index, err).await?,
        Action::SetEnabled { index, enabled } => backend.set_enabled(index, enabled).await?,
        Action::CreateInflight { num_queues, queue_size, payload_len } => {
            let (description, fd) =
                inflight::create(num_queues, queue_size).map_err(RequestError::InflightMemory)?;
            let reply = Reply::Inflight { description, payload_len };
            return Ok(Some(Answer { reply, fd: Some(fd) }));
        }
        Action::SetLogBase { description, fd } => {
            backend.set_log_base(description, fd).await?;
            return Ok(Some(Reply::Log(description).into()));
        }
        Action::SetLogFd(notify) => backend.set_log_fd(notify).await?,
        Action::SetLogging(on) => {
            backend.set_logging(on).await?;
            session.logging_set(on);
        }
        Action::SetUsedLog { index, addr } => backend.set_used_log(index, addr).await?,
        Action::SetInflight { description, fd } => {
            let write_cache = backend.set_inflight(description, fd)?;
            session.inflight_set(write_cache);
        }
        Action::TellChanges(socket) => {
            channel.replace(Some(BackendChannel::new(socket)));
        }
        Action::ResetRings(reset) => {
            let bases = backend.reset_rings(reset).await?;
            backend.set_logging(false).await?;
            session.rings_reset(&bases);
        }
    }
    Ok(None)
}
