//! An export, for the control plane.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use block::node::{BlockNode, Watcher};
use event_loop::{EventLoop, LoopHandle, mailbox, oneshot};
use nix::errno::Errno;
use stats::InFlight;
use stats::QueueStats;

use super::FileAttributes;
use super::connection::{Connection, Event, Service, Size};
use crate::vhost_user::ExportError;

type Job = Box<dyn FnOnce(&Rc<Connection>) + Send>;

/// The options of `--export type=fuse`, for a file that is mounted.
pub struct FuseConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `node-name`.
    pub node: Arc<dyn BlockNode>,
    /// `iothread`: at least one.
    pub io_threads: Vec<LoopHandle>,
    /// A `/dev/fuse` descriptor of the mount for each thread, non-blocking.
    pub devices: Vec<OwnedFd>,
    /// The file.
    pub file: FileAttributes,
    /// `writethrough`: written data is durable before the answer.
    pub writethrough: bool,
    /// Changes the node's size. Called on the control loop.
    pub resize: Rc<dyn Fn(Resize)>,
}

/// An order to change the node's size.
pub struct Resize {
    /// The new size in bytes.
    pub size: u64,
    /// Receives the result.
    pub answer: oneshot::Sender<Result<(), Errno>>,
}

/// A running export. Takes no request until [`resume`](Self::resume).
pub struct FuseExport {
    io_threads: Vec<LoopHandle>,
    workers: Vec<Worker>,
    stats: Vec<Arc<QueueStats>>,
    file: Arc<FileAttributes>,
    /// Descriptors of the mount, for a handover.
    devices: Vec<Arc<OwnedFd>>,
    waiting: Rc<RefCell<Vec<Waker>>>,
}

/// The control plane's handle of a connection. Dropping it ends the connection.
struct Worker {
    jobs: Arc<mailbox::Sender<Job>>,
    gone: Cell<Option<oneshot::Receiver<()>>>,
}

impl FuseExport {
    /// Starts an export on its threads.
    ///
    /// # Errors
    ///
    /// The node cannot be used from one of the threads, or memory is short.
    pub async fn start(event_loop: &EventLoop, config: FuseConfig) -> Result<Self, ExportError> {
        let FuseConfig { id, node, io_threads, devices, file, writethrough, resize } = config;
        if io_threads.is_empty() || io_threads.len() != devices.len() {
            return Err(ExportError::Config("an export needs a descriptor for each thread".into()));
        }
        let (events, mut told) = mailbox::channel();
        let (events, file) = (Arc::new(events), Arc::new(file));
        let devices: Vec<_> = devices.into_iter().map(Arc::new).collect();
        let (mut workers, mut stats) = (Vec::new(), Vec::new());
        for (io_thread, device) in io_threads.iter().zip(&devices) {
            let of_thread = Arc::new(QueueStats::default());
            let service = Service {
                device: device.clone(),
                node: node.clone(),
                file: file.clone(),
                writethrough,
                stats: of_thread.clone(),
                events: events.clone(),
            };
            let failed = |error| ExportError::Attach { io_thread: io_thread.name().into(), error };
            match Worker::spawn(io_thread, service).await.and_then(|made| made.map_err(failed)) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    // The caller may close the node next.
                    for worker in workers {
                        worker.end().await;
                    }
                    return Err(error);
                }
            }
            stats.push(of_thread);
        }
        drop(events);
        let (watcher, mut changes) = Watcher::new();
        node.watch(watcher);
        file.set_size(node.geometry().size);
        let (weak, attributes) = (Arc::downgrade(&node), Arc::downgrade(&file));
        event_loop.spawn(async move {
            while changes.next().await.is_some() {
                let (Some(node), Some(file)) = (weak.upgrade(), attributes.upgrade()) else {
                    return;
                };
                file.set_size(node.geometry().size);
            }
        });
        let waiting = Rc::<RefCell<Vec<Waker>>>::default();
        let (wakers, attributes) = (waiting.clone(), file.clone());
        // Weak: the task ends after the workers, when the node has to be free already.
        let node = Arc::downgrade(&node);
        event_loop.spawn(async move {
            let mut is_gone = false;
            while let Some(event) = told.receive().await {
                match event {
                    Event::Resize(size, answer) => {
                        let Some(node) = node.upgrade() else {
                            answer.send(Err(Errno::EIO));
                            continue;
                        };
                        // One after the other: a grow for one request must not undo that of another.
                        let resized = match size {
                            Size::AtLeast(size) if node.geometry().size >= size => Ok(()),
                            Size::AtLeast(size) | Size::Exactly(size) => {
                                let (done, resized) = oneshot::channel();
                                resize(Resize { size, answer: done });
                                resized.await.unwrap_or(Err(Errno::EIO))
                            }
                        };
                        // Before the request is judged again.
                        attributes.set_size(node.geometry().size);
                        answer.send(resized);
                    }
                    Event::Closed => wakers.take().into_iter().for_each(Waker::wake),
                    Event::Gone(why) => {
                        if std::mem::replace(&mut is_gone, true) {
                            continue;
                        }
                        match why {
                            None => log::info!("export {id}: the file is unmounted"),
                            Some(errno) => log::error!(
                                "export {id}: reading /dev/fuse failed: {}; the file is dead",
                                errno.desc()
                            ),
                        }
                    }
                }
            }
        });
        Ok(FuseExport { io_threads, workers, stats, file, devices, waiting })
    }

    /// Returns the file.
    pub fn file(&self) -> &FileAttributes {
        &self.file
    }

    /// Returns the file, for a task that outlives the borrow of the export.
    pub fn shared_file(&self) -> Arc<FileAttributes> {
        self.file.clone()
    }

    /// Returns whether the file is open.
    pub fn is_connected(&self) -> bool {
        self.file.opens() > 0
    }

    /// Completes when the file is closed everywhere.
    pub fn closed(&self) -> impl Future<Output = ()> + use<> {
        let (file, waiting) = (self.file.clone(), self.waiting.clone());
        poll_fn(move |cx| {
            if file.opens() == 0 {
                return Poll::Ready(());
            }
            waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
    }

    /// Returns the counters of each thread.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// Returns the counters of each thread, in the order of the options.
    pub fn queues(&self) -> impl Iterator<Item = (usize, &LoopHandle, &Arc<QueueStats>)> {
        let threads = self.io_threads.iter().zip(&self.stats).enumerate();
        threads.map(|(number, (thread, stats))| (number, thread, stats))
    }

    /// Returns the requests in flight with the numbers of their threads.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        let asked = self.ask(|connection, answer| answer.send(connection.in_flight()));
        async move {
            let mut all = Vec::new();
            for (number, answer) in (0..).zip(asked) {
                // Once its loop has ended, a thread has no requests.
                let in_flight = answer.await.unwrap_or_default();
                all.extend(in_flight.into_iter().map(|request| (number, request)));
            }
            all
        }
    }

    /// Takes requests from now on.
    pub fn resume(&self) {
        for worker in &self.workers {
            // Once its loop has ended, a thread serves nothing.
            let _ = worker.jobs.send(Box::new(|connection| connection.resume()));
        }
    }

    /// Takes no more requests, and completes when none is in flight.
    ///
    /// With `flush`, makes written data durable.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub fn pause(&self, flush: bool) -> impl Future<Output = Result<(), String>> + use<> {
        let paused = self.ask(|connection, answer| {
            let quiet = connection.pause();
            let end = connection.clone();
            connection.spawn(async move {
                // A resume drops the sender.
                let _ = quiet.await;
                drop(end);
                answer.send(());
            });
        });
        let flushed = flush.then(|| self.senders());
        async move {
            for answer in paused {
                answer.await.map_err(|gone| gone.to_string())?;
            }
            match flushed {
                Some(flushed) => flushed.await,
                None => Ok(()),
            }
        }
    }

    /// Makes written data durable while requests are served.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub fn flush(&self) -> impl Future<Output = Result<(), String>> + use<> {
        self.senders()
    }

    /// Returns a future that asks all threads to flush at its first poll.
    fn senders(&self) -> impl Future<Output = Result<(), String>> + use<> {
        let asks: Vec<_> = self.workers.iter().map(|worker| worker.jobs.clone()).collect();
        async move {
            let ask = |jobs: &Arc<mailbox::Sender<Job>>| ask(jobs, |me, answer| me.flush(answer));
            let asked: Vec<_> = asks.iter().map(ask).collect();
            for answer in asked {
                let flushed = answer.await.map_err(|gone| gone.to_string())?;
                flushed.map_err(|errno| errno.desc().to_owned())?;
            }
            Ok(())
        }
    }

    /// Returns descriptors of the mount, one for each thread.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        self.devices.iter().map(|device| device.try_clone()).collect()
    }

    /// Finishes requests, calls `on_quiet`, flushes, and closes the mount.
    ///
    /// An unmounted file is gone then; open files fail with `ENOTCONN`.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub async fn stop_telling(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        let paused = self.pause(false).await;
        if paused.is_ok() {
            on_quiet();
        }
        let asked = self.ask(|connection, answer| connection.flush(answer));
        let mut result = Ok(());
        for answer in asked {
            match answer.await {
                Ok(Ok(())) => {}
                Ok(Err(errno)) => result = Err(ExportError::Flush(errno.into())),
                Err(gone) => result = Err(gone.into()),
            }
        }
        for worker in self.workers {
            worker.end().await;
        }
        result
    }

    fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Rc<Connection>, oneshot::Sender<R>) + Copy + Send + 'static,
    ) -> Vec<oneshot::Receiver<R>> {
        self.workers.iter().map(|worker| ask(&worker.jobs, job)).collect()
    }
}

fn ask<R: Send + 'static>(
    jobs: &mailbox::Sender<Job>,
    job: impl FnOnce(&Rc<Connection>, oneshot::Sender<R>) + Send + 'static,
) -> oneshot::Receiver<R> {
    let (sender, receiver) = oneshot::channel();
    // A job that cannot be sent is dropped with its sender, which fails the receiver.
    let _ = jobs.send(Box::new(move |connection| job(connection, sender)));
    receiver
}

impl Worker {
    async fn spawn(
        io_thread: &LoopHandle,
        service: Service,
    ) -> Result<io::Result<Self>, ExportError> {
        let (jobs, mut receiver) = mailbox::channel::<Job>();
        let (answer, opened) = oneshot::channel();
        let (is_gone, gone) = oneshot::channel::<()>();
        io_thread.spawn(move |event_loop| {
            let connection = match Connection::new(event_loop, service) {
                Ok(connection) => connection,
                Err(error) => return answer.send(Err(error)),
            };
            answer.send(Ok(()));
            event_loop.spawn(async move {
                while let Some(job) = receiver.receive().await {
                    job(&connection);
                }
                let _ = connection.pause().await;
                connection.released().await;
                drop(connection);
                is_gone.send(());
            });
        })?;
        Ok(opened.await?.map(|()| Worker { jobs: Arc::new(jobs), gone: Cell::new(Some(gone)) }))
    }

    /// Ends the connection, and waits until it has dropped the node.
    ///
    /// The last owner of a node closes its files, which must not happen on an I/O thread.
    async fn end(self) {
        let Worker { jobs, gone } = self;
        drop(jobs);
        if let Some(gone) = gone.take() {
            let _ = gone.await;
        }
    }
}
