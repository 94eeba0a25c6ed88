//! Hands a server over to another process, or begins with the state of another process.

use std::future::Future;
use std::io;

use event_loop::oneshot;

use super::{Service, carry_out};
use crate::message_socket::MessageSocket;
use crate::vhost_user::backend::Backend;
use crate::vhost_user::backend_channel::BackendChannel;
use crate::vhost_user::handover::{Saved, SavedRings, SavedServer, SavedSession};
use crate::vhost_user::listener::Listener;
use crate::vhost_user::orders::{Begin, Beginning, Order};
use crate::vhost_user::session::Session;
use crate::vhost_user::wire::{Message, request_name};

/// The connected front end.
pub(super) type Held<'a> = (&'a mut MessageSocket, &'a mut Session, &'a mut Backend);

/// The sender to inform when all is ready, and the receiver of the order to begin.
pub(super) type Waiting = (oneshot::Sender<Result<(), String>>, oneshot::Receiver<Begin>);

/// Meaning of the rings' bases in the messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bases {
    /// As a front end has sent them.
    Said,
    /// Where the previous process has stopped the rings.
    Known,
}

impl Service {
    /// Carries out orders for a handover until one says to resume or to stop.
    pub(super) async fn obey(
        &self,
        listener: &Listener,
        mut held: Option<Held<'_>>,
        mut order: Order,
    ) {
        loop {
            let next = match order {
                Order::Describe(answer) => {
                    let held = held.as_ref().map(|held| (&*held.0, &*held.1, &*held.2));
                    answer.send(self.describe(listener, held).map_err(|error| error.to_string()));
                    None
                }
                Order::Flush(answer) => {
                    let flushed = async { self.flush().await.map_err(|error| error.to_string()) };
                    self.answer(answer, flushed).await
                }
                Order::Stop(flush, answer) => {
                    self.answer(answer, self.stop_rings(&mut held, flush)).await
                }
                Order::Run(answer) => {
                    self.run_rings(&mut held).await;
                    answer.send(Ok(()));
                    None
                }
                Order::Resume => return self.run_rings(&mut held).await,
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

    /// Answers with the result of the future, which may take as long as a disk. If another order comes first,
    /// the answer is not wanted any more, and that order is returned.
    async fn answer<T>(
        &self,
        answer: oneshot::Sender<T>,
        future: impl Future<Output = T>,
    ) -> Option<Order> {
        self.orders.unless_ordered(future).await.map(|done| answer.send(done)).err()
    }

    async fn stop_rings(
        &self,
        held: &mut Option<Held<'_>>,
        flush: bool,
    ) -> Result<SavedRings, String> {
        let messages = match held {
            Some((_, _, backend)) => backend.pause().await.map_err(|error| error.to_string())?,
            None => Vec::new(),
        };
        if flush {
            self.flush().await.map_err(|error| error.to_string())?;
        }
        Ok(SavedRings { messages, device: self.device.save() })
    }

    async fn run_rings(&self, held: &mut Option<Held<'_>>) {
        if let Some((_, _, backend)) = held
            && let Err(error) = backend.resume().await
        {
            log::error!("export {}: {error}", self.id);
        }
    }

    /// The state for a handover.
    fn describe(
        &self,
        listener: &Listener,
        held: Option<(&MessageSocket, &Session, &Backend)>,
    ) -> io::Result<SavedServer> {
        let (listener, file) = listener.hand_over()?;
        let Some((connection, session, backend)) = held else {
            return Ok(SavedServer { listener, file, session: None });
        };
        if backend.log.has_memory() {
            return Err(io::Error::other("its guest is being migrated, or was"));
        }
        let mut messages = session.save()?;
        let channel = self.channel.borrow();
        messages.extend(channel.as_ref().map(BackendChannel::save).transpose()?);
        messages.extend(backend.save()?);
        let session = Some(SavedSession { socket: connection.save()?, messages });
        Ok(SavedServer { listener, file, session })
    }

    /// Continues with the state of another process, once told to begin.
    pub(super) async fn go_on(&self, listener: &Listener, beginning: Beginning) {
        let Beginning { session, ready, begin } = beginning;
        match session {
            Some(SavedSession { socket, messages }) => {
                let connection = MessageSocket::new(&self.event_loop, socket, self.desk.clone());
                self.serve(listener, connection, Some((messages, (ready, begin)))).await;
            }
            None => {
                ready.send(Ok(()));
                if let Some(Ok((rings, _running))) = self.orders.unless_stopped(begin).await
                    && !rings.device.is_empty()
                {
                    self.device.restore(&rings.device);
                }
            }
        }
    }

    /// Handles the messages that the front end sent to the previous process. `None`: the session is not continued.
    pub(super) async fn repeat(
        &self,
        messages: Vec<Saved>,
        (ready, begin): Waiting,
        session: &mut Session,
        backend: &mut Backend,
    ) -> Option<()> {
        if let Err(error) = self.hear(messages, session, backend, Bases::Said).await {
            ready.send(Err(error));
            return None;
        }
        ready.send(Ok(()));
        let (rings, running) = self.orders.unless_stopped(begin).await?.ok()?;
        self.device.restore(&rings.device);
        if let Err(error) = self.hear(rings.messages, session, backend, Bases::Known).await {
            log::error!("export {}: {error}", self.id);
        }
        running.send(());
        Some(())
    }

    async fn hear(
        &self,
        messages: Vec<Saved>,
        session: &mut Session,
        backend: &mut Backend,
        bases: Bases,
    ) -> Result<(), String> {
        for Saved { code, payload, fds } in messages {
            let heard = match Message::parse(code, &payload, fds) {
                Ok(Message::SetVringBase { index, base }) if bases == Bases::Known => {
                    session.stopped_elsewhere(index, base).map(|()| None).map_err(Into::into)
                }
                Ok(message) => carry_out(&self.channel, session, backend, message).await,
                Err(error) => Err(error.into()),
            };
            heard.map_err(|error| format!("{}: {error}", request_name(code)))?;
        }
        Ok(())
    }
}
