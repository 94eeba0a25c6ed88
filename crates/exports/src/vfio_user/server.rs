//! The server of an export: serves one client after the other, from first message to last request.
//!
//! It is a task on the control loop. While one client is connected the next waits in the socket's backlog.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, LoopGone, Readiness, mailbox, oneshot, until};
use guest_memory::GuestMemory;
use nix::errno::Errno;
use nix::poll::PollFlags;

use super::connection::{self, Incoming};
use super::device::Device;
use super::error::ConnectionError;
use super::hand_over::{Order, Prepared, SavedClient};
use super::interrupts::{Interrupts, Unmasker, unmasker};
use super::memory::Memory;
use super::session::{MessageResult, Session};
use super::wire::{Message, Reply, command_name};
use crate::message_socket::{MessageSocket, in_time};
use crate::orders::Orders;
use crate::vhost_user::descriptors::Desk;
use crate::vhost_user::handover::SavedServer;
use crate::vhost_user::{EventFd, ExportError, Listen, Listener};

/// Refused commands after which a client is disconnected: each costs a line in the log.
const MAX_REFUSED: u32 = 32;
/// A device offered over a vfio-user socket. Dropping it stops it without waiting.
pub(super) struct Server {
    stop: oneshot::Sender<()>,
    /// Completes when no client is served and no request is in flight.
    quiet: oneshot::Receiver<()>,
    ended: oneshot::Receiver<Result<(), ExportError>>,
    connected: Rc<Cell<bool>>,
    begin: Cell<Option<oneshot::Sender<Option<Prepared>>>>,
    /// The client to go on with from [`begin`](Self::begin) on.
    prepared: Cell<Option<Prepared>>,
    listener: Rc<Listener>,
    orders: mailbox::Sender<Order>,
    device: Rc<dyn Device>,
    interrupts: Arc<Interrupts>,
    /// Bytes that a client may have mapped.
    max_memory: u64,
}

impl Server {
    /// Offers a device under the name `id`. Clients can connect when this returns, and are served from
    /// [`begin`](Self::begin) on.
    ///
    /// # Errors
    ///
    /// The socket cannot be listened on.
    pub(super) fn start(
        event_loop: &EventLoop,
        id: String,
        listen: Listen,
        device: Rc<dyn Device>,
        interrupts: Arc<Interrupts>,
        max_memory: u64,
    ) -> Result<Server, ExportError> {
        let listener = Rc::new(Listener::new(event_loop, listen)?);
        let (orders, receiver) = mailbox::channel();
        let (stop, stop_request) = oneshot::channel();
        let (tell_quiet, quiet) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let (begin, beginning) = oneshot::channel();
        let connected = Rc::new(Cell::new(false));
        let service = Service {
            event_loop: event_loop.clone(),
            id,
            device: device.clone(),
            interrupts: interrupts.clone(),
            max_memory,
            orders: Orders::new(stop_request, receiver),
            connected: connected.clone(),
            desk: Rc::default(),
        };
        let accepting = listener.clone();
        event_loop.spawn(async move {
            // A server that is dropped before it begins never serves.
            if let Some(Ok(prepared)) = service.orders.unless_stopped(beginning).await {
                service.serve_all(&accepting, prepared).await;
            }
            drop(accepting);
            tell_quiet.send(());
            end.send(service.flush().await);
        });
        Ok(Server {
            stop,
            quiet,
            ended,
            connected,
            begin: Cell::new(Some(begin)),
            prepared: Cell::default(),
            listener,
            orders,
            device,
            interrupts,
            max_memory,
        })
    }

    /// Serves clients.
    pub(super) fn begin(&self) {
        if let Some(begin) = self.begin.take() {
            begin.send(self.prepared.take());
        }
    }

    /// Checks the state of another process' client, to go on with from [`begin`](Self::begin) on.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub(super) fn prepare(&self, client: SavedClient) -> Result<(), String> {
        let prepared = Prepared::new(&*self.device, &self.interrupts, client, self.max_memory)?;
        self.prepared.set(Some(prepared));
        Ok(())
    }

    /// The listening socket for a handover.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(super) fn describe(&self) -> io::Result<SavedServer> {
        let (listener, file) = self.listener.hand_over()?;
        Ok(SavedServer { listener, file, session: None })
    }

    /// For orders of a handover.
    pub(super) fn orders(&self) -> &mailbox::Sender<Order> {
        &self.orders
    }

    /// Whether a client is connected.
    pub(super) fn is_connected(&self) -> bool {
        self.connected.get()
    }

    /// Disconnects the client, finishes its requests, removes the socket, calls `on_quiet`, and flushes.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop had ended before.
    pub(super) async fn stop(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        let Server { stop, quiet, ended, listener, device, .. } = self;
        // The service removes the socket's file, and the caller ends the device.
        drop((listener, device));
        stop.send(());
        if quiet.await.is_ok() {
            on_quiet();
        }
        ended.await?
    }
}

/// A reply, and the descriptor that goes with it.
type ReplyAndFd = (Reply, Option<OwnedFd>);

/// Why serving a client ended.
enum End {
    Left,
    Stopped,
}

/// The client's state beside its session.
struct Client {
    memory: Memory,
    /// The eventfd that unmasks the level interrupt, and what ends watching it.
    watch: Option<(EventFd, oneshot::Sender<()>)>,
}

struct Service {
    event_loop: EventLoop,
    id: String,
    device: Rc<dyn Device>,
    interrupts: Arc<Interrupts>,
    /// Bytes that a client may have mapped.
    max_memory: u64,
    orders: Orders<Order>,
    connected: Rc<Cell<bool>>,
    /// Inspects the descriptors of clients.
    desk: Rc<Desk>,
}

impl Service {
    /// The state of a new client.
    fn client(&self) -> Client {
        Client { memory: Memory::new(self.max_memory), watch: None }
    }

    /// Carries out orders for a handover until one says to resume or to stop.
    async fn obey(&self, held: Option<(&MessageSocket, &Session<'_>, &Client)>, mut order: Order) {
        let device = self.device.hands_over();
        loop {
            let next = match order {
                Order::Stop { flush, answer } => {
                    let stopped = self.orders.unless_ordered(self.pause(held, flush)).await;
                    // Another order comes first: this answer is not wanted any more.
                    stopped.map(|stopped| answer.send(stopped)).err()
                }
                Order::Run(answer) => {
                    device.resume();
                    answer.send(Ok(()));
                    None
                }
                Order::Resume => {
                    device.resume();
                    return;
                }
            };
            order = match next {
                Some(next) => next,
                None => match self.orders.next().await {
                    Some(next) => next,
                    None => return,
                },
            };
        }
    }

    /// Pauses the device, and returns the client's state.
    async fn pause(
        &self,
        held: Option<(&MessageSocket, &Session<'_>, &Client)>,
        flush: bool,
    ) -> Result<Option<SavedClient>, String> {
        let device = self.device.hands_over().pause().await.map_err(|gone| gone.to_string())?;
        if flush {
            self.flush().await.map_err(|error| error.to_string())?;
        }
        let Some((connection, session, client)) = held else { return Ok(None) };
        let save = || {
            let mut messages = session.save()?;
            messages.extend(client.memory.save()?);
            if let Some((eventfd, _)) = &client.watch {
                messages.push(unmasker(eventfd)?);
            }
            Ok(SavedClient { socket: connection.save()?, messages, device })
        };
        let saved = save();
        saved.map(Some).map_err(|error: io::Error| format!("duplicating failed: {error}"))
    }

    async fn serve_all(&self, listener: &Listener, prepared: Option<Prepared>) {
        let id = &self.id;
        let who = format!("export {id}");
        if let Some(Prepared { socket, session, memory, mapped, unmasker, restore }) = prepared {
            let session = Session::with_state(&*self.device, self.interrupts.clone(), session);
            self.device.set_memory(mapped);
            restore();
            let watch = unmasker.map(|fd| self.watch(fd));
            self.serve(socket, session, Client { memory, watch }).await;
        }
        loop {
            let next = async {
                self.desk.settled().await;
                listener.accept(&who).await
            };
            match self.orders.unless_stopped(self.orders.unless_ordered(next)).await {
                Some(Ok(Ok(socket))) => {
                    log::info!("export {id}: client connected");
                    if let Err(error) = self.device.renew_mapped_area() {
                        log::error!(
                            "export {id}: closed the connection: no page of doorbells: {error}"
                        );
                        continue;
                    }
                    let session = Session::new(&*self.device, self.interrupts.clone());
                    self.serve(socket, session, self.client()).await;
                }
                Some(Ok(Err(error))) => {
                    log::error!("export {id}: takes no more clients: accept failed: {error}");
                    self.orders.unless_stopped(std::future::pending::<()>()).await;
                }
                Some(Err(order)) => self.obey(None, order).await,
                None => return,
            }
        }
    }

    /// Serves a client until it disconnects, and then finishes requests in flight.
    async fn serve(&self, socket: OwnedFd, session: Session<'_>, client: Client) {
        let id = &self.id;
        self.connected.set(true);
        let mut connection = MessageSocket::new(&self.event_loop, socket, self.desk.clone());
        let end = self.converse(&mut connection, session, client).await;
        // After the connection has ended, nothing may access the guest's memory or interrupt it.
        self.interrupts.clear();
        self.device.set_memory(Arc::new(GuestMemory::new()));
        self.device.reset();
        if let Err(error) = self.device.settle().await {
            log::error!("export {id}: {error}");
        }
        drop(connection);
        match end {
            Ok(End::Left) => log::info!("export {id}: client disconnected"),
            Ok(End::Stopped) => log::info!("export {id}: stopping, closed the connection"),
            Err(error) => log::warn!("export {id}: closed the connection: {error}"),
        }
        self.connected.set(false);
    }

    async fn converse(
        &self,
        connection: &mut MessageSocket,
        mut session: Session<'_>,
        mut client: Client,
    ) -> Result<End, ConnectionError> {
        let mut payload = Vec::new();
        let mut refused = 0;
        loop {
            // Between two messages: nothing is partly received or partly sent.
            match self
                .orders
                .unless_stopped(self.orders.unless_ordered(connection.readable()))
                .await
            {
                None => return Ok(End::Stopped),
                Some(Err(order)) => {
                    self.obey(Some((connection, &session, &client)), order).await;
                    continue;
                }
                Some(Ok(())) => {}
            }
            let incoming = in_time(&self.event_loop, connection::receive(connection, &mut payload));
            let incoming = match self.orders.unless_stopped(incoming).await {
                None => return Ok(End::Stopped),
                Some(incoming) => incoming?,
            };
            let Some(Incoming { header, fds }) = incoming else { return Ok(End::Left) };
            let message = fds.and_then(|fds| Message::parse(header.command, &payload, fds));
            // Clients ask for features to find out whether they exist.
            let is_question = matches!(message, Ok(Message::Feature));
            let result = match message {
                Ok(message) => self.carry_out(&mut session, &mut client, message).await?,
                Err(error) => Err((error.errno(), error.to_string())),
            };
            let (reply, fd) = match result {
                Ok(reply) => reply,
                Err((errno, _)) if is_question => (Reply::Error(errno), None),
                Err((errno, why)) => {
                    let command = command_name(header.command);
                    log::warn!("export {}: refused {command}: {why}", self.id);
                    if !session.has_version() {
                        return Err(ConnectionError::NoVersion);
                    }
                    refused += 1;
                    if refused > MAX_REFUSED {
                        return Err(ConnectionError::TooManyRefused);
                    }
                    (Reply::Error(errno), None)
                }
            };
            if header.no_reply {
                continue;
            }
            let bytes = reply.encode(&header);
            let sent = in_time(&self.event_loop, connection.send(&bytes, fd));
            match self.orders.unless_stopped(sent).await {
                None => return Ok(End::Stopped),
                Some(sent) => {
                    if !sent? {
                        return Ok(End::Left);
                    }
                }
            }
        }
    }

    /// Carries out a message. Returns the reply for the client, and an error for the log.
    ///
    /// # Errors
    ///
    /// The I/O thread has stopped.
    async fn carry_out(
        &self,
        session: &mut Session<'_>,
        client: &mut Client,
        message: Message<'_>,
    ) -> Result<Result<ReplyAndFd, (Errno, String)>, ConnectionError> {
        let step = match session.step(message) {
            Ok(step) => step,
            Err(errno) => return Ok(Err((errno, errno.desc().to_owned()))),
        };
        let reply = match step {
            MessageResult::Reply(reply) => reply,
            MessageResult::ReplyWith(reply, fd) => return Ok(Ok((reply, Some(fd)))),
            MessageResult::Map(map) => match client.memory.map(map) {
                Ok(memory) => {
                    self.device.set_memory(memory);
                    Reply::Done
                }
                Err(error) => return Ok(Err((error.errno(), error.to_string()))),
            },
            MessageResult::Unmap(unmap) => match client.memory.unmap(unmap) {
                Ok(memory) => {
                    self.device.set_memory(memory);
                    self.settle().await?;
                    Reply::DmaUnmapped(unmap)
                }
                Err(error) => return Ok(Err((error.errno(), error.to_string()))),
            },
            MessageResult::Unmasker(Unmasker(fd)) => {
                client.watch = fd.map(|fd| self.watch(fd));
                Reply::Done
            }
            MessageResult::Settle(reply) => {
                self.settle().await?;
                reply
            }
        };
        Ok(Ok((reply, None)))
    }

    /// Unmasks the level interrupt at each write to an eventfd, until the returned sender is dropped.
    fn watch(&self, fd: EventFd) -> (EventFd, oneshot::Sender<()>) {
        let (watch, mut ended) = oneshot::channel();
        let interrupts = self.interrupts.clone();
        // Not read: each write is an event.
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let written = Readiness::new(&self.event_loop, fd.fd().clone(), events);
        self.event_loop.spawn(async move {
            while until(&mut ended, written.wait()).await.is_err() {
                interrupts.unmask();
            }
        });
        (fd, watch)
    }

    async fn settle(&self) -> Result<(), ConnectionError> {
        let gone = |error: LoopGone| ConnectionError::Export(error.into());
        self.device.settle().await.map_err(gone)
    }

    /// Makes answered writes durable.
    async fn flush(&self) -> Result<(), ExportError> {
        self.device.flush().await?.map_err(|errno| ExportError::Flush(errno.into()))
    }
}
