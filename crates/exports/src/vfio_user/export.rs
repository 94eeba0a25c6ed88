//! An export over vfio-user, as the control plane knows it.

#![forbid(unsafe_code)]

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use block::node::BlockNode;
use devices::nvme::DoorbellMode;
use event_loop::{EventLoop, LoopHandle};
use stats::{InFlight, QueueStats};

use super::ahci::{AhciDevice, DriveOptions};
use super::device::Served;
use super::hand_over::{self, Order, SavedClient};
use super::interrupts::Interrupts;
use super::nvme::{NvmeDevice, NvmeOptions};
use super::server::Server;
use crate::vhost_user::handover::SavedServer;
use crate::vhost_user::{ExportError, Listen};

/// What all exports over vfio-user have.
pub struct VfioUserConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `addr`.
    pub listen: Listen,
    /// `iothread`: at least one. The queues or drives are with them in turn.
    pub io_threads: Vec<LoopHandle>,
    /// `writable`.
    pub writable: bool,
    /// Whether the guest finds the write cache off. It may switch it on.
    pub writethrough: bool,
    /// `serial`: the first 20 characters count.
    pub serial: String,
    /// `max-memory`: bytes that a client may have mapped. `None`:
    /// [`default_max_memory`](guest_memory::default_max_memory).
    pub max_memory: Option<u64>,
}

/// Block nodes offered over a vfio-user socket.
///
/// Dropping it stops it without waiting.
pub struct VfioUserExport {
    server: Server,
    device: Rc<dyn Served>,
    io_threads: Vec<LoopHandle>,
}

impl VfioUserExport {
    /// Offers nodes as the drives of an AHCI controller.
    ///
    /// There are at most [`MAX_PORTS`](devices::ahci::MAX_PORTS) drives. Clients can connect when this returns,
    /// and are served from [`begin`](Self::begin) on.
    ///
    /// # Errors
    ///
    /// The socket cannot be listened on, a node cannot be used from its I/O thread, or there are too many.
    pub async fn ahci(
        control_loop: &EventLoop,
        config: VfioUserConfig,
        nodes: Vec<Arc<dyn BlockNode>>,
    ) -> Result<Self, ExportError> {
        let VfioUserConfig { id, listen, io_threads, writable, writethrough, serial, max_memory } =
            config;
        if io_threads.is_empty() {
            return Err(ExportError::Config("an export needs an I/O thread".into()));
        }
        let options = DriveOptions { writable, writethrough, serial };
        let (device, interrupts) = AhciDevice::start(&io_threads, nodes, options).await?;
        let server = (id, listen, max_memory);
        Self::start(control_loop, server, io_threads, Rc::new(device), interrupts)
    }

    /// Offers nodes as the namespaces of an NVMe controller.
    ///
    /// `num_queues`: I/O queues, 1 to [`MAX_IO_QUEUES`](devices::nvme::MAX_IO_QUEUES). Clients can connect when
    /// this returns, and are served from [`begin`](Self::begin) on. With mapped doorbells, the export's threads do
    /// not sleep while the controller is enabled.
    ///
    /// # Errors
    ///
    /// As of [`ahci`](Self::ahci); or the number of queues is out of range.
    pub async fn nvme(
        control_loop: &EventLoop,
        config: VfioUserConfig,
        nodes: Vec<Arc<dyn BlockNode>>,
        num_queues: u16,
        doorbells: DoorbellMode,
    ) -> Result<Self, ExportError> {
        let VfioUserConfig {
            id,
            listen,
            mut io_threads,
            writable,
            writethrough,
            serial,
            max_memory,
        } = config;
        io_threads.truncate(num_queues.into());
        // Guests refuse a second disk with the same identifiers. No two exports of a host have one path.
        let identity = match &listen {
            Listen::Path(path) | Listen::TakenOver(_, Some(path)) => {
                std::path::absolute(path).unwrap_or_else(|_| path.clone())
            }
            Listen::Fd(_) | Listen::TakenOver(_, None) => PathBuf::new(),
        };
        let identity = format!("{serial}\n{}", identity.display());
        let options =
            NvmeOptions { writable, writethrough, serial, identity, num_queues, doorbells };
        let started = NvmeDevice::start(control_loop, &io_threads, nodes, options);
        let (device, interrupts) = started.await?;
        let server = (id, listen, max_memory);
        Self::start(control_loop, server, io_threads, Rc::new(device), interrupts)
    }

    fn start(
        control_loop: &EventLoop,
        (id, listen, max_memory): (String, Listen, Option<u64>),
        io_threads: Vec<LoopHandle>,
        device: Rc<dyn Served>,
        interrupts: Arc<Interrupts>,
    ) -> Result<Self, ExportError> {
        let max_memory = max_memory.unwrap_or_else(guest_memory::default_max_memory);
        let server =
            Server::start(control_loop, id, listen, device.clone(), interrupts, max_memory)?;
        Ok(VfioUserExport { server, device, io_threads })
    }

    /// Serves clients.
    pub fn begin(&self) {
        self.server.begin();
    }

    /// Checks the state of another process' client.
    ///
    /// The client is served from [`begin`](Self::begin) on.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn prepare(&self, client: SavedClient) -> Result<(), String> {
        self.server.prepare(client)
    }

    /// Returns the listening socket for a handover to another process.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub fn describe(&self) -> io::Result<SavedServer> {
        self.server.describe()
    }

    /// Pauses the export. Completes with the connected client's state.
    ///
    /// The export receives no more messages, takes no more requests, and finishes those in flight; with `flush`,
    /// it flushes. [`resume`](Self::resume) ends the pause.
    ///
    /// # Errors
    ///
    /// The flush failed; a loop is gone.
    pub fn pause(
        &self,
        flush: bool,
    ) -> impl Future<Output = Result<Option<SavedClient>, String>> + use<> {
        hand_over::ask(self.server.orders(), move |answer| Order::Stop { flush, answer })
    }

    /// Takes requests again, but receives no messages.
    ///
    /// The next step is to [pause](Self::pause) once more.
    ///
    /// # Errors
    ///
    /// The loop is gone.
    pub fn run(&self) -> impl Future<Output = Result<(), String>> + use<> {
        hand_over::ask(self.server.orders(), Order::Run)
    }

    /// Goes on as before the first [pause](Self::pause).
    pub fn resume(&self) {
        // A server that has ended has nothing to resume.
        let _ = self.server.orders().send(Order::Resume);
    }

    /// Returns whether a client is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// Returns the counters of each drive or queue.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        self.device.stats()
    }

    /// Returns the drives or queues: number, from 0, I/O thread, and counters.
    pub fn queues(&self) -> impl Iterator<Item = (usize, &LoopHandle, &Arc<QueueStats>)> {
        let queues = self.queue_stats().iter().enumerate();
        let with_thread = |(number, stats)| {
            Some((number, self.io_threads.get(self.device.thread_of(number))?, stats))
        };
        queues.filter_map(with_thread)
    }

    /// Returns the requests in flight, with the drives or queues that they came by.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        self.device.in_flight()
    }

    /// Makes durable what was written, while requests are served.
    ///
    /// # Errors
    ///
    /// The flush failed, or the loop is gone.
    pub fn flush(&self) -> impl Future<Output = Result<(), String>> + use<> {
        let flushed = self.device.flush();
        async move {
            let flushed = flushed.await.map_err(|gone| gone.to_string())?;
            flushed.map_err(|errno| errno.desc().to_owned())
        }
    }

    /// Disconnects the client, finishes requests, calls `on_quiet`, and flushes.
    ///
    /// The socket is removed.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop is gone.
    pub async fn stop_telling(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        let VfioUserExport { server, device, io_threads: _ } = self;
        let stopped = server.stop(on_quiet).await;
        debug_assert_eq!(Rc::strong_count(&device), 1, "the service has ended");
        device.end().await;
        stopped
    }
}
