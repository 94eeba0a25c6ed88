//! An export on one of its I/O threads: the channel to its node, and the connections served there.
//!
//! It is a task on that thread's loop, which takes jobs from the control plane.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::flush::flush;
use block::node::{BlockNode, Channel};
use block::track::DirtyBitmap;
use event_loop::{EventLoop, LoopGone, LoopHandle, mailbox, oneshot};
use nix::errno::Errno;
use stats::InFlight;
use stats::QueueStats;

use super::connection::{Connection, MAX_LEFT, SavedClient, Service};
use super::handshake::Secured;
use super::session::transmission::Agreed;
use super::state::End;
use super::turns::Turns;

type Job = Box<dyn FnOnce(&Rc<Worker>) + Send>;

/// A client in the transmission phase.
pub(super) struct Client {
    pub(super) socket: Arc<OwnedFd>,
    pub(super) agreed: Agreed,
    /// TLS, if it was begun.
    pub(super) secured: Option<Box<Secured>>,
    /// See [`Service::left`].
    pub(super) left: (Vec<u8>, Arc<Vec<u8>>),
}

/// The control plane's way to a [`Worker`]. Dropping it ends the worker, and its connections.
pub(super) struct WorkerHandle {
    jobs: mailbox::Sender<Job>,
    stats: Arc<QueueStats>,
    gone: Cell<Option<oneshot::Receiver<()>>>,
}

/// The part of an export on one I/O thread.
pub(super) struct Worker {
    event_loop: EventLoop,
    channel: Rc<dyn Channel>,
    bitmaps: Arc<[Arc<DirtyBitmap>]>,
    read_only: bool,
    writethrough: bool,
    stats: Arc<QueueStats>,
    turns: Rc<Turns>,
    connections: RefCell<BTreeMap<u64, Rc<Connection>>>,
    next_connection: Cell<u64>,
    /// The connections are paused, so the node must not delay requests.
    paused: Cell<bool>,
    /// Waits for the last connection to end.
    idle: Cell<Option<Box<dyn FnOnce()>>>,
    /// The worker has been asked to end.
    ending: Cell<bool>,
    /// Kept because the channel does not keep the node alive.
    _node: Arc<dyn BlockNode>,
    /// Dropped last.
    _gone: oneshot::Sender<()>,
}

impl WorkerHandle {
    /// Puts a worker on a loop.
    ///
    /// # Errors
    ///
    /// Outside: the loop is gone. Inside: it lacks what the node needs.
    pub(super) async fn spawn(
        io_thread: &LoopHandle,
        node: Arc<dyn BlockNode>,
        bitmaps: Arc<[Arc<DirtyBitmap>]>,
        writethrough: bool,
    ) -> Result<io::Result<Self>, LoopGone> {
        let (jobs, mut receiver) = mailbox::channel::<Job>();
        let stats = Arc::new(QueueStats::default());
        let of_worker = stats.clone();
        let (answer, opened) = oneshot::channel();
        let (_gone, gone) = oneshot::channel();
        io_thread.spawn(move |event_loop| {
            let channel = match node.clone().open_channel(event_loop) {
                Ok(channel) => channel,
                Err(error) => {
                    // The caller may close the node next.
                    drop(node);
                    return answer.send(Err(error));
                }
            };
            let worker = Rc::new(Worker {
                event_loop: event_loop.clone(),
                channel,
                bitmaps,
                read_only: node.geometry().read_only,
                writethrough,
                stats: of_worker,
                turns: Turns::new(event_loop),
                connections: RefCell::default(),
                next_connection: Cell::new(0),
                paused: Cell::new(false),
                idle: Cell::new(None),
                ending: Cell::new(false),
                _node: node,
                _gone,
            });
            answer.send(Ok(()));
            event_loop.spawn(async move {
                while let Some(job) = receiver.receive().await {
                    job(&worker);
                    if worker.ending.get() {
                        break;
                    }
                }
                worker.stop_connections();
            });
        })?;
        Ok(opened.await?.map(|()| WorkerHandle { jobs, stats, gone: Cell::new(Some(gone)) }))
    }

    /// Returns the worker's counters.
    pub(super) fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Serves a client on the I/O thread. The answer comes when its connection has ended.
    pub(super) fn serve(&self, client: Client) -> oneshot::Receiver<End> {
        self.ask(move |worker, answer| worker.serve(client, answer))
    }

    /// Pauses all connections until [`resume`](Self::resume). With `flush`, makes written data durable.
    ///
    /// The answer comes when no request is in flight: the clients that can be handed over to another process.
    pub(super) fn pause(&self, flush: bool) -> oneshot::Receiver<Result<Vec<SavedClient>, Errno>> {
        self.ask(move |worker, answer| {
            let (worker, connections) = (worker.clone(), worker.all_connections());
            let quiet: Vec<_> = connections.iter().map(|connection| connection.pause()).collect();
            if !worker.paused.replace(true) {
                worker.event_loop.section(|| worker.channel.drain_begin());
            }
            worker.event_loop.clone().spawn(async move {
                for quiet in quiet {
                    // A connection that has ended or was resumed sends no answer.
                    let _ = quiet.await;
                }
                if flush {
                    let (flushed, is_flushed) = oneshot::channel();
                    worker.flush(flushed);
                    if let Ok(Err(errno)) = is_flushed.await {
                        return answer.send(Err(errno));
                    }
                }
                let mut room = MAX_LEFT;
                let saved = connections.iter().map(|connection| connection.save(&mut room));
                let saved = saved.filter_map(Result::transpose).collect::<io::Result<_>>();
                let errno = |error: io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(0));
                answer.send(saved.map_err(errno));
            });
        })
    }

    /// Makes written data durable.
    pub(super) fn flush(&self) -> oneshot::Receiver<Result<(), Errno>> {
        self.ask(|worker, answer| worker.flush(answer))
    }

    /// Resumes all connections.
    pub(super) fn resume(&self) {
        let resume = |worker: &Rc<Worker>| {
            if worker.paused.replace(false) {
                worker.channel.drain_end();
            }
            worker.all_connections().iter().for_each(|connection| connection.resume());
        };
        // Once its loop has ended, a worker has no clients.
        let _ = self.jobs.send(Box::new(resume));
    }

    /// Ends the paused connections that were not handed over: those with TLS, and those that were ending.
    ///
    /// Replies that are still to be sent go out first. The answer comes when the connections have ended.
    pub(super) fn part(&self) -> oneshot::Receiver<()> {
        self.ask(|worker, answer| {
            let connections = worker.all_connections();
            let ends = connections.iter().filter_map(|connection| connection.part());
            let ends: Vec<_> = ends.collect();
            worker.event_loop.spawn(async move {
                for end in ends {
                    let _ = end.await;
                }
                answer.send(());
            });
        })
    }

    /// Ends all connections after their requests. The receiver completes when the connections have
    /// ended.
    pub(super) fn stop(&self) -> oneshot::Receiver<()> {
        self.ask(|worker, answer| {
            worker.idle.set(Some(Box::new(move || answer.send(()))));
            // This drain never ends: no client uses the channel afterwards.
            worker.channel.drain_begin();
            worker.stop_connections();
            worker.check_idle();
        })
    }

    /// Drops the worker on its I/O thread, and waits for that.
    ///
    /// The last owner of an image closes it, which needs files and threads that the sandbox denies to an I/O
    /// thread. After this the control plane can be the last owner.
    pub(super) async fn end(&self) {
        let end = |worker: &Rc<Worker>| worker.ending.set(true);
        if self.jobs.send(Box::new(end)).is_ok()
            && let Some(gone) = self.gone.take()
        {
            // The worker drops the sender without sending.
            let _ = gone.await;
        }
    }

    /// Returns the requests in flight, with the numbers of their connections.
    pub(super) fn in_flight(&self) -> oneshot::Receiver<Vec<(u64, InFlight)>> {
        self.ask(|worker, answer| {
            let connections = worker.connections.borrow();
            let of = |(id, connection): (&u64, &Rc<Connection>)| {
                let id = *id;
                connection.in_flight().into_iter().map(move |request| (id, request))
            };
            answer.send(connections.iter().flat_map(of).collect());
        })
    }

    /// Updates the size of the export, bytes.
    pub(super) fn resized(&self, size: u64) {
        // Once its loop has ended, a worker has no clients.
        let _ = self.jobs.send(Box::new(move |worker| {
            let connections = worker.connections.borrow();
            connections.values().for_each(|connection| connection.set_size(size));
        }));
    }

    fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Rc<Worker>, oneshot::Sender<R>) + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (sender, receiver) = oneshot::channel();
        // A job that cannot be sent is dropped, its sender with it; the receiver then says so.
        let _ = self.jobs.send(Box::new(move |worker| job(worker, sender)));
        receiver
    }
}

impl Worker {
    fn serve(self: &Rc<Self>, client: Client, answer: oneshot::Sender<End>) {
        let Client { socket: fd, agreed, secured, left } = client;
        let id = self.next_connection.get();
        self.next_connection.set(id + 1);
        let service = Service {
            channel: self.channel.clone(),
            agreed,
            bitmaps: self.bitmaps.clone(),
            secured,
            writethrough: self.writethrough,
            stats: self.stats.clone(),
            turns: self.turns.clone(),
            left,
        };
        let me: Weak<Worker> = Rc::downgrade(self);
        let ended = Box::new(move |end| {
            answer.send(end);
            if let Some(me) = me.upgrade() {
                let gone = me.connections.borrow_mut().remove(&id);
                drop(gone);
                me.check_idle();
            }
        });
        // Without memory for it `ended` is dropped, which the control plane sees.
        if let Some(connection) = Connection::new(&self.event_loop, fd, service, ended) {
            self.connections.borrow_mut().insert(id, connection.clone());
            connection.start();
        }
    }

    fn stop_connections(&self) {
        self.all_connections().iter().for_each(|connection| connection.stop());
    }

    /// Returns copies, because a connection may end during the caller's iteration and be removed
    /// from the map.
    fn all_connections(&self) -> Vec<Rc<Connection>> {
        self.connections.borrow().values().cloned().collect()
    }

    fn check_idle(&self) {
        if self.connections.borrow().is_empty()
            && let Some(idle) = self.idle.take()
        {
            idle();
        }
    }

    fn flush(&self, answer: oneshot::Sender<Result<(), Errno>>) {
        let writable = (!self.read_only).then_some(&self.channel);
        flush(writable.into_iter(), Box::new(move |result| answer.send(result)));
    }
}
