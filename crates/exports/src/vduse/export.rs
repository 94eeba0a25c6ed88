//! An export, for the control plane.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use block::node::{BlockNode, Watcher};
use devices::virtio::Held;
use devices::virtio_blk::DeviceConfig;
use event_loop::{EventLoop, JoinHandle, LoopHandle, Readiness, oneshot};
use nix::errno::Errno;
use nix::libc;
use nix::poll::PollFlags;
use nix::unistd::{AccessFlags, access};
use stats::{InFlight, QueueStats};

use super::commands::{self, Control, errno_of};
use super::iotlb::Iotlb;
use super::record::{Made, Record};
use super::session::Session;
use super::wire::{CONFIG_WCE, CONTROL, Description, FOLDER, TRANSPORT_FEATURES};
use crate::vhost_user::ExportError;
use crate::vhost_user::MAX_QUEUES;
use crate::vhost_user::blk::Blk;
use crate::vhost_user::device::Device;
use crate::vhost_user::export::queue_stats;
use crate::vhost_user::worker::{ExportLog, WorkerHandle, in_flight_of, set_all_paused};

/// How long a device may belong to a process that is ending, nanoseconds: the kernel closes the device's file once it has
/// ended the rings of a killed process.
const TAKEN_NS: u64 = 2_000_000_000;
/// Time between two looks at such a device.
const LOOK_NS: u64 = 10_000_000;

/// The options of `--export type=vduse-blk`.
pub struct VduseConfig {
    /// `id`: its name.
    pub id: String,
    /// `node-name`.
    pub node: Arc<dyn BlockNode>,
    /// `iothread`: at least one. They get the queues in turn.
    pub io_threads: Vec<LoopHandle>,
    /// `writable`.
    pub writable: bool,
    /// `writethrough`: written data is durable before the answer.
    pub writethrough: bool,
    /// `name`: that of the device, in [`FOLDER`].
    pub name: String,
    /// `num-queues`.
    pub queues: u16,
    /// `queue-size`: the most entries of a queue.
    pub queue_size: u16,
    /// `logical-block-size`, bytes.
    pub logical_block_size: u32,
    /// `serial`, of which drivers see the first 20 bytes.
    pub serial: String,
    /// The folder of the [record](super::record_folder) of requests in flight.
    pub records: PathBuf,
}

/// Why there is no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VduseError {
    /// What failed.
    pub what: String,
    /// What to do.
    pub hint: Option<String>,
}

impl VduseError {
    fn new(what: impl Into<String>) -> Self {
        VduseError { what: what.into(), hint: None }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        VduseError { hint: Some(hint.into()), ..self }
    }

    /// Returns the error of opening [`CONTROL`].
    fn unopened(errno: Errno) -> Self {
        match errno {
            Errno::ENOENT | Errno::ENODEV | Errno::ENXIO => {
                VduseError::new(format!("there is no {CONTROL}: the kernel has no VDUSE"))
                    .hint("Load its module: modprobe vduse.")
            }
            errno => VduseError::new(format!("opening {CONTROL} failed: {}", errno.desc()))
                .hint("VDUSE devices need root, or access to the files in /dev/vduse."),
        }
    }

    /// Checks that this process can make devices, without making one.
    ///
    /// # Errors
    ///
    /// The kernel has no VDUSE, or this process may not use it.
    pub fn check_host() -> Result<(), Self> {
        access(CONTROL, AccessFlags::R_OK | AccessFlags::W_OK).map_err(Self::unopened)
    }
}

impl From<ExportError> for VduseError {
    fn from(error: ExportError) -> Self {
        VduseError::new(error.to_string())
    }
}

/// A device that is served.
pub struct VduseExport {
    name: String,
    control: Control,
    io_threads: Vec<LoopHandle>,
    stats: Arc<[Arc<QueueStats>]>,
    session: Rc<Session>,
    messages: RefCell<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

impl VduseExport {
    /// Makes the device, or continues with one that an earlier process has left. It is served from then on.
    ///
    /// With the file of a device that is handed over, the present daemon still serves the device: it is served here from
    /// [`begin`](Self::begin) on.
    ///
    /// # Errors
    ///
    /// A sentence for people, and what to do.
    pub async fn start(
        event_loop: &EventLoop,
        config: VduseConfig,
        handed_over: Option<OwnedFd>,
    ) -> Result<Self, VduseError> {
        let stats = queue_stats(config.queues, MAX_QUEUES)?;
        let model = DeviceConfig {
            geometry: config.node.geometry(),
            num_queues: config.queues,
            logical_block_size: config.logical_block_size,
            writable: config.writable,
            writethrough: config.writethrough,
            serial: config.serial.clone(),
        };
        let device = Arc::new(Blk::new(model, config.node.clone(), stats.clone())?);
        let control = Control::open().map_err(VduseError::unopened)?;
        let is_served_elsewhere = handed_over.is_some();
        let made = Made {
            features: device.features() & !CONFIG_WCE | TRANSPORT_FEATURES,
            queues: config.queues,
            queue_size: config.queue_size,
            block: config.logical_block_size,
        };
        let Found { file, record, is_new } = match handed_over {
            Some(file) => Found { record: known(&config, &made)?, file, is_new: false },
            None => find(event_loop, &control, &config, &*device, made).await?,
        };
        let file = Arc::new(file);
        let workers = match workers(event_loop, &config, device.clone()).await {
            Ok(workers) => workers,
            Err(error) => {
                drop(file);
                give_up(&control, &config.name, record, is_new);
                return Err(error.into());
            }
        };
        let session = Rc::new(Session {
            id: config.id.as_str().into(),
            event_loop: event_loop.clone(),
            iotlb: Iotlb(file.clone()),
            file,
            device,
            workers,
            queue_size: config.queue_size,
            record,
            running: RefCell::default(),
        });
        session.follow_size();
        let export = VduseExport {
            name: config.name,
            control,
            io_threads: config.io_threads,
            stats,
            session,
            messages: RefCell::default(),
        };
        if is_new {
            export.serve();
        } else if !is_served_elsewhere {
            export.begin().await?;
        }
        Ok(export)
    }

    /// Continues with the device and its driver, after [`quiesce`](Self::quiesce) or in the next process.
    ///
    /// # Errors
    ///
    /// A sentence for people. The device stays, and its requests wait.
    pub async fn begin(&self) -> Result<(), VduseError> {
        if self.messages.borrow().is_some() {
            return Ok(());
        }
        self.session.show_config();
        self.session.adopt().await.map_err(|why| {
            VduseError::new(format!("{FOLDER}/{} cannot be continued: {why}", self.name))
        })?;
        self.serve();
        Ok(())
    }

    /// Handles messages from now on.
    fn serve(&self) {
        let Session { event_loop, file, .. } = &*self.session;
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let readiness = Readiness::new(event_loop, file.clone(), events);
        let (end, ended) = oneshot::channel();
        let messages = event_loop.spawn(self.session.clone().serve(readiness, ended));
        *self.messages.borrow_mut() = Some((end, messages));
    }

    /// Handles no more messages, and finishes the requests in flight.
    async fn pause(&self) {
        let messages = self.messages.take();
        if let Some((end, ended)) = messages {
            end.send(());
            let _ = ended.await;
        }
        self.session.stop(Held::Left).await;
    }

    /// Takes no more requests, and finishes those in flight, until [`begin`](Self::begin), or for another process.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub async fn quiesce(&self, flush: bool) -> Result<(), ExportError> {
        self.pause().await;
        if flush { self.flush().await } else { Ok(()) }
    }

    /// Returns the device's file, for another process. A second process cannot open it.
    ///
    /// # Errors
    ///
    /// As of fcntl(2), `F_DUPFD`.
    pub fn hand_over(&self) -> io::Result<OwnedFd> {
        self.session.file.try_clone()
    }

    /// Returns whether a driver uses the device.
    pub fn is_connected(&self) -> bool {
        self.session.is_used()
    }

    /// Returns the counters of each queue.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// Returns the counters of each queue, with its thread.
    pub fn queues(&self) -> Vec<(usize, LoopHandle, Arc<QueueStats>)> {
        let queues = self.io_threads.iter().cycle().zip(&*self.stats).enumerate();
        queues.map(|(number, (thread, stats))| (number, thread.clone(), stats.clone())).collect()
    }

    /// Returns the requests in flight with the numbers of their queues.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        in_flight_of(&self.session.workers)
    }

    /// Leaves new requests in the queues, or takes them again. Requests in flight continue.
    pub fn set_paused(&self, paused: bool) -> impl Future<Output = ()> + use<> {
        set_all_paused(&self.session.workers, paused)
    }

    /// Makes written data durable while requests are served.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub fn flush(&self) -> impl Future<Output = Result<(), ExportError>> + use<> {
        let flush = |worker: &WorkerHandle| worker.ask(|worker, answer| worker.flush(answer));
        let asked: Vec<_> = self.session.workers.iter().map(flush).collect();
        async move {
            for answer in asked {
                answer.await?.map_err(|errno| ExportError::Flush(errno.into()))?;
            }
            Ok(())
        }
    }

    /// Takes no more requests, finishes those in flight, calls `on_quiet`, and flushes. Removes the device.
    ///
    /// A device on the vDPA bus stays: its requests wait for the next daemon.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub async fn stop_telling(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        self.pause().await;
        on_quiet();
        let flushed = self.flush().await;
        let VduseExport { name, control, session, .. } = self;
        let Some(Session { id, file, workers, record, iotlb, .. }) = Rc::into_inner(session) else {
            // A change of the size is being told; the device stays.
            return flushed;
        };
        for worker in workers {
            worker.end().await;
        }
        drop((iotlb, file));
        match control.destroy(&name) {
            Ok(()) => record.remove(),
            Err(Errno::EBUSY) => log::warn!(
                "export {id}: {FOLDER}/{name} is on the vDPA bus and stays; its requests wait for a daemon with name={name}"
            ),
            Err(errno) => {
                log::error!("export {id}: removing {FOLDER}/{name} failed: {}", errno.desc());
            }
        }
        flushed
    }
}

impl Session {
    /// Sets the configuration space that the kernel shows to the driver, and notifies the driver.
    fn show_config(&self) {
        let set = commands::set_config(&self.file, &self.device.config_space());
        let shown = set.and_then(|()| match commands::signal_config(&self.file) {
            // There is no driver.
            Err(Errno::EINVAL) => Ok(()),
            signalled => signalled,
        });
        if let Err(errno) = shown {
            log::warn!("export {}: the driver misses a change: {}", self.id, errno.desc());
        }
    }

    /// Has the driver see the node's size.
    fn follow_size(self: &Rc<Self>) {
        let (watcher, mut changes) = Watcher::new();
        self.device.watch(&watcher);
        let weak = Rc::downgrade(self);
        self.event_loop.spawn(async move {
            while changes.next().await.is_some() {
                let Some(session) = weak.upgrade() else { return };
                if session.device.refresh() {
                    session.show_config();
                }
            }
        });
    }
}

/// A device that exists, and that this process has opened.
struct Found {
    file: OwnedFd,
    record: Record,
    is_new: bool,
}

/// Makes the device, or finds one of an earlier process.
async fn find(
    event_loop: &EventLoop,
    control: &Control,
    config: &VduseConfig,
    device: &dyn Device,
    made: Made,
) -> Result<Found, VduseError> {
    let name = &config.name;
    let path = format!("{FOLDER}/{name}");
    let space = device.config_space();
    let description = Description {
        name,
        features: made.features,
        queues: made.queues,
        align: 4096,
        config: &space,
    };
    let failed = |what: &str, why: &str| VduseError::new(format!("{what} {path} failed: {why}"));
    let create = || control.create(&description);
    let created = match create() {
        // A device without driver and process has nothing to keep.
        Err(Errno::EEXIST) if control.destroy(name).is_ok() => create(),
        created => created,
    };
    match created {
        Ok(()) => {}
        Err(Errno::EEXIST) => return existing(event_loop, config, &made).await,
        Err(errno) => return Err(failed("making", errno.desc())),
    }
    let opened = || {
        let record = Record::new(&config.records, name, made.clone()).map_err(|error| {
            let folder = config.records.display();
            VduseError::new(format!("no record of requests in flight in {folder}: {error}"))
        })?;
        let file = open(&path).map_err(|errno| failed("opening", errno.desc()))?;
        for index in 0..made.queues {
            let set = commands::set_up_queue(&file, index, made.queue_size);
            set.map_err(|errno| failed("setting up a queue of", errno.desc()))?;
        }
        Ok(Found { file, record, is_new: true })
    };
    let opened: Result<Found, VduseError> = opened();
    opened.inspect_err(|_| {
        let _ = control.destroy(name);
    })
}

/// Finds the device of an earlier process, which has ended.
async fn existing(
    event_loop: &EventLoop,
    config: &VduseConfig,
    made: &Made,
) -> Result<Found, VduseError> {
    let name = &config.name;
    let path = format!("{FOLDER}/{name}");
    let deadline = event_loop.now_ns() + TAKEN_NS;
    let file = loop {
        match open(&path) {
            Ok(file) => break file,
            Err(Errno::EBUSY) if event_loop.now_ns() < deadline => {
                event_loop.sleep_until(event_loop.now_ns() + LOOK_NS).await;
            }
            Err(Errno::EBUSY) => {
                return Err(VduseError::new(format!("{path} belongs to another process")));
            }
            Err(errno) => {
                return Err(VduseError::new(format!("opening {path} failed: {}", errno.desc())));
            }
        }
    };
    Ok(Found { file, record: known(config, made)?, is_new: false })
}

/// Returns the record of a device that exists, if the device was made with the same options.
fn known(config: &VduseConfig, made: &Made) -> Result<Record, VduseError> {
    let name = &config.name;
    let refused =
        |why: String| VduseError::new(format!("{FOLDER}/{name} cannot be continued: {why}"));
    let folder = config.records.display();
    let record = Record::of_device(&config.records, name).map_err(|error| {
        refused(format!("the record of its requests in {folder} cannot be read: {error}"))
    })?;
    let Some(record) = record else {
        let why = format!("there is no record of its requests in flight in {folder}");
        return Err(refused(why).hint(
            "Another program has made it, or the record was removed. Take it off the bus: vdpa dev del.",
        ));
    };
    let found = record.made();
    if found != made {
        let Made { queues, queue_size, block, features } = found;
        let writable = if features & 1 << 5 == 0 { "on" } else { "off" };
        return Err(refused(format!(
            "it has num-queues={queues}, queue-size={queue_size}, logical-block-size={block} and writable={writable}"
        ))
        .hint("Use the options that it was made with, or take it off the bus: vdpa dev del."));
    }
    Ok(record)
}

/// Removes what a failed start has left. A device that was found stays.
fn give_up(control: &Control, name: &str, record: Record, is_new: bool) {
    if is_new && control.destroy(name).is_ok() {
        record.remove();
    }
}

fn open(path: &str) -> Result<OwnedFd, Errno> {
    let mut options = File::options();
    let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    options.open(path).map(OwnedFd::from).map_err(errno_of)
}

/// Prepares the I/O threads that get queues.
async fn workers(
    event_loop: &EventLoop,
    config: &VduseConfig,
    device: Arc<dyn Device>,
) -> Result<Vec<WorkerHandle>, ExportError> {
    let log = ExportLog { control: event_loop.handle(), id: config.id.as_str().into() };
    let mut workers = Vec::new();
    for io_thread in config.io_threads.iter().take(config.queues.into()) {
        let worker = WorkerHandle::spawn(io_thread, device.clone(), None, log.clone())?;
        let attached = worker.ask(|worker, answer| answer.send(worker.attach())).await?;
        let failed = |error| ExportError::Attach { io_thread: io_thread.name().into(), error };
        attached.map_err(failed)?;
        workers.push(worker);
    }
    Ok(workers)
}
