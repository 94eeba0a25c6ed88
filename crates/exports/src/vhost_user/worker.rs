//! An export on one of its I/O threads: the device's presence there, and the rings that run there.
//!
//! It is a task on that thread's loop, which owns all this and takes jobs from the control plane.
//! When the loop stops it goes with it.

#![forbid(unsafe_code)]

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use devices::virtio::{Held, Virtqueue};
use event_loop::{EventLoop, LoopGone, LoopHandle, Signal, mailbox, oneshot};
use guest_memory::{DirtyLog, GuestMemory, Logging, MemoryView};
use nix::errno::Errno;
use queue::{Inflight, Queue, QueueError};
use stats::InFlight;

use super::device::{Device, DeviceOnLoop};
use super::eventfd::EventFd;
use super::inflight::InflightArea;
use super::pin::Pinned;
use super::pinning::Pinning;
use super::session::RingSetup;

type Job = Box<dyn FnOnce(&Worker) + Send>;

/// How often a ring without a kick eventfd is looked at, nanoseconds.
const LOOK_NS: u64 = 250_000;

/// The control plane's way to a [`Worker`]. Dropping it ends the worker.
pub(crate) struct WorkerHandle {
    jobs: mailbox::Sender<Job>,
    ended: oneshot::Receiver<()>,
}

/// What lives on the I/O thread.
pub(crate) struct Worker {
    event_loop: EventLoop,
    device: Arc<dyn Device>,
    on_loop: OnceCell<Rc<dyn DeviceOnLoop>>,
    rings: Rc<RefCell<BTreeMap<u16, Rc<Ring>>>>,
    /// The guest's memory is to be pinned.
    pinned: Option<Rc<Pinned>>,
    /// Whether the rings' writes to the guest's memory are logged.
    logging: Logging,
    /// Requests stay in the queues.
    paused: Rc<Cell<bool>>,
}

/// The ways to signal the front end about a ring: made beside the I/O thread, which may make no rings.
pub(crate) struct RingSignals {
    /// There are used buffers.
    pub(crate) call: Option<Signal>,
    /// The ring broke.
    pub(crate) err: Option<Signal>,
}

/// A ring that runs here.
pub(crate) struct Ring {
    pub(crate) queue: Rc<dyn Virtqueue>,
    /// By the front end.
    enabled: Cell<bool>,
    /// All rings of the worker are.
    paused: Rc<Cell<bool>>,
}

impl Ring {
    fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
        self.queue.set_enabled(enabled && !self.paused.get());
    }
}

impl WorkerHandle {
    /// Puts a worker on a loop.
    ///
    /// # Errors
    ///
    /// The loop is gone.
    pub(crate) fn spawn(
        io_thread: &LoopHandle,
        device: Arc<dyn Device>,
        pinning: Option<Arc<Pinning>>,
    ) -> Result<Self, LoopGone> {
        let (jobs, mut receiver) = mailbox::channel::<Job>();
        let (end, ended) = oneshot::channel();
        io_thread.spawn(move |event_loop| {
            let rings = Rc::<RefCell<_>>::default();
            let logging = Logging::new();
            let pinned = pinning.map(|pinning| {
                Pinned::new(event_loop.clone(), pinning, logging.clone(), rings.clone())
            });
            let worker = Worker {
                event_loop: event_loop.clone(),
                device,
                on_loop: OnceCell::new(),
                rings,
                pinned,
                logging,
                paused: Rc::default(),
            };
            event_loop.spawn(async move {
                while let Some(job) = receiver.receive().await {
                    job(&worker);
                }
                drop(worker);
                end.send(());
            });
        })?;
        Ok(WorkerHandle { jobs, ended })
    }

    /// Ends the worker, and waits until it has let go of the device.
    pub(crate) async fn end(self) {
        drop(self.jobs);
        // A worker whose loop is gone is gone with it.
        let _ = self.ended.await;
    }

    /// Has `job` done on the worker's thread. The answer comes when the job gives it, maybe later
    /// than it returns. Jobs are begun in the order they were given.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Worker, oneshot::Sender<R>) + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (sender, receiver) = oneshot::channel();
        // A job that cannot be sent is dropped, its sender with it; the receiver then says so.
        let _ = self.jobs.send(Box::new(move |worker| job(worker, sender)));
        receiver
    }
}

impl Worker {
    /// Gets the device ready for this loop.
    pub(crate) fn attach(&self) -> io::Result<()> {
        let on_loop = self.device.clone().attach(&self.event_loop)?;
        // Asked for once, when the export starts.
        let _ = self.on_loop.set(on_loop);
        Ok(())
    }

    /// Starts a ring, which is to signal by `signals`. What `inflight` says is in flight is done again.
    pub(crate) fn start(
        &self,
        index: u16,
        setup: RingSetup,
        signals: RingSignals,
        memory: Arc<GuestMemory>,
        inflight: Option<InflightArea>,
    ) -> Result<(), QueueError> {
        // An export whose device could not attach does not start.
        let Some(on_loop) = self.on_loop.get() else { return Err(QueueError::Broken) };
        let inflight = inflight.map(|inflight| inflight.of_ring(index)).transpose()?;
        let inflight = match setup.was_stopped {
            true => inflight.map(Inflight::of_a_stopped_queue),
            false => inflight,
        };
        let queue = Queue::with_inflight(self.view(memory), setup.config, inflight)?;
        let has_kick = setup.kick.is_some();
        let queue = on_loop.start_queue(index, queue, fd_of(&setup.kick), signals.call);
        queue.set_err(signals.err);
        queue.set_used_log(setup.used_log);
        let ring = Rc::new(Ring { queue, enabled: Cell::new(false), paused: self.paused.clone() });
        if !has_kick {
            self.event_loop.spawn(look_now_and_then(self.event_loop.clone(), Rc::downgrade(&ring)));
        }
        ring.set_enabled(setup.enabled);
        self.rings.borrow_mut().insert(index, ring);
        Ok(())
    }

    /// Stops a ring. The answer is its base, once what was in flight is done; there is none when the stop is
    /// [called back](Self::call_back).
    pub(crate) fn stop(&self, index: u16, held: Held, answer: oneshot::Sender<u16>) {
        let Some(ring) = self.ring(index) else { return };
        ring.enabled.set(false);
        let (sender, stopped) = oneshot::channel();
        ring.queue.stop(held, Box::new(move |base| sender.send(base)));
        let rings = self.rings.clone();
        self.event_loop.spawn(async move {
            if let Ok(base) = stopped.await {
                rings.borrow_mut().remove(&index);
                // Before the answer: whoever gets it may unmap, and look for what is left open.
                drop(ring);
                answer.send(base);
            }
        });
    }

    /// Has a ring that is to stop go on. `false`: it has stopped, or will.
    pub(crate) fn call_back(&self, index: u16, enabled: bool) -> bool {
        let Some(ring) = self.ring(index) else { return false };
        let is_back = ring.queue.call_back();
        if is_back {
            ring.set_enabled(enabled);
        }
        is_back
    }

    /// Goes on in new memory with all rings. The error names the ring that cannot.
    pub(crate) fn replace_memory(
        &self,
        memory: &Arc<GuestMemory>,
    ) -> Result<(), (u16, QueueError)> {
        if let Some(pinned) = &self.pinned {
            // It would have the rings go on in the memory that it was told of.
            pinned.interrupt();
        }
        for (&index, ring) in self.rings.borrow().iter() {
            let view = self.view(memory.clone());
            ring.queue.replace_memory(view).map_err(|error| (index, error))?;
        }
        Ok(())
    }

    fn view(&self, memory: Arc<GuestMemory>) -> Rc<MemoryView> {
        match &self.pinned {
            Some(pinned) => pinned.view(memory),
            None => MemoryView::with_logging(memory, &[], self.logging.clone()),
        }
    }

    /// Has the rings' writes that end from now on logged, or not any more.
    pub(crate) fn set_log(&self, log: Option<Arc<DirtyLog>>, notify: Option<Signal>) {
        let told = |notify: Signal| Rc::new(move || notify.send()) as Rc<dyn Fn()>;
        self.logging.set_notify(notify.map(told));
        self.logging.set(log);
    }

    /// Sets where a ring that runs logs writes to its used ring.
    pub(crate) fn set_used_log(&self, index: u16, addr: Option<u64>) {
        if let Some(ring) = self.ring(index) {
            ring.queue.set_used_log(addr);
        }
    }

    /// Pins memory, once it is populated, if that is wanted.
    pub(crate) fn pin_memory(&self, memory: Arc<GuestMemory>, populated: oneshot::Receiver<()>) {
        if let Some(pinned) = &self.pinned {
            pinned.clone().register(memory, populated);
        }
    }

    /// Unpins what is not part of `memory`. No ring runs.
    pub(crate) fn unpin_all_but(&self, memory: Arc<GuestMemory>, done: oneshot::Sender<()>) {
        match &self.pinned {
            Some(pinned) => pinned.clone().retain(memory, done),
            None => done.send(()),
        }
    }

    /// Sets the way to the call eventfd of a ring that runs, and signals it.
    pub(crate) fn set_call(&self, index: u16, call: Option<Signal>) {
        if let Some(ring) = self.ring(index) {
            ring.queue.set_call(call);
        } else if let Some(call) = call {
            call.send();
        }
    }

    /// Sets the way to the err eventfd of a ring that runs.
    pub(crate) fn set_err(&self, index: u16, err: Option<Signal>) {
        if let Some(ring) = self.ring(index) {
            ring.queue.set_err(err);
        }
    }

    /// Enables or disables a ring that runs.
    pub(crate) fn set_enabled(&self, index: u16, enabled: bool) {
        if let Some(ring) = self.ring(index) {
            ring.set_enabled(enabled);
        }
    }

    /// Has all rings leave requests in the queue, or take them again.
    pub(crate) fn set_paused(&self, paused: bool) {
        if self.paused.replace(paused) == paused {
            return;
        }
        let rings: Vec<_> = self.rings.borrow().values().cloned().collect();
        rings.iter().for_each(|ring| ring.set_enabled(ring.enabled.get()));
    }

    /// The requests in flight, with the rings that they came by.
    pub(crate) fn in_flight(&self, answer: oneshot::Sender<Vec<(u64, InFlight)>>) {
        let rings = self.rings.borrow();
        let of = |(index, ring): (&u16, &Rc<Ring>)| {
            let index = u64::from(*index);
            ring.queue.in_flight().into_iter().map(move |request| (index, request))
        };
        answer.send(rings.iter().flat_map(of).collect());
    }

    /// Makes what was answered durable.
    pub(crate) fn flush(&self, answer: oneshot::Sender<Result<(), Errno>>) {
        match self.on_loop.get() {
            Some(on_loop) => on_loop.flush(Box::new(move |result| answer.send(result))),
            None => answer.send(Ok(())),
        }
    }

    /// Out of the borrow, as a ring may take requests, and answer them, when it is enabled.
    fn ring(&self, index: u16) -> Option<Rc<Ring>> {
        self.rings.borrow().get(&index).cloned()
    }
}

fn fd_of(eventfd: &Option<EventFd>) -> Option<Arc<OwnedFd>> {
    eventfd.as_ref().map(|eventfd| eventfd.fd().clone())
}

/// Polls a ring whose driver does not kick, until it is stopped.
async fn look_now_and_then(event_loop: EventLoop, ring: Weak<Ring>) {
    loop {
        event_loop.sleep_until(event_loop.now_ns() + LOOK_NS).await;
        let Some(ring) = ring.upgrade() else { return };
        if ring.enabled.get() {
            ring.set_enabled(true);
        }
    }
}
