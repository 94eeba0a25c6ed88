//! An export over vfio-user, as the control plane knows it.

#![forbid(unsafe_code)]

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use block::node::BlockNode;
use event_loop::{EventLoop, LoopHandle};
use stats::InFlight;
use stats::QueueStats;

use super::ahci::{AhciDevice, DriveOptions};
use super::device::Device;
use super::server::Server;
use crate::vhost_user::{ExportError, Listen};

/// What `--export type=vfio-user-ahci` says.
pub struct VfioUserConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `addr`.
    pub listen: Listen,
    /// `iothread`: at least one, of which the first serves the drive.
    pub io_threads: Vec<LoopHandle>,
    /// `node-name`.
    pub node: Arc<dyn BlockNode>,
    /// `writable`.
    pub writable: bool,
    /// Whether the guest finds the write cache off. It may switch it on.
    pub writethrough: bool,
    /// `serial`: the first 20 characters count.
    pub serial: String,
}

/// A block node offered over a vfio-user socket. Dropping it stops it without waiting.
pub struct VfioUserExport {
    server: Server,
    device: Rc<AhciDevice>,
    io_thread: LoopHandle,
}

impl VfioUserExport {
    /// Offers a node as the drive of an AHCI controller. Clients can connect when this returns, and are served
    /// from [`begin`](Self::begin) on.
    ///
    /// # Errors
    ///
    /// The socket cannot be listened on, or the node cannot be used from the I/O thread.
    pub async fn ahci(
        control_loop: &EventLoop,
        config: VfioUserConfig,
    ) -> Result<Self, ExportError> {
        let VfioUserConfig { id, listen, io_threads, node, writable, writethrough, serial } =
            config;
        let io_thread = io_threads
            .into_iter()
            .next()
            .ok_or_else(|| ExportError::Config("an export needs an I/O thread".into()))?;
        let options = DriveOptions { writable, writethrough, serial };
        let (device, interrupts) = AhciDevice::start(&io_thread, node, options).await?;
        let device = Rc::new(device);
        let server = Server::start(control_loop, id, listen, device.clone(), interrupts)?;
        Ok(VfioUserExport { server, device, io_thread })
    }

    /// Serves clients.
    pub fn begin(&self) {
        self.server.begin();
    }

    /// Whether a client is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// The counters of each drive.
    pub fn queue_stats(&self) -> &[Arc<QueueStats>] {
        self.device.stats()
    }

    /// The drives: the port of each, the thread that serves it, and what it has done.
    pub fn queues(&self) -> impl Iterator<Item = (usize, &LoopHandle, &Arc<QueueStats>)> {
        let drives = self.queue_stats().iter().enumerate();
        drives.map(|(port, stats)| (port, &self.io_thread, stats))
    }

    /// The requests in flight, with the ports that they came by.
    pub fn in_flight(&self) -> impl Future<Output = Vec<(u64, InFlight)>> + use<> {
        let asked = self.device.in_flight();
        async move {
            // A drive whose loop is gone has none.
            let in_flight = asked.await.unwrap_or_default();
            in_flight.into_iter().map(|request| (0, request)).collect()
        }
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

    /// Sends the client away, finishes its requests, removes the socket, calls `on_quiet`, flushes.
    ///
    /// # Errors
    ///
    /// The flush failed, or a loop is gone.
    pub async fn stop_telling(self, on_quiet: impl FnOnce()) -> Result<(), ExportError> {
        let VfioUserExport { server, device, io_thread: _ } = self;
        let stopped = server.stop(on_quiet).await;
        match Rc::try_unwrap(device) {
            Ok(device) => device.end().await,
            Err(_shared) => debug_assert!(false, "the service has ended"),
        }
        stopped
    }
}
