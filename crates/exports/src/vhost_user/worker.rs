//! An export on one of its I/O threads: the device's state there, and the rings of that thread.
//!
//! A task on the thread's loop owns it and runs jobs of the control plane. It ends with the loop.

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

/// Interval at which a ring without a kick eventfd is polled, in nanoseconds.
const LOOK_NS: u64 = 250_000;

/// The control plane's handle of a [`Worker`]. Dropping it ends the worker.
pub(crate) struct WorkerHandle {
    jobs: mailbox::Sender<Job>,
    ended: oneshot::Receiver<()>,
}

/// The state on the I/O thread.
pub(crate) struct Worker {
    event_loop: EventLoop,
    device: Arc<dyn Device>,
    on_loop: OnceCell<Rc<dyn DeviceOnLoop>>,
    rings: Rc<RefCell<BTreeMap<u16, Rc<Ring>>>>,
    /// Set if the guest's memory has to be pinned.
    pinned: Option<Rc<Pinned>>,
    /// Whether the rings' writes to the guest's memory are logged.
    logging: Logging,
    log: ExportLog,
    /// New requests stay in the queues.
    paused: Rc<Cell<bool>>,
}

/// The log of an export, written by the control thread: a write to the log may wait.
#[derive(Clone)]
pub(crate) struct ExportLog {
    pub(crate) control: LoopHandle,
    /// The export's name in messages.
    pub(crate) id: Arc<str>,
}

impl ExportLog {
    fn warn(&self, text: String) {
        let id = self.id.clone();
        // Without a control loop the program ends, and the line is lost.
        let _ = self.control.spawn(move |_| log::warn!("export {id}: {text}"));
    }
}

/// Signals of a ring to the front end. Prepared elsewhere, since an I/O thread must not create rings.
pub(crate) struct RingSignals {
    /// For used buffers.
    pub(crate) call: Option<Signal>,
    /// For a broken ring.
    pub(crate) err: Option<Signal>,
}

/// A running ring.
pub(crate) struct Ring {
    pub(crate) queue: Rc<dyn Virtqueue>,
    /// The front end has enabled it.
    enabled: Cell<bool>,
    /// All rings of the worker are paused.
    paused: Rc<Cell<bool>>,
}

impl Ring {
    fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
        self.queue.set_enabled(enabled && !self.paused.get());
    }
}

impl WorkerHandle {
    /// Starts a worker on a loop.
    ///
    /// # Errors
    ///
    /// The loop has ended.
    pub(crate) fn spawn(
        io_thread: &LoopHandle,
        device: Arc<dyn Device>,
        pinning: Option<Arc<Pinning>>,
        log: ExportLog,
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
                log,
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

    /// Ends the worker, and waits until it has dropped the device.
    pub(crate) async fn end(self) {
        drop(self.jobs);
        // A worker ends with its loop.
        let _ = self.ended.await;
    }

    /// Runs `job` on the worker's thread. The job answers through its sender, possibly after it has
    /// returned. Jobs start in the order of the calls.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Worker, oneshot::Sender<R>) + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (sender, receiver) = oneshot::channel();
        // A job that cannot be sent is dropped with its sender, which fails the receiver.
        let _ = self.jobs.send(Box::new(move |worker| job(worker, sender)));
        receiver
    }
}

/// Returns the requests in flight of all workers, with the numbers of their queues.
pub(crate) fn in_flight_of(
    workers: &[WorkerHandle],
) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
    let asked: Vec<_> = workers.iter().map(|worker| worker.ask(Worker::in_flight)).collect();
    async move {
        let mut all = Vec::new();
        for answer in asked {
            // A loop that has ended has none.
            all.extend(answer.await.unwrap_or_default());
        }
        all
    }
}

/// Makes all workers leave new requests in the queues, or take them again.
pub(crate) fn set_all_paused(
    workers: &[WorkerHandle],
    paused: bool,
) -> impl Future<Output = ()> + use<> {
    let set = |worker: &WorkerHandle| {
        worker.ask(move |worker, answer| {
            worker.set_paused(paused);
            answer.send(());
        })
    };
    let asked: Vec<_> = workers.iter().map(set).collect();
    async move {
        for answer in asked {
            // A loop that has ended takes no requests.
            let _ = answer.await;
        }
    }
}

impl Worker {
    /// Prepares the device for this loop.
    pub(crate) fn attach(&self) -> io::Result<()> {
        let on_loop = self.device.clone().attach(&self.event_loop)?;
        // Called once, when the export starts.
        let _ = self.on_loop.set(on_loop);
        Ok(())
    }

    /// Starts a ring with these `signals`. Repeats the requests of the `inflight` record.
    pub(crate) fn start(
        &self,
        index: u16,
        setup: RingSetup,
        signals: RingSignals,
        memory: Arc<GuestMemory>,
        inflight: Option<InflightArea>,
    ) -> Result<(), QueueError> {
        // An export whose device could not be attached does not start.
        let Some(on_loop) = self.on_loop.get() else { return Err(QueueError::Broken) };
        let inflight = inflight.map(|inflight| inflight.of_ring(index)).transpose()?;
        let inflight = match setup {
            RingSetup { is_new: true, .. } => inflight.map(Inflight::of_a_new_driver),
            RingSetup { was_stopped: true, .. } => inflight.map(Inflight::of_a_stopped_queue),
            _ => inflight,
        };
        let queue = Queue::with_inflight(self.view(memory), setup.config, inflight)?;
        let has_kick = setup.kick.is_some();
        let queue = on_loop.start_queue(index, queue, fd_of(&setup.kick), signals.call);
        queue.set_err(signals.err);
        let log = self.log.clone();
        queue.set_report(Rc::new(move |text| log.warn(text)));
        queue.set_used_log(setup.used_log);
        let ring = Rc::new(Ring { queue, enabled: Cell::new(false), paused: self.paused.clone() });
        if !has_kick {
            self.event_loop.spawn(look_now_and_then(self.event_loop.clone(), Rc::downgrade(&ring)));
        }
        ring.set_enabled(setup.enabled);
        self.rings.borrow_mut().insert(index, ring);
        Ok(())
    }

    /// Stops a ring. The answer is its base, once nothing is in flight. There is none if the stop is
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
                // Before the answer: its receiver may unmap memory and check open files.
                drop(ring);
                answer.send(base);
            }
        });
    }

    /// Cancels the stop of a ring. `false`: it has stopped, or cannot be kept from it.
    pub(crate) fn call_back(&self, index: u16, enabled: bool) -> bool {
        let Some(ring) = self.ring(index) else { return false };
        let is_back = ring.queue.call_back();
        if is_back {
            ring.set_enabled(enabled);
        }
        is_back
    }

    /// Continues all rings in new memory. The error names the ring that cannot.
    pub(crate) fn replace_memory(
        &self,
        memory: &Arc<GuestMemory>,
    ) -> Result<(), (u16, QueueError)> {
        if let Some(pinned) = &self.pinned {
            // A registration in progress would put the rings back into the old memory.
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

    /// Starts or stops logging the rings' writes that end from now on.
    pub(crate) fn set_log(&self, log: Option<Arc<DirtyLog>>, notify: Option<Signal>) {
        let told = |notify: Signal| Rc::new(move || notify.send()) as Rc<dyn Fn()>;
        self.logging.set_notify(notify.map(told));
        self.logging.set(log);
    }

    /// Sets where a running ring logs writes to its used ring.
    pub(crate) fn set_used_log(&self, index: u16, addr: Option<u64>) {
        if let Some(ring) = self.ring(index) {
            ring.queue.set_used_log(addr);
        }
    }

    /// Pins memory once it is populated, if pinning is on.
    pub(crate) fn pin_memory(&self, memory: Arc<GuestMemory>, populated: oneshot::Receiver<()>) {
        if let Some(pinned) = &self.pinned {
            pinned.clone().register(memory, populated);
        }
    }

    /// Unpins memory that does not belong to `memory`. No ring runs.
    pub(crate) fn unpin_all_but(&self, memory: Arc<GuestMemory>, done: oneshot::Sender<()>) {
        match &self.pinned {
            Some(pinned) => pinned.clone().retain(memory, done),
            None => done.send(()),
        }
    }

    /// Sets the call signal of a running ring, and sends it.
    pub(crate) fn set_call(&self, index: u16, call: Option<Signal>) {
        if let Some(ring) = self.ring(index) {
            ring.queue.set_call(call);
        } else if let Some(call) = call {
            call.send();
        }
    }

    /// Sets the err signal of a running ring.
    pub(crate) fn set_err(&self, index: u16, err: Option<Signal>) {
        if let Some(ring) = self.ring(index) {
            ring.queue.set_err(err);
        }
    }

    /// Enables or disables a running ring.
    pub(crate) fn set_enabled(&self, index: u16, enabled: bool) {
        if let Some(ring) = self.ring(index) {
            ring.set_enabled(enabled);
        }
    }

    /// Makes all rings leave requests in the queue, or take them again.
    pub(crate) fn set_paused(&self, paused: bool) {
        if self.paused.replace(paused) == paused {
            return;
        }
        let rings: Vec<_> = self.rings.borrow().values().cloned().collect();
        rings.iter().for_each(|ring| ring.set_enabled(ring.enabled.get()));
    }

    /// The requests in flight with the indexes of their rings.
    pub(crate) fn in_flight(&self, answer: oneshot::Sender<Vec<(u64, InFlight)>>) {
        let rings = self.rings.borrow();
        let of = |(index, ring): (&u16, &Rc<Ring>)| {
            let index = u64::from(*index);
            ring.queue.in_flight().into_iter().map(move |request| (index, request))
        };
        answer.send(rings.iter().flat_map(of).collect());
    }

    /// Makes answered writes durable.
    pub(crate) fn flush(&self, answer: oneshot::Sender<Result<(), Errno>>) {
        match self.on_loop.get() {
            Some(on_loop) => on_loop.flush(Box::new(move |result| answer.send(result))),
            None => answer.send(Ok(())),
        }
    }

    /// Ends the borrow, since a ring may take and answer requests when it is enabled.
    fn ring(&self, index: u16) -> Option<Rc<Ring>> {
        self.rings.borrow().get(&index).cloned()
    }
}

fn fd_of(eventfd: &Option<EventFd>) -> Option<Arc<OwnedFd>> {
    eventfd.as_ref().map(|eventfd| eventfd.fd().clone())
}

/// Polls a ring without kicks until the ring is stopped.
async fn look_now_and_then(event_loop: EventLoop, ring: Weak<Ring>) {
    loop {
        event_loop.sleep_until(event_loop.now_ns() + LOOK_NS).await;
        let Some(ring) = ring.upgrade() else { return };
        if ring.enabled.get() {
            ring.set_enabled(true);
        }
    }
}
