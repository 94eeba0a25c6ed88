//! An export, for the control plane.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use block::node::{BlockNode, Watcher};
use event_loop::{EventLoop, LoopHandle, mailbox, oneshot, until};
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use stats::{InFlight, QueueStats};

use super::control::{CONTROL, Control, Failed, Order};
use super::queue::{Queue, Service};
use super::wire::{Command, Info, MAX_IO, Parameters, State, features, owner};
use crate::vhost_user::ExportError;

type Job = Box<dyn FnOnce(&Rc<Queue>) + Send>;

/// How long a device may belong to a process that is ending, nanoseconds: the kernel takes the device from a killed
/// process once it has ended the process' rings.
const TAKEN_NS: u64 = 10_000_000_000;
/// How long a killed process may not show it yet, nanoseconds.
const KILLED_NS: u64 = 500_000_000;
/// Time between two looks at such a device.
const LOOK_NS: u64 = 10_000_000;
/// How long the kernel waits for a free tag of each queue until it refuses to quiesce a device, milliseconds.
const QUIESCE_MS: u64 = 1000;
/// How long commands may stay in flight after that, nanoseconds. A command that was sent in the meantime is ended by the
/// next attempt.
const ENDED_NS: u64 = 100_000_000;

/// The options of `--export type=ublk`.
pub struct UblkConfig {
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
    /// `num-queues`.
    pub queues: u16,
    /// `queue-size`: requests of a queue that are in flight at once.
    pub depth: u16,
    /// `dev-id`: the number of the device; `None`: the kernel's choice.
    pub dev_id: Option<u32>,
    /// `recovery`: the device outlives the process.
    pub recovery: bool,
}

/// Why there is no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UblkError {
    /// What failed.
    pub what: String,
    /// What to do.
    pub hint: Option<String>,
}

impl UblkError {
    fn new(what: impl Into<String>) -> Self {
        UblkError { what: what.into(), hint: None }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        UblkError { hint: Some(hint.into()), ..self }
    }

    /// Returns the error of opening [`CONTROL`].
    fn unopened(errno: Errno) -> Self {
        match errno {
            Errno::ENOENT | Errno::ENODEV | Errno::ENXIO => {
                UblkError::new(format!("there is no {CONTROL}: the kernel has no ublk"))
                    .hint("Load its module: modprobe ublk_drv. It needs Linux 6.5 or later.")
            }
            errno => UblkError::new(format!("opening {CONTROL} failed: {}", errno.desc()))
                .hint("ublk devices need root, or CAP_SYS_ADMIN and access to the file."),
        }
    }

    /// Checks that this process can make devices, as far as that changes nothing.
    ///
    /// # Errors
    ///
    /// The kernel has no ublk, or this process may not use it.
    pub fn check_host() -> Result<(), Self> {
        access(CONTROL, AccessFlags::R_OK | AccessFlags::W_OK).map_err(Self::unopened)
    }
}

impl From<ExportError> for UblkError {
    fn from(error: ExportError) -> Self {
        UblkError::new(error.to_string())
    }
}

/// A device that runs.
pub struct UblkExport {
    shared: Rc<Shared>,
    queues: RefCell<Vec<Worker>>,
    stats: Vec<Arc<QueueStats>>,
}

struct Shared {
    config: UblkConfig,
    control: Rc<dyn Control>,
    event_loop: EventLoop,
    /// The driver's and the device's features.
    flags: Cell<u64>,
    /// The number of the device.
    dev_id: Cell<u32>,
    is: Cell<Is>,
    /// The size that the block device has, sectors.
    sectors: Cell<u64>,
    /// Open devices are removed too.
    is_hard: Cell<bool>,
    /// The device was made by this process.
    is_made: Cell<bool>,
}

/// What this process has of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    /// Its queues.
    Served,
    /// Nothing: its requests wait for a server.
    Quiesced,
    /// There is no block device.
    Stopped,
}

/// The control plane's handle of a queue. Dropping it ends the queue, once the kernel has ended its commands.
struct Worker {
    jobs: Arc<mailbox::Sender<Job>>,
    gone: oneshot::Receiver<()>,
}

impl UblkExport {
    /// Makes the device, or takes it over from a daemon that has ended. It serves requests from then on.
    ///
    /// With `is_handed_over`, the present daemon still serves the device: it is only described here, and
    /// [taken over](Self::resume) later.
    ///
    /// # Errors
    ///
    /// A sentence for people, and what to do.
    pub async fn start(
        event_loop: &EventLoop,
        config: UblkConfig,
        control: Rc<dyn Control>,
        handed_over: Option<u32>,
    ) -> Result<Self, UblkError> {
        let stats = std::iter::repeat_with(Arc::default).take(config.queues.into()).collect();
        let shared = Shared {
            dev_id: Cell::new(handed_over.or(config.dev_id).unwrap_or(u32::MAX)),
            config,
            control,
            event_loop: event_loop.clone(),
            flags: Cell::new(0),
            is: Cell::new(Is::Quiesced),
            sectors: Cell::new(0),
            is_hard: Cell::new(false),
            is_made: Cell::new(false),
        };
        let export = UblkExport { shared: Rc::new(shared), queues: RefCell::default(), stats };
        export.shared.read_features().await?;
        if handed_over.is_none() {
            export.shared.make_or_find().await?;
            export.serve().await?;
        }
        export.follow_size();
        Ok(export)
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/ublkb{}", self.shared.dev_id.get()))
    }

    /// Returns the number of the device.
    pub fn dev_id(&self) -> u32 {
        self.shared.dev_id.get()
    }

    /// Starts the queues, then the block device or its recovery.
    async fn serve(&self) -> Result<(), UblkError> {
        let shared = &self.shared;
        let info = shared.info().await.map_err(|failed| shared.failed("describing", failed))?;
        let id = info.id;
        shared.is.set(Is::Quiesced);
        if info.state != State::Dead {
            shared.begin_recovery().await?;
        }
        match self.start_queues().await {
            Ok(()) => {}
            Err(error) => {
                self.give_up(info.state).await;
                return Err(error);
            }
        }
        let (doing, command) = match info.state {
            State::Dead => ("starting", Command::Start),
            State::Live | State::Quiesced | State::Failing => ("taking over", Command::EndRecovery),
        };
        let order = Order { command, id, data: 0, memory: Vec::new() };
        if let Err(failed) = shared.control.command(order).await {
            self.give_up(info.state).await;
            return Err(shared.failed(doing, failed));
        }
        shared.is.set(Is::Served);
        shared.update_size().await;
        Ok(())
    }

    async fn start_queues(&self) -> Result<(), UblkError> {
        let shared = &self.shared;
        let id = shared.dev_id.get();
        let file = shared.control.open(id).await.map_err(|errno| {
            UblkError::new(format!("opening /dev/ublkc{id} failed: {}", errno.desc()))
        })?;
        let file = Arc::new(file);
        let config = &shared.config;
        let threads = config.io_threads.iter().cycle();
        for ((number, io_thread), stats) in (0..).zip(threads).zip(&self.stats) {
            let service = Service {
                file: file.clone(),
                number,
                depth: config.depth,
                node: config.node.clone(),
                writable: config.writable,
                writethrough: config.writethrough,
                stats: stats.clone(),
            };
            let failed = |error| ExportError::Attach { io_thread: io_thread.name().into(), error };
            let worker = Worker::spawn(io_thread, service).await?.map_err(failed)?;
            self.queues.borrow_mut().push(worker);
        }
        for answer in self.ask(|queue, answer| {
            queue.fetch();
            answer.send(());
        }) {
            answer.await.map_err(ExportError::from)?;
        }
        // The kernel refuses a command when it is submitted, at the end of the job's iteration, and a refusal is known in the
        // next one.
        for _ in 0..2 {
            for answer in self.ask(|queue, answer| answer.send(queue.failure())) {
                if let Some(errno) = answer.await.map_err(ExportError::from)? {
                    let why =
                        format!("waiting for requests of /dev/ublkc{id} failed: {}", errno.desc());
                    return Err(UblkError::new(why));
                }
            }
        }
        Ok(())
    }

    /// Ends what a failed start has left. A device that was found in the state stays, another one is removed.
    async fn give_up(&self, found: State) {
        if found == State::Dead {
            self.shared.order(Command::Stop, 0).await;
            self.shared.is.set(Is::Stopped);
        } else {
            self.shared.order(Command::Quiesce, QUIESCE_MS).await;
        }
        let queues = self.queues.take();
        let gone = async {
            for worker in queues {
                worker.end().await;
            }
        };
        // A queue stays behind if the kernel does not end its commands.
        let limit = self.shared.event_loop.now_ns() + TAKEN_NS;
        let _ = until(gone, self.shared.event_loop.sleep_until(limit)).await;
        if found == State::Dead {
            self.shared.order(Command::Delete, 0).await;
        }
    }

    /// Has the block device follow the node's size.
    fn follow_size(&self) {
        let (watcher, mut changes) = Watcher::new();
        self.shared.config.node.watch(watcher);
        let weak = Rc::downgrade(&self.shared);
        self.shared.event_loop.spawn(async move {
            while changes.next().await.is_some() {
                let Some(shared) = weak.upgrade() else { return };
                shared.update_size().await;
            }
        });
    }

    /// Returns whether the device may be in use: it is until [`try_stop`](Self::try_stop) has stopped it.
    pub fn is_connected(&self) -> bool {
        self.shared.is.get() != Is::Stopped
    }

    /// Stops the device unless it is open, with an errno of `EBUSY`.
    pub fn try_stop(&self) -> impl Future<Output = Result<(), Errno>> + use<> {
        let shared = self.shared.clone();
        async move { shared.stop(false).await }
    }

    /// Has the device removed by [`stop_telling`](Self::stop_telling) even if it is open.
    pub fn spare_nobody(&self) {
        self.shared.is_hard.set(true);
    }

    /// Returns the counters of each queue.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// Returns the counters of each queue, with its thread.
    pub fn queues(&self) -> Vec<(usize, LoopHandle, Arc<QueueStats>)> {
        let threads = self.shared.config.io_threads.iter().cycle();
        let queues = threads.zip(&self.stats).enumerate();
        queues.map(|(number, (thread, stats))| (number, thread.clone(), stats.clone())).collect()
    }

    /// Returns the requests in flight with the numbers of their queues.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        let asked = self.ask(|queue, answer| answer.send(queue.in_flight()));
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

    /// Makes written data durable while requests are served.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub fn flush(&self) -> impl Future<Output = Result<(), ExportError>> + use<> {
        let asked = self.ask(|queue, answer| queue.flush(answer));
        async move {
            for answer in asked {
                answer.await?.map_err(|errno| ExportError::Flush(errno.into()))?;
            }
            Ok(())
        }
    }

    /// Takes the device from the queues, and ends them. Requests wait in the kernel, which keeps those that are not answered,
    /// until [`resume`](Self::resume), or for another process.
    ///
    /// # Errors
    ///
    /// A sentence. The device is served then.
    pub async fn quiesce(&self, flush: bool) -> Result<(), String> {
        let shared = &self.shared;
        if shared.is.get() != Is::Served {
            return Ok(());
        }
        let flags = shared.flags.get();
        if flags & features::USER_RECOVERY == 0 {
            let path = self.path();
            let why = "has recovery=off, as that of a snapshot: it ends with its daemon";
            return Err(format!("{} cannot be handed over: it {why}", path.display()));
        }
        if flags & features::QUIESCE == 0 {
            let why = "a ublk export is handed over with Linux 6.16 or later: restart the daemon";
            return Err(why.to_owned());
        }
        self.take_away().await?;
        if flush && let Err(error) = self.flush().await {
            return Err(error.to_string());
        }
        self.end_queues().await;
        Ok(())
    }

    async fn end_queues(&self) {
        let queues = self.queues.take();
        for worker in queues {
            worker.end().await;
        }
    }

    /// Returns an answer for each queue: the kernel has ended its commands, and the node has no request of it.
    fn ask_for_ends(&self) -> Vec<oneshot::Receiver<()>> {
        self.ask(|queue, answer| {
            let (ended, end) = (queue.ended(), queue.clone());
            queue.spawn(async move {
                let _ = ended.await;
                drop(end);
                answer.send(());
            });
        })
    }

    /// Has the kernel end all commands, and waits until the node has no requests.
    async fn take_away(&self) -> Result<(), String> {
        let shared = &self.shared;
        let mut ended = self.ask_for_ends();
        let deadline = shared.event_loop.now_ns() + TAKEN_NS;
        while let Some(first) = ended.first_mut() {
            let order = shared.order_of(Command::Quiesce, QUIESCE_MS, Vec::new());
            match shared.control.command(order).await {
                Ok(_) => {}
                // No tag of a queue became free in time.
                Err(Failed::Command(Errno::EBUSY)) if shared.event_loop.now_ns() < deadline => {
                    continue;
                }
                Err(failed) => return Err(shared.failed("quiescing", failed).what),
            }
            shared.is.set(Is::Quiesced);
            let look = shared.event_loop.now_ns() + ENDED_NS;
            // After its end the queue would wait for ever: the kernel is asked again for commands that were sent meanwhile.
            if until(shared.event_loop.sleep_until(look), first).await.is_err() {
                ended.remove(0);
            }
        }
        Ok(())
    }

    /// Serves the device again, after [`quiesce`](Self::quiesce) or in the next process.
    ///
    /// # Errors
    ///
    /// A sentence for people. The device stays, and its requests wait.
    pub async fn resume(&self) -> Result<(), UblkError> {
        if self.shared.is.get() != Is::Quiesced {
            return Ok(());
        }
        // Those that a failed attempt to quiesce has left.
        if !self.queues.borrow().is_empty() {
            self.take_away().await.map_err(UblkError::new)?;
            self.end_queues().await;
        }
        self.serve().await
    }

    /// Removes the device, finishes requests, calls `on_quiet`, and flushes.
    ///
    /// An open device with `recovery` stays: its requests wait for the next daemon.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop has ended.
    pub async fn stop_telling(&self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        let shared = &self.shared;
        let (id, path) = (&shared.config.id, self.path());
        let path = path.display();
        let served = shared.is.get() == Is::Served;
        if served {
            let hard = shared.is_hard.get();
            match shared.stop(hard).await {
                Err(Errno::EBUSY) => match self.stays().await {
                    Ok(()) => log::warn!(
                        "export {id}: {path} is in use and stays; its requests wait for a daemon with dev-id={}",
                        shared.dev_id.get()
                    ),
                    Err(why) => {
                        log::warn!("export {id}: {path} is in use, and is removed: {why}");
                        shared.is_hard.set(true);
                        let _ = shared.stop(true).await;
                    }
                },
                Err(errno) => log::error!("export {id}: removing {path} failed: {}", errno.desc()),
                Ok(()) => {}
            }
        }
        for answer in self.ask_for_ends() {
            answer.await?;
        }
        on_quiet();
        let result = self.flush().await;
        self.end_queues().await;
        if shared.is.get() == Is::Stopped {
            // A device that is open is deleted when it is closed, which is not awaited.
            let is_hard = shared.is_hard.get();
            shared.order(if is_hard { Command::DeleteLater } else { Command::Delete }, 0).await;
        }
        result
    }

    /// Leaves the device to the next daemon.
    async fn stays(&self) -> Result<(), String> {
        let flags = self.shared.flags.get();
        if flags & features::USER_RECOVERY == 0 {
            return Err("recovery=off".into());
        }
        if flags & features::QUIESCE == 0 {
            return Err("Linux before 6.16 cannot take a device from a daemon that runs".into());
        }
        self.take_away().await
    }

    fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&Rc<Queue>, oneshot::Sender<R>) + Copy + Send + 'static,
    ) -> Vec<oneshot::Receiver<R>> {
        let ask = |worker: &Worker| {
            let (sender, receiver) = oneshot::channel();
            // A job that cannot be sent is dropped with its sender, which fails the receiver.
            let _ = worker.jobs.send(Box::new(move |queue| job(queue, sender)));
            receiver
        };
        self.queues.borrow().iter().map(ask).collect()
    }
}

impl Drop for UblkExport {
    /// Has the kernel end the commands of queues that still run: the start of the daemon was interrupted. Their threads end
    /// no earlier.
    fn drop(&mut self) {
        if self.queues.borrow().is_empty() {
            return;
        }
        let shared = &self.shared;
        let commands: &[Command] = match shared.is_made.get() {
            true => &[Command::Stop, Command::DeleteLater],
            false => &[Command::Quiesce],
        };
        for command in commands {
            // There is nothing else to try.
            let _ = shared.control.command_now(shared.order_of(*command, QUIESCE_MS, Vec::new()));
        }
    }
}

impl Shared {
    fn order_of(&self, command: Command, data: u64, memory: Vec<u8>) -> Order {
        Order { command, id: self.dev_id.get(), data, memory }
    }

    /// Gives an order. A failure changes nothing, and is only logged.
    async fn order(&self, command: Command, data: u64) {
        if let Err(failed) = self.control.command(self.order_of(command, data, Vec::new())).await {
            let (id, errno) = (&self.config.id, failed.errno());
            log::debug!("export {id}: ublk command {command:?}: {}", errno.desc());
        }
    }

    async fn info(&self) -> Result<Info, Failed> {
        let order = self.order_of(Command::GetInfo, 0, vec![0; Info::SIZE]);
        let memory = self.control.command(order).await?;
        Info::decode(&memory).ok_or(Failed::Command(Errno::EPROTO))
    }

    fn failed(&self, doing: &str, failed: Failed) -> UblkError {
        let errno = failed.errno();
        match failed {
            Failed::Open(errno) => UblkError::unopened(errno),
            Failed::Command(Errno::EPERM | Errno::EACCES) => {
                UblkError::new(format!("{doing} a ublk device failed: {}", errno.desc()))
                    .hint("ublk devices need root, or CAP_SYS_ADMIN.")
            }
            Failed::Command(_) => {
                UblkError::new(format!("{doing} a ublk device failed: {}", errno.desc()))
            }
        }
    }

    async fn read_features(&self) -> Result<(), UblkError> {
        let order = self.order_of(Command::GetFeatures, 0, vec![0; 8]);
        let found = self.control.command(order).await;
        match found {
            Ok(memory) => {
                let bytes = memory.first_chunk().copied().unwrap_or_default();
                self.flags.set(u64::from_ne_bytes(bytes));
                Ok(())
            }
            Err(Failed::Command(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::ENODEV)) => {
                Err(UblkError::new("the kernel's ublk is too old: Linux 6.5 or later is needed"))
            }
            Err(failed) => Err(self.failed("reading the features for", failed)),
        }
    }

    fn parameters(&self) -> Parameters {
        let UblkConfig { node, writable, writethrough, .. } = &self.config;
        Parameters::of(&node.geometry(), *writable, *writethrough)
    }

    /// Finds the device of an earlier daemon, or makes one.
    async fn make_or_find(&self) -> Result<(), UblkError> {
        let Some(dev_id) = self.config.dev_id else { return self.make().await };
        let (begun, now) = (self.event_loop.now_ns(), || self.event_loop.now_ns());
        loop {
            let info = match self.info().await {
                Ok(info) => info,
                Err(Failed::Command(Errno::ENODEV)) => return self.make().await,
                Err(failed) => return Err(self.failed("describing", failed)),
            };
            let path = format!("/dev/ublkb{dev_id}");
            if info.owner != owner(&self.config.id) {
                let id = &self.config.id;
                let why = format!("ublk device {dev_id} is not that of an export '{id}'");
                return Err(
                    UblkError::new(why).hint("Choose another dev-id, or remove that device.")
                );
            }
            match info.state {
                State::Quiesced | State::Failing => {
                    self.check(&info).await?;
                    log::info!("export {}: takes over {path}", self.config.id);
                    return Ok(());
                }
                // It was made, or stopped, by a daemon that ended in the middle.
                State::Dead => self.order(Command::Delete, 0).await,
                // A process that was killed has it until its rings have ended.
                State::Live if now() < begun + KILLED_NS => {}
                State::Live if now() < begun + TAKEN_NS && is_ending(info.pid) => {}
                State::Live => {
                    let why = format!("{path} belongs to process {}", info.pid);
                    return Err(
                        UblkError::new(why).hint("Stop that process, or choose another dev-id.")
                    );
                }
            }
            self.event_loop.sleep_until(self.event_loop.now_ns() + LOOK_NS).await;
        }
    }

    /// Checks that the device of an earlier daemon is as the options say.
    async fn check(&self, info: &Info) -> Result<(), UblkError> {
        let UblkConfig { queues, depth, .. } = self.config;
        let dev_id = info.id;
        let differs = |what: String| {
            UblkError::new(format!("/dev/ublkb{dev_id} cannot be taken over: {what}"))
                .hint("Use the options that it was made with.")
        };
        if (info.queues, info.depth) != (queues, depth) {
            return Err(differs(format!(
                "it has num-queues={} and queue-size={}",
                info.queues, info.depth
            )));
        }
        let order = self.order_of(Command::GetParameters, 0, self.parameters().encode());
        let memory = self.control.command(order).await;
        let memory = memory.map_err(|failed| self.failed("describing", failed))?;
        let Some(found) = Parameters::decode(&memory) else {
            return Err(differs("its parameters are unknown".into()));
        };
        if let Some(why) = found.contradiction(&self.parameters()) {
            return Err(differs(why.into()));
        }
        // Only requests of this size fit the memory.
        if info.max_io as usize > MAX_IO {
            return Err(differs(format!("its requests have up to {} bytes", info.max_io)));
        }
        let wanted = self.parameters().sectors;
        if found.sectors != wanted && info.flags & features::UPDATE_SIZE == 0 {
            return Err(differs(format!(
                "it has {} sectors, and the node {wanted}",
                found.sectors
            )));
        }
        self.sectors.set(found.sectors);
        self.flags.set(info.flags | self.flags.get() & features::SAFE_STOP);
        Ok(())
    }

    async fn make(&self) -> Result<(), UblkError> {
        let UblkConfig { id, queues, depth, recovery, .. } = &self.config;
        let optional = features::UPDATE_SIZE | features::QUIESCE | features::NO_PARTITION_SCAN;
        let recovered = features::USER_RECOVERY | features::RECOVERY_REISSUE;
        let mut flags = features::IOCTL_ENCODE | optional & self.flags.get();
        if *recovery {
            flags |= recovered;
        } else {
            flags &= !features::QUIESCE;
        }
        let info = Info {
            queues: *queues,
            depth: *depth,
            state: State::Dead,
            max_io: MAX_IO as u32,
            id: self.dev_id.get(),
            pid: 0,
            flags,
            owner: owner(id),
        };
        let order = self.order_of(Command::Add, 0, info.encode());
        let made = match self.control.command(order).await {
            Ok(memory) => Info::decode(&memory),
            Err(failed) => return Err(self.failed("making", failed)),
        };
        let Some(made) = made else {
            return Err(self.failed("making", Failed::Command(Errno::EPROTO)));
        };
        self.dev_id.set(made.id);
        self.is_made.set(true);
        let refused = |what: String| async move {
            self.order(Command::Delete, 0).await;
            Err(UblkError::new(what))
        };
        if made.queues != *queues {
            let cpus = made.queues;
            return refused(format!("num-queues must be at most {cpus}, one for each CPU")).await;
        }
        if made.depth != *depth || made.max_io as usize > MAX_IO {
            return refused("the kernel makes no such queues".into()).await;
        }
        if *recovery && made.flags & recovered != recovered {
            return refused(
                "the kernel's ublk devices cannot outlive a daemon: use recovery=off".into(),
            )
            .await;
        }
        self.flags.set(made.flags | self.flags.get() & features::SAFE_STOP);
        let parameters = self.parameters();
        self.sectors.set(parameters.sectors);
        let order = self.order_of(Command::SetParameters, 0, parameters.encode());
        if let Err(failed) = self.control.command(order).await {
            self.order(Command::Delete, 0).await;
            return Err(self.failed("describing", failed));
        }
        Ok(())
    }

    /// Prepares the device for other queues, once the earlier server's have ended.
    async fn begin_recovery(&self) -> Result<(), UblkError> {
        let deadline = self.event_loop.now_ns() + TAKEN_NS;
        loop {
            let order = self.order_of(Command::StartRecovery, 0, Vec::new());
            match self.control.command(order).await {
                Ok(_) => return Ok(()),
                Err(Failed::Command(Errno::EBUSY)) if self.event_loop.now_ns() < deadline => {
                    self.event_loop.sleep_until(self.event_loop.now_ns() + LOOK_NS).await;
                }
                Err(failed) => return Err(self.failed("taking over", failed)),
            }
        }
    }

    /// Removes the block device; with `hard` also an open one. Afterwards the kernel has ended all commands.
    async fn stop(&self, hard: bool) -> Result<(), Errno> {
        match self.is.get() {
            Is::Stopped => return Ok(()),
            Is::Served => {}
            Is::Quiesced => return Err(Errno::EBUSY),
        }
        let is_safe = self.flags.get() & features::SAFE_STOP != 0;
        if !hard && !is_safe && is_claimed(&self.event_loop, self.dev_id.get()).await {
            return Err(Errno::EBUSY);
        }
        let command = if hard || !is_safe { Command::Stop } else { Command::TryStop };
        match self.control.command(self.order_of(command, 0, Vec::new())).await {
            Ok(_) => {
                self.is.set(Is::Stopped);
                Ok(())
            }
            Err(failed) => Err(failed.errno()),
        }
    }

    async fn update_size(&self) {
        let sectors = self.parameters().sectors;
        if self.is.get() != Is::Served || self.sectors.replace(sectors) == sectors {
            return;
        }
        let id = &self.config.id;
        let failed = if self.flags.get() & features::UPDATE_SIZE == 0 {
            Some("Linux 6.16 or later is needed")
        } else {
            let order = self.order_of(Command::UpdateSize, sectors, Vec::new());
            self.control.command(order).await.err().map(|failed| failed.errno().desc())
        };
        if let Some(why) = failed {
            log::warn!("export {id}: /dev/ublkb{} keeps its size: {why}", self.dev_id.get());
        }
    }
}

/// Whether a process has ended, or is ending.
fn is_ending(pid: i32) -> bool {
    // proc_pid_stat(5): the state follows the name in brackets, and the flags are the seventh field after it.
    const PF_EXITING: u64 = 4;
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let mut fields =
        stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ')).into_iter().flatten();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or_default();
    matches!(state, Some("Z" | "X")) || flags & PF_EXITING != 0
}

/// Whether a block device is mounted, or claimed otherwise. Kernels before 7.0 do not count other openers.
async fn is_claimed(event_loop: &EventLoop, id: u32) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    let open = move || {
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(nix::libc::O_EXCL).open(format!("/dev/ublkb{id}"))
    };
    let opened = event_loop.offload(move || open().err().and_then(|error| error.raw_os_error()));
    opened.await.is_ok_and(|errno| errno == Some(nix::libc::EBUSY))
}

impl Worker {
    async fn spawn(
        io_thread: &LoopHandle,
        service: Service,
    ) -> Result<std::io::Result<Self>, ExportError> {
        let (jobs, mut receiver) = mailbox::channel::<Job>();
        let (answer, opened) = oneshot::channel();
        let (is_gone, gone) = oneshot::channel::<()>();
        io_thread.spawn(move |event_loop| {
            let queue = match Queue::new(event_loop, service) {
                Ok(queue) => queue,
                Err(error) => return answer.send(Err(error)),
            };
            answer.send(Ok(()));
            event_loop.spawn(async move {
                while let Some(job) = receiver.receive().await {
                    job(&queue);
                }
                let _ = queue.ended().await;
                drop(queue);
                is_gone.send(());
            });
        })?;
        Ok(opened.await?.map(|()| Worker { jobs: Arc::new(jobs), gone }))
    }

    /// Ends the queue, and waits until it has dropped the node and the device's file.
    ///
    /// The last owner of a node closes its files, which must not happen on an I/O thread.
    async fn end(self) {
        let Worker { jobs, gone } = self;
        drop(jobs);
        let _ = gone.await;
    }
}
