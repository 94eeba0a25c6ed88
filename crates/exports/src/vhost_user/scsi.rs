//! virtio-scsi over vhost-user: block nodes offered to a virtual machine as the logical units of one
//! target.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::flush::{FlushDone, flush};
use block::node::{BlockNode, Channel, Watcher};
use devices::virtio::{CacheRecord, Virtqueue};
use devices::virtio_scsi::{self, DeviceConfig, FIRST_REQUEST_QUEUE, LunConfig};
use event_loop::{EventLoop, Signal};
use queue::Queue;
use stats::QueueStats;

use super::device::{Device, DeviceOnLoop};
use super::error::ExportError;
use super::export::{VhostUserConfig, VhostUserExport, queue_stats};
use super::server::MAX_QUEUES;

/// Maximum number of request queues.
///
/// The control queue and the event queue take two of all.
pub const MAX_REQUEST_QUEUES: u16 = MAX_QUEUES - FIRST_REQUEST_QUEUE;

impl VhostUserExport {
    /// Offers nodes, 1 to 256, as logical units of a virtio-scsi device, LUN 0 first.
    ///
    /// Front ends can connect when this returns. [`VhostUserConfig::num_queues`] is at most
    /// [`MAX_REQUEST_QUEUES`], which is also the default: QEMU insists on a queue for each vCPU unless
    /// told otherwise. Serial numbers are `<id>-<lun>`.
    ///
    /// # Errors
    ///
    /// When the configuration is out of range, the socket cannot be listened on, or a node cannot
    /// be used from one of the I/O threads.
    pub async fn scsi(
        control_loop: EventLoop,
        config: VhostUserConfig,
        nodes: Vec<Arc<dyn BlockNode>>,
    ) -> Result<Self, ExportError> {
        let id = &config.id;
        let num_queues = config.num_queues.unwrap_or(MAX_REQUEST_QUEUES);
        let stats = queue_stats(num_queues, MAX_REQUEST_QUEUES)?;
        let lun = |(number, node): (usize, &Arc<dyn BlockNode>)| LunConfig {
            geometry: node.geometry(),
            serial: format!("{id}-{number}"),
        };
        let device = virtio_scsi::Device::new(DeviceConfig {
            name: id.clone(),
            luns: nodes.iter().enumerate().map(lun).collect(),
            num_queues,
            logical_block_size: config.logical_block_size,
            writable: config.writable,
            writethrough: config.writethrough,
        })
        .map_err(|error| ExportError::Config(error.to_string()))?;
        let scsi = Scsi { device: Arc::new(device), nodes, stats: stats.clone() };
        VhostUserExport::start(control_loop, config, Arc::new(scsi), stats).await
    }
}

/// The device as the server sees it.
struct Scsi {
    device: Arc<virtio_scsi::Device>,
    nodes: Vec<Arc<dyn BlockNode>>,
    stats: Arc<[Arc<QueueStats>]>,
}

impl Device for Scsi {
    fn features(&self) -> u64 {
        self.device.features()
    }

    fn set_features(&self, negotiated: u64) {
        if negotiated == 0 {
            // Nobody, or somebody else: unlike a configuration space, unit attention tells a driver.
            self.device.reset();
        }
        self.device.set_features(negotiated);
    }

    fn reset(&self) {
        self.device.reset();
    }

    fn num_queues(&self) -> u16 {
        self.stats.len() as u16 + FIRST_REQUEST_QUEUE
    }

    fn has_config(&self) -> bool {
        false
    }

    fn config_space(&self) -> Vec<u8> {
        self.device.config_space().to_vec()
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<Option<String>, String> {
        let ignored = self.device.write_config(offset, data).map_err(|error| error.to_string())?;
        Ok(ignored.then(|| {
            format!(
                "the driver writes {} bytes at offset {offset} of the configuration space, which are \
                 not writable; ignored them",
                data.len()
            )
        }))
    }

    fn save(&self) -> Vec<u8> {
        self.device.save()
    }

    fn restore(&self, saved: &[u8]) {
        self.device.restore(saved);
    }

    fn keep_write_cache(&self, record: Option<CacheRecord>) -> bool {
        self.device.keep_write_caches(record)
    }

    fn watch(&self, watcher: &Watcher) {
        self.nodes.iter().for_each(|node| node.watch(watcher.clone()));
    }

    fn refresh(&self) -> bool {
        let sizes = self.nodes.iter().map(|node| node.geometry().size);
        sizes.enumerate().for_each(|(lun, size)| self.device.set_size(lun, size));
        // The logical units tell of it themselves.
        false
    }

    fn attach(self: Arc<Self>, event_loop: &EventLoop) -> io::Result<Rc<dyn DeviceOnLoop>> {
        let open = |node: &Arc<dyn BlockNode>| node.clone().open_channel(event_loop);
        let channels: Vec<_> = self.nodes.iter().map(open).collect::<io::Result<_>>()?;
        let on_loop =
            virtio_scsi::DeviceOnLoop::new(event_loop, self.device.clone(), channels.clone());
        Ok(Rc::new(ScsiOnLoop { scsi: self, on_loop, channels }))
    }
}

/// The device on one loop.
struct ScsiOnLoop {
    scsi: Arc<Scsi>,
    on_loop: Rc<virtio_scsi::DeviceOnLoop>,
    channels: Vec<Rc<dyn Channel>>,
}

impl DeviceOnLoop for ScsiOnLoop {
    fn start_queue(
        &self,
        index: u16,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Signal>,
    ) -> Rc<dyn Virtqueue> {
        let request_queue = index.checked_sub(FIRST_REQUEST_QUEUE).map(usize::from);
        let stats = request_queue.and_then(|index| self.scsi.stats.get(index));
        self.on_loop.start_queue(index, queue, kick, call, stats.cloned().unwrap_or_default())
    }

    fn flush(&self, done: FlushDone) {
        let nodes = self.channels.iter().zip(&self.scsi.nodes);
        let writable = nodes.filter(|(_, node)| !node.geometry().read_only);
        flush(writable.map(|(channel, _)| channel), done);
    }
}
