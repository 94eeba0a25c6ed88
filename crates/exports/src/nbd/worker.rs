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

/// What lives on the I/O thread.
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
    /// All stand still, so requests are not to be held back below.
    paused: Cell<bool>,
    /// Waits for the last connection to end.
    idle: Cell<Option<Box<dyn FnOnce()>>>,
    /// It is to be dropped.
    ending: Cell<bool>,
    /// Its channel keeps no node alive by itself.
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
                Err(error) => return answer.send(Err(error)),
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

    /// What it has done.
    pub(super) fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Serves a client there. The answer comes at the end of it.
    pub(super) fn serve(&self, client: Client) -> oneshot::Receiver<End> {
        self.ask(move |worker, answer| worker.serve(client, answer))
    }

    /// Has all connections stand still, until they are to [go on](Self::resume); with `flush`, makes
    /// durable what was written. The answer comes when no request is under way any more: the clients
    /// that another process can go on with.
    pub(super) fn pause(&self, flush: bool) -> oneshot::Receiver<Result<Vec<SavedClient>, Errno>> {
        self.ask(move |worker, answer| {
            let (worker, connections) = (worker.clone(), worker.all_connections());
            let quiet: Vec<_> = connections.iter().map(|connection| connection.pause()).collect();
            if !worker.paused.replace(true) {
                worker.event_loop.section(|| worker.channel.drain_begin());
            }
            worker.event_loop.clone().spawn(async move {
                for quiet in quiet {
                    // One that has ended, or goes on again, does not tell.
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

    /// Makes durable what was written.
    pub(super) fn flush(&self) -> oneshot::Receiver<Result<(), Errno>> {
        self.ask(|worker, answer| worker.flush(answer))
    }

    /// All connections go on.
    pub(super) fn resume(&self) {
        let resume = |worker: &Rc<Worker>| {
            if worker.paused.replace(false) {
                worker.channel.drain_end();
            }
            worker.all_connections().iter().for_each(|connection| connection.resume());
        };
        // One whose loop is gone serves nobody.
        let _ = self.jobs.send(Box::new(resume));
    }

    /// Ends those that stand still and could not be handed over: those with TLS, and those that were
    /// ending, once they have sent what they still had to. The answer comes when they have ended.
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

    /// Drops what lives on the I/O thread, and waits for that. Whoever lets go of an image last closes it,
    /// which is not for an I/O thread: it takes files and threads that the sandbox keeps from one.
    pub(super) async fn end(&self) {
        let end = |worker: &Rc<Worker>| worker.ending.set(true);
        if self.jobs.send(Box::new(end)).is_ok()
            && let Some(gone) = self.gone.take()
        {
            // It is dropped, not sent to.
            let _ = gone.await;
        }
    }

    /// The requests in flight, with the numbers of their connections.
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

    /// The export has another size now, bytes.
    pub(super) fn resized(&self, size: u64) {
        // One whose loop is gone serves nobody.
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

    /// Out of the borrow, as one may end at once.
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
