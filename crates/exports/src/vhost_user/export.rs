//! An export over vhost-user, whatever the device.

#![forbid(unsafe_code)]

use std::sync::Arc;

use devices::QueueStats;
use event_loop::{EventLoop, LoopHandle};

use super::device::Device;
use super::error::ExportError;
use super::listener::Listen;
use super::server::Server;

/// Block nodes offered over a vhost-user socket. Dropping it stops it without waiting.
pub struct VhostUserExport {
    id: String,
    server: Server,
    io_threads: Vec<LoopHandle>,
    stats: Arc<[Arc<QueueStats>]>,
}

impl VhostUserExport {
    /// Offers a device. `stats` are those of its request queues.
    pub(super) async fn start(
        control_loop: EventLoop,
        id: String,
        listen: Listen,
        io_threads: Vec<LoopHandle>,
        device: Arc<dyn Device>,
        stats: Arc<[Arc<QueueStats>]>,
        pin_memory: bool,
    ) -> Result<Self, ExportError> {
        let server =
            Server::start(control_loop, id.clone(), listen, device, &io_threads, pin_memory)
                .await?;
        Ok(VhostUserExport { id, server, io_threads, stats })
    }

    /// `id`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// What each request queue has done since the export was started, by its index.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// The threads that serve it: their statistics have the poll windows.
    pub fn io_threads(&self) -> &[LoopHandle] {
        &self.io_threads
    }

    /// Takes no more requests, finishes those in flight, flushes the nodes, removes the socket.
    ///
    /// # Errors
    ///
    /// When a flush failed, or a loop has stopped before.
    pub async fn stop(self) -> Result<(), ExportError> {
        self.server.stop().await
    }
}

/// Counters for so many request queues, of which there are at most `most`.
///
/// # Errors
///
/// The number is out of range.
pub(super) fn queue_stats(
    num_queues: u16,
    most: u16,
) -> Result<Arc<[Arc<QueueStats>]>, ExportError> {
    if !(1..=most).contains(&num_queues) {
        let allowed = format!("num-queues must be from 1 to {most}, not {num_queues}");
        return Err(ExportError::Config(allowed));
    }
    Ok((0..num_queues).map(|_| Arc::new(QueueStats::default())).collect())
}
