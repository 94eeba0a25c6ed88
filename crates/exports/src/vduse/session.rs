//! A device that is served: the kernel's messages on the control loop, and the queues on the I/O threads.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use devices::virtio::Held;
use event_loop::{EventLoop, Readiness, Signal, oneshot, until};
use guest_memory::GuestMemory;
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd as Counter};
use nix::unistd::{read, write};

use super::commands;
use super::iotlb::Iotlb;
use super::record::Record;
use super::wire::{DRIVER_OK, MESSAGE, Message, Request, queue_info};
use crate::vhost_user::EventFd;
use crate::vhost_user::device::Device;
use crate::vhost_user::inflight::InflightArea;
use crate::vhost_user::session::RingSetup;
use crate::vhost_user::worker::{RingSignals, Worker, WorkerHandle};

/// How long the kernel may take from the reply to a driver's DRIVER_OK until it delivers interrupts, in looks.
const MAX_LOOKS: u32 = 1000;
/// Time between two looks, nanoseconds.
const LOOK_NS: u64 = 1_000_000;

pub(super) struct Session {
    /// The export's name in messages.
    pub(super) id: Arc<str>,
    pub(super) event_loop: EventLoop,
    /// The device's file.
    pub(super) file: Arc<OwnedFd>,
    pub(super) device: Arc<dyn Device>,
    /// Queue i runs on worker i modulo their number.
    pub(super) workers: Vec<WorkerHandle>,
    pub(super) queue_size: u16,
    pub(super) record: Record,
    pub(super) iotlb: Iotlb,
    /// The queues that run.
    pub(super) running: RefCell<BTreeSet<u16>>,
}

/// What a driver has set up for all queues.
struct Driver {
    features: u64,
    memory: Arc<GuestMemory>,
    record: InflightArea,
}

fn failed(what: &str, errno: Errno) -> String {
    format!("{what} failed: {}", errno.desc())
}

impl Session {
    /// Whether a driver uses the device.
    pub(super) fn is_used(&self) -> bool {
        !self.running.borrow().is_empty()
    }

    /// Continues with a driver that an earlier process served, if there is one. Messages that the earlier process has not
    /// answered come first: the driver may have reset the device.
    pub(super) async fn adopt(&self) -> Result<(), String> {
        while let Some(message) = self.receive()? {
            self.handle(message).await;
        }
        if self.is_used() || commands::signal_queue(&self.file, 0) == Err(Errno::EINVAL) {
            return Ok(());
        }
        self.start().await?;
        self.enable();
        Ok(())
    }

    /// Handles messages until `end`.
    pub(super) async fn serve(self: Rc<Self>, readiness: Readiness, end: oneshot::Receiver<()>) {
        let served = until(self.messages(&readiness), end).await;
        if let Ok(why) = served {
            log::error!("export {}: {why}; the device is not served any more", self.id);
        }
        readiness.release().await;
    }

    /// Handles messages until that is impossible. Returns why it is.
    async fn messages(&self, readiness: &Readiness) -> String {
        loop {
            match self.receive() {
                Ok(Some(message)) => self.handle(message).await,
                Ok(None) => readiness.wait().await,
                Err(why) => return why,
            }
        }
    }

    /// Reads a message, if there is one.
    fn receive(&self) -> Result<Option<Message>, String> {
        let mut bytes = [0; MESSAGE];
        loop {
            return match read(&*self.file, &mut bytes) {
                Ok(MESSAGE) => Ok(Some(Message::parse(&bytes))),
                Ok(len) => Err(format!("a message of {len} bytes from VDUSE")),
                Err(Errno::EAGAIN) => Ok(None),
                Err(Errno::EINTR) => continue,
                Err(errno) => Err(format!("reading messages of VDUSE failed: {}", errno.desc())),
            };
        }
    }

    async fn handle(&self, message: Message) {
        let id = &self.id;
        match message.request {
            Request::SetStatus(0) => {
                self.stop(Held::Failed).await;
                self.device.reset();
                if let Err(error) = self.record.clear() {
                    log::warn!("export {id}: the record of requests in flight: {error}");
                }
                self.reply(message, Some(0));
            }
            Request::SetStatus(status) if status & DRIVER_OK != 0 && !self.is_used() => {
                let started = self.start().await;
                self.reply(message, started.is_ok().then_some(0));
                match started {
                    Ok(()) => {
                        self.see_driver().await;
                        self.enable();
                    }
                    Err(why) => log::error!("export {id}: the driver cannot be served: {why}"),
                }
            }
            Request::SetStatus(_) => self.reply(message, Some(0)),
            Request::QueueState { index } => {
                let state = match u16::try_from(index) {
                    Ok(index) => self.state(index).await,
                    Err(_) => Err("there is no such queue".to_owned()),
                };
                if let Err(why) = &state {
                    log::warn!("export {id}: the state of queue {index}: {why}");
                }
                self.reply(message, state.ok());
            }
            Request::UpdateIotlb => {
                self.update_memory().await;
                self.reply(message, Some(0));
            }
            Request::Unknown(kind) => {
                log::warn!("export {id}: unknown message {kind} of VDUSE");
                self.reply(message, None);
            }
        }
    }

    fn reply(&self, message: Message, state: Option<u16>) {
        if let Err(errno) = write(&*self.file, &message.reply(state)) {
            // The kernel waits for a limited time.
            log::warn!("export {}: {message:?} was answered too late: {}", self.id, errno.desc());
        }
    }

    /// Starts the queues that the driver has set up, disabled.
    async fn start(&self) -> Result<(), String> {
        let started = self.try_start().await;
        if started.is_err() {
            self.stop(Held::Left).await;
        }
        started
    }

    async fn try_start(&self) -> Result<(), String> {
        let driver = self.driver()?;
        for index in 0..self.device.num_queues() {
            self.start_queue(index, &driver).await?;
        }
        Ok(())
    }

    /// Takes what the driver has set up for all queues.
    fn driver(&self) -> Result<Driver, String> {
        let features = commands::features(&self.file);
        let features = features.map_err(|errno| failed("VDUSE_DEV_GET_FEATURES", errno))?;
        self.device.set_features(features & self.device.features());
        let memory = self.iotlb.map().map_err(|error| format!("its memory: {error}"))?;
        let record = self.record.map().map_err(|why| format!("the record of requests: {why}"))?;
        Ok(Driver { features, memory, record })
    }

    /// Starts a queue, disabled, if the driver has set it up.
    async fn start_queue(&self, index: u16, driver: &Driver) -> Result<(), String> {
        let info = commands::queue_info(&self.file, index);
        let info = info.map_err(|errno| failed("VDUSE_VQ_GET_INFO", errno))?;
        let config = queue_info(&info, index, driver.features, self.queue_size);
        let Some(config) = config.map_err(|error| error.to_string())? else { return Ok(()) };
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let kick = Counter::from_flags(flags).map_err(|errno| failed("eventfd", errno))?;
        let kick = EventFd::new(kick.into()).map_err(|error| error.to_string())?;
        commands::set_kick(&self.file, index, Some(kick.fd()))
            .map_err(|errno| failed("VDUSE_VQ_SETUP_KICKFD", errno))?;
        let call = Signal::by_call(self.file.clone(), move |file| {
            // A failure: the driver is gone.
            let _ = commands::signal_queue(file, index);
        });
        let setup = RingSetup {
            config,
            was_stopped: false,
            is_new: false,
            kick: Some(kick),
            call: None,
            err: None,
            enabled: false,
            used_log: None,
        };
        let signals = RingSignals { call: Some(call), err: None };
        let (memory, record) = (driver.memory.clone(), driver.record.clone());
        let start = move |worker: &Worker, answer: oneshot::Sender<_>| {
            answer.send(worker.start(index, setup, signals, memory, Some(record)));
        };
        let started = self.worker(index).ask(start).await.map_err(|gone| gone.to_string())?;
        started.map_err(|error| format!("queue {index}: {}", error.in_full()))?;
        self.running.borrow_mut().insert(index);
        Ok(())
    }

    /// Waits until the kernel has marked the driver as ready. Signals before that are lost.
    async fn see_driver(&self) {
        let Some(index) = self.running.borrow().first().copied() else { return };
        for _ in 0..MAX_LOOKS {
            if commands::signal_queue(&self.file, index) != Err(Errno::EINVAL) {
                return;
            }
            self.event_loop.sleep_until(self.event_loop.now_ns() + LOOK_NS).await;
        }
    }

    /// Takes requests. Signals each queue: an earlier process may have ended before it did.
    fn enable(&self) {
        for &index in &*self.running.borrow() {
            self.set_enabled(index);
            let _ = commands::signal_queue(&self.file, index);
        }
    }

    fn set_enabled(&self, index: u16) {
        let asked = self.worker(index).ask(move |worker, answer| {
            worker.set_enabled(index, true);
            answer.send(());
        });
        // Nothing depends on the moment.
        drop(asked);
    }

    /// Stops all queues, with no request in flight afterwards.
    pub(super) async fn stop(&self, held: Held) {
        let indexes = std::mem::take(&mut *self.running.borrow_mut());
        let stopped: Vec<_> = indexes.iter().map(|&index| self.stop_queue(index, held)).collect();
        for (index, stopped) in indexes.iter().zip(stopped) {
            // Once its loop has ended, a thread has no requests.
            let _ = stopped.await;
            // The kernel keeps kicks for the next process.
            let _ = commands::set_kick(&self.file, *index, None);
        }
    }

    fn stop_queue(&self, index: u16, held: Held) -> oneshot::Receiver<u16> {
        self.worker(index).ask(move |worker, answer| worker.stop(index, held, answer))
    }

    /// Returns the place of the device in a queue, with no request in flight before it.
    async fn state(&self, index: u16) -> Result<u16, String> {
        if !self.running.borrow().contains(&index) {
            let info = commands::queue_info(&self.file, index);
            let info = info.map_err(|errno| errno.desc().to_owned())?;
            let config = queue_info(&info, index, 0, self.queue_size);
            return Ok(config.ok().flatten().map_or(0, |config| config.next_avail));
        }
        let base = self.stop_queue(index, Held::Failed).await.map_err(|gone| gone.to_string())?;
        self.running.borrow_mut().remove(&index);
        // The queue is served again: VDUSE cannot suspend a device.
        self.start_queue(index, &self.driver()?).await?;
        self.set_enabled(index);
        Ok(base)
    }

    /// Moves all queues to the present memory.
    async fn update_memory(&self) {
        if !self.is_used() {
            return;
        }
        let id = &self.id;
        let memory = match self.iotlb.map() {
            Ok(memory) => memory,
            Err(error) => {
                return log::error!("export {id}: the driver's new memory is unusable: {error}");
            }
        };
        let replaced: Vec<_> = self
            .workers
            .iter()
            .map(|worker| {
                let memory = memory.clone();
                worker.ask(move |worker, answer| answer.send(worker.replace_memory(&memory)))
            })
            .collect();
        for answer in replaced {
            if let Ok(Err((index, error))) = answer.await {
                log::warn!("export {id}: queue {index} in new memory: {}", error.in_full());
            }
        }
    }

    fn worker(&self, index: u16) -> &WorkerHandle {
        &self.workers[usize::from(index) % self.workers.len()]
    }
}
