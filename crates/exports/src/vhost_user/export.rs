//! An export over vhost-user, for all devices.

#![forbid(unsafe_code)]

use std::future::Future;
use std::sync::Arc;

use event_loop::{EventLoop, LoopHandle};
use stats::InFlight;
use stats::QueueStats;

use super::device::Device;
use super::error::ExportError;
use super::handover::SavedRings;
use super::listener::Listen;
use super::orders::{HandOver, TakenOver};
use super::server::{MemoryOptions, Server};

/// The common options of `--export type=vhost-user-blk` and `-scsi`.
pub struct VhostUserConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `addr`.
    pub listen: Listen,
    /// `iothread`: at least one. Queue i runs on thread i modulo their number; the queues of virtio-scsi
    /// without commands count too.
    pub io_threads: Vec<LoopHandle>,
    /// `num-queues`: number of request queues, at least one. `None`: the device's default.
    pub num_queues: Option<u16>,
    /// `writable`.
    pub writable: bool,
    /// Whether the write cache is off at first. The guest may switch it on.
    pub writethrough: bool,
    /// `logical-block-size`: bytes, a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// `pin-memory`: registers the guest's memory with the I/O threads' rings. That saves the look-up of
    /// its pages per request, and pins all of it. Pages that the VMM discards meanwhile (balloon, free page
    /// reporting, hot-unplug by holes) would be lost to the guest. If pinning fails, a warning gives the
    /// reason.
    pub pin_memory: bool,
    /// `max-memory`: bytes that a front end may have mapped. `None`:
    /// [`default_max_memory`](guest_memory::default_max_memory).
    pub max_memory: Option<u64>,
    /// State from the previous process. Implies `held`.
    pub taken_over: Option<TakenOver>,
    /// Serve no front end until [`begin`](VhostUserExport::begin). Until then, front ends that
    /// connect wait in the socket's backlog.
    pub held: bool,
}

impl VhostUserConfig {
    /// Returns a configuration in which all other options have their defaults. The export is read-only.
    pub fn new(id: impl Into<String>, listen: Listen, io_threads: Vec<LoopHandle>) -> Self {
        VhostUserConfig {
            id: id.into(),
            listen,
            io_threads,
            num_queues: None,
            writable: false,
            writethrough: false,
            logical_block_size: 512,
            pin_memory: false,
            max_memory: None,
            taken_over: None,
            held: false,
        }
    }
}

/// Block nodes offered over a vhost-user socket.
///
/// Dropping it stops it without waiting.
pub struct VhostUserExport {
    id: String,
    server: Server,
    io_threads: Vec<LoopHandle>,
    /// Index of the first request queue among all queues of the device.
    first_queue: usize,
    stats: Arc<[Arc<QueueStats>]>,
    /// The number of queues was configured. Otherwise only queues up to the last used one are shown.
    has_fixed_queues: bool,
}

impl VhostUserExport {
    /// Offers a device. `stats` belong to its request queues.
    pub(super) async fn start(
        control_loop: EventLoop,
        config: VhostUserConfig,
        device: Arc<dyn Device>,
        stats: Arc<[Arc<QueueStats>]>,
    ) -> Result<Self, ExportError> {
        let VhostUserConfig { id, listen, io_threads, pin_memory, max_memory, num_queues, .. } =
            config;
        let max = max_memory.unwrap_or_else(guest_memory::default_max_memory);
        let none = config.held.then_some(TakenOver { session: None });
        let begins_with = config.taken_over.or(none);
        let first_queue = usize::from(device.num_queues()).saturating_sub(stats.len());
        let server = Server::start(
            control_loop,
            id.clone(),
            listen,
            device,
            &io_threads,
            MemoryOptions { pin: pin_memory, max },
            begins_with,
        )
        .await?;
        let has_fixed_queues = num_queues.is_some();
        Ok(VhostUserExport { id, server, io_threads, first_queue, stats, has_fixed_queues })
    }

    /// Returns the export's `id`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// Returns the statistics of each request queue since the start of the export.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        if self.has_fixed_queues {
            return &self.stats;
        }
        let last_used = self.stats.iter().rposition(|queue| queue.taken.get() > 0);
        &self.stats[..=last_used.unwrap_or(0)]
    }

    /// Returns the request queues: index, I/O thread, and statistics.
    ///
    /// The index is that among all queues of the device.
    pub fn queues(&self) -> impl Iterator<Item = (usize, &LoopHandle, &Arc<QueueStats>)> {
        let threads = self.io_threads.iter().cycle().skip(self.first_queue % self.io_threads.len());
        let numbered = (self.first_queue..).zip(threads).zip(self.queue_stats());
        numbered.map(|((number, thread), stats)| (number, thread, stats))
    }

    /// Returns the I/O threads that serve the export.
    ///
    /// Their statistics have the poll windows.
    pub fn io_threads(&self) -> &[LoopHandle] {
        &self.io_threads
    }

    /// Returns the requests in flight with the indexes of their queues.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        self.server.in_flight()
    }

    /// Leaves new requests in the queues, or takes them again.
    ///
    /// The state of the front end does not matter. Requests in flight continue.
    pub fn set_paused(&self, paused: bool) -> impl Future<Output = ()> + use<> {
        self.server.set_paused(paused)
    }

    /// Starts serving, if the export was [held](VhostUserConfig::held).
    ///
    /// Completes when the rings run.
    ///
    /// A session that was [taken over](VhostUserConfig::taken_over) continues where the previous
    /// process stopped.
    pub fn begin(&self, rings: SavedRings) -> impl Future<Output = ()> + use<> {
        self.server.begin(rings)
    }

    /// Returns the handle for a handover to another process.
    pub fn hand_over(&self) -> &HandOver {
        self.server.hand_over()
    }

    /// Takes no more requests, finishes those in flight, and flushes the nodes.
    ///
    /// The socket is removed.
    ///
    /// # Errors
    ///
    /// A flush failed, or a loop had stopped before.
    pub async fn stop(self) -> Result<(), ExportError> {
        self.stop_telling(|| {}).await
    }

    /// Stops the export as [`stop`](Self::stop) does.
    ///
    /// Calls `on_quiet` before the flush.
    ///
    /// No request is in flight when `on_quiet` is called.
    ///
    /// # Errors
    ///
    /// As of [`stop`](Self::stop). If the control loop has stopped before, `on_quiet` is not called.
    pub async fn stop_telling(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        self.server.stop(on_quiet).await
    }
}

/// Creates the counters of request queues, at most `most`.
///
/// # Errors
///
/// The number is out of range.
pub(crate) fn queue_stats(
    num_queues: u16,
    most: u16,
) -> Result<Arc<[Arc<QueueStats>]>, ExportError> {
    if !(1..=most).contains(&num_queues) {
        let allowed = format!("num-queues must be from 1 to {most}, not {num_queues}");
        return Err(ExportError::Config(allowed));
    }
    Ok((0..num_queues).map(|_| Arc::new(QueueStats::default())).collect())
}
