//! virtio-blk over vhost-user: a block node offered to a virtual machine.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::flush::{FlushDone, flush};
use block::node::{BlockNode, Channel, Watcher};
use devices::virtio::{CacheRecord, Virtqueue};
use devices::virtio_blk::{self, DeviceConfig, start_queue};
use event_loop::{EventLoop, Signal};
use queue::Queue;
use stats::QueueStats;

use super::device::{Device, DeviceOnLoop};
use super::error::ExportError;
use super::export::{VhostUserConfig, VhostUserExport, queue_stats};
use super::server::MAX_QUEUES;

impl VhostUserExport {
    /// Offers a node as a virtio-blk device.
    ///
    /// The first 20 bytes of the serial number count.
    ///
    /// Front ends can connect when this returns. [`VhostUserConfig::num_queues`] is at most 256, and 1
    /// by default, as in qemu-storage-daemon.
    ///
    /// # Errors
    ///
    /// When the configuration is out of range, the socket cannot be listened on, or the node cannot
    /// be used from one of the I/O threads.
    pub async fn blk(
        control_loop: EventLoop,
        config: VhostUserConfig,
        node: Arc<dyn BlockNode>,
        serial: String,
    ) -> Result<Self, ExportError> {
        let num_queues = config.num_queues.unwrap_or(1);
        let stats = queue_stats(num_queues, MAX_QUEUES)?;
        let device = DeviceConfig {
            geometry: node.geometry(),
            num_queues,
            logical_block_size: config.logical_block_size,
            writable: config.writable,
            writethrough: config.writethrough,
            serial,
        };
        let blk = Blk::new(device, node, stats.clone())?;
        VhostUserExport::start(control_loop, config, Arc::new(blk), stats).await
    }
}

/// The device as the server sees it.
pub(crate) struct Blk {
    device: Arc<virtio_blk::Device>,
    num_queues: u16,
    node: Arc<dyn BlockNode>,
    stats: Arc<[Arc<QueueStats>]>,
}

impl Blk {
    /// A device on a node. `stats`: the counters of each queue.
    ///
    /// # Errors
    ///
    /// The configuration is out of range.
    pub(crate) fn new(
        config: DeviceConfig,
        node: Arc<dyn BlockNode>,
        stats: Arc<[Arc<QueueStats>]>,
    ) -> Result<Blk, ExportError> {
        let num_queues = config.num_queues;
        let device = virtio_blk::Device::new(config)
            .map_err(|error| ExportError::Config(error.to_string()))?;
        Ok(Blk { device: Arc::new(device), num_queues, node, stats })
    }
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

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<Option<String>, String> {
        Ok(self.device.write_config(offset, data).err().map(|ignored| ignored.to_string()))
    }

    fn save(&self) -> Vec<u8> {
        vec![self.device.is_writeback().into()]
    }

    fn restore(&self, saved: &[u8]) {
        if let [writeback @ (0 | 1)] = saved {
            self.device.set_writeback(*writeback == 1);
        }
    }

    fn keep_write_cache(&self, record: Option<CacheRecord>) -> bool {
        self.device.keep_write_cache(record)
    }

    fn answered(&self) {
        self.device.write_cache_is_known();
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
        call: Option<Signal>,
    ) -> Rc<dyn Virtqueue> {
        let stats = self.blk.stats.get(usize::from(index)).cloned().unwrap_or_default();
        start_queue(
            &self.event_loop,
            self.blk.device.clone(),
            self.channel.for_queue().unwrap_or_else(|| self.channel.clone()),
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
