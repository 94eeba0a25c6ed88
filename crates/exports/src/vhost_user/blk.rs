//! virtio-blk over vhost-user: a block node offered to a virtual machine.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::node::{BlockNode, Channel, Watcher};
use devices::QueueStats;
use devices::virtio::Virtqueue;
use devices::virtio_blk::{self, DeviceConfig, start_queue};
use event_loop::{EventLoop, LoopHandle};
use queue::Queue;

use super::device::{Device, DeviceOnLoop, FlushDone};
use super::error::ExportError;
use super::export::{VhostUserExport, queue_stats};
use super::flush::flush;
use super::listener::Listen;
use super::server::MAX_QUEUES;

/// What `--export type=vhost-user-blk` says.
pub struct VhostUserBlkConfig {
    /// `id`: its name in messages.
    pub id: String,
    /// `addr`.
    pub listen: Listen,
    /// `node-name`.
    pub node: Arc<dyn BlockNode>,
    /// `iothread`: at least one; queue i is served by thread i, counted round.
    pub io_threads: Vec<LoopHandle>,
    /// `num-queues`: from 1 to 256.
    pub num_queues: u16,
    /// `writable`.
    pub writable: bool,
    /// Whether the guest finds the write cache off. It may switch it on.
    pub writethrough: bool,
    /// `logical-block-size`: bytes, a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// `pin-memory`: the guest's memory is registered with the I/O threads' rings, which saves the
    /// look-up of its pages with every request, and pins all of it. Pages that the VMM discards
    /// meanwhile (balloon, free page reporting, hot-unplug by holes) would be lost to the guest. Where
    /// it cannot be had, a warning says why.
    pub pin_memory: bool,
    /// Serial number; its first 20 bytes count.
    pub serial: String,
}

impl VhostUserExport {
    /// Offers a node as a virtio-blk device. When this returns front ends can connect.
    ///
    /// # Errors
    ///
    /// When the configuration is out of range, the socket cannot be listened on, or the node cannot
    /// be used from one of the I/O threads.
    pub async fn blk(
        control_loop: EventLoop,
        config: VhostUserBlkConfig,
    ) -> Result<Self, ExportError> {
        let VhostUserBlkConfig { id, listen, node, io_threads, num_queues, .. } = config;
        let stats = queue_stats(num_queues, MAX_QUEUES)?;
        let device = virtio_blk::Device::new(DeviceConfig {
            geometry: node.geometry(),
            num_queues,
            logical_block_size: config.logical_block_size,
            writable: config.writable,
            writethrough: config.writethrough,
            serial: config.serial,
        })
        .map_err(|error| ExportError::Config(error.to_string()))?;
        let blk = Blk { device: Arc::new(device), num_queues, node, stats: stats.clone() };
        let (pin, blk) = (config.pin_memory, Arc::new(blk));
        VhostUserExport::start(control_loop, id, listen, io_threads, blk, stats, pin).await
    }
}

/// The device as the server sees it.
struct Blk {
    device: Arc<virtio_blk::Device>,
    num_queues: u16,
    node: Arc<dyn BlockNode>,
    stats: Arc<[Arc<QueueStats>]>,
}

impl Device for Blk {
    fn features(&self) -> u64 {
        self.device.features()
    }

    fn set_features(&self, negotiated: u64) {
        self.device.set_features(negotiated);
    }

    fn reset(&self) {
        self.device.reset();
    }

    fn num_queues(&self) -> u16 {
        self.num_queues
    }

    fn config_space(&self) -> Vec<u8> {
        self.device.config_space().to_vec()
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), String> {
        self.device.write_config(offset, data).map_err(|error| error.to_string())
    }

    fn watch(&self, watcher: &Watcher) {
        self.node.watch(watcher.clone());
    }

    fn refresh(&self) -> bool {
        self.device.set_size(self.node.geometry().size)
    }

    fn attach(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>> {
        let channel = self.node.clone().open_channel(event_loop)?;
        Ok(Rc::new(BlkOnLoop { event_loop: event_loop.clone(), blk: self, channel }))
    }
}

/// The device on one loop: its queues there share a channel to the node.
struct BlkOnLoop {
    event_loop: EventLoop,
    blk: Arc<Blk>,
    channel: Rc<dyn Channel>,
}

impl DeviceOnLoop for BlkOnLoop {
    fn start_queue(
        &self,
        index: u16,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Arc<OwnedFd>>,
    ) -> Rc<dyn Virtqueue> {
        let stats = self.blk.stats.get(usize::from(index)).cloned().unwrap_or_default();
        start_queue(
            &self.event_loop,
            self.blk.device.clone(),
            self.channel.clone(),
            queue,
            kick,
            call,
            stats,
        )
    }

    fn flush(&self, done: FlushDone) {
        let writable = !self.blk.node.geometry().read_only;
        flush(writable.then_some(&self.channel).into_iter(), done);
    }
}
