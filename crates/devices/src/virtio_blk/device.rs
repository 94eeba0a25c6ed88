//! State shared by the device's queues: features, configuration space, write cache mode.

use std::ffi::{CStr, CString};
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::node::Geometry;

use super::wire::{
    CONFIG_SIZE, CONFIG_WRITEBACK, Config, ID_SIZE, SECTOR, VIRTIO_BLK_F_BLK_SIZE,
    VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use crate::virtio::{CacheRecord, KeptModes};

/// Maximum data segments of a request: as QSD, a queue of 128 entries less header and status.
const SEG_MAX: u32 = 126;
/// Maximum length of a segment, bytes: the limit of one read(2), `MAX_RW_COUNT`.
const SIZE_MAX: u32 = 0x7fff_f000;
/// Maximum length of a discard or write-zeroes range: 1 GiB.
pub(crate) const MAX_RANGE_SECTORS: u32 = 1 << 21;
/// Maximum number of ranges in a discard or write-zeroes request.
pub(crate) const MAX_RANGES: u32 = 16;
/// Largest logical block, bytes: that of QSD.
const MAX_BLOCK: u32 = 2 << 20;

/// Configuration of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The geometry of the node.
    pub geometry: Geometry,
    /// Number of request queues, at least one.
    pub num_queues: u16,
    /// Size of a logical block, bytes: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether the device starts in write-through mode, also after each reset. The guest may switch to write-back.
    pub writethrough: bool,
    /// Serial number, of which the guest sees the first 20 bytes.
    pub serial: String,
}

/// A virtio-blk device, shared by its queues' threads and the control plane.
#[derive(Debug)]
pub struct Device {
    /// The configuration space, except capacity and write cache mode, which change.
    config: Config,
    /// Capacity in sectors.
    capacity: AtomicU64,
    features: u64,
    logical_block_size: u32,
    read_only: bool,
    id: [u8; ID_SIZE],
    /// The serial number in full, for trace points.
    trace_name: CString,
    negotiated: AtomicU64,
    /// The mode after a reset.
    writethrough: bool,
    /// The write cache mode set by the driver: write-back or write-through.
    writeback: AtomicBool,
    /// The record in which the mode outlives the process.
    kept: KeptModes,
}

/// The number of the only disk in the [`CacheRecord`].
const DISK: u8 = 0;

impl Device {
    /// Returns a device on a node with the configured geometry.
    ///
    /// # Errors
    ///
    /// The configuration is not valid.
    pub fn new(config: DeviceConfig) -> Result<Self, DeviceError> {
        let DeviceConfig { geometry, num_queues, logical_block_size: block, .. } = config;
        if !block.is_power_of_two() || !(SECTOR as u32..=MAX_BLOCK).contains(&block) {
            return Err(DeviceError::LogicalBlockSize(block));
        }
        if num_queues == 0 {
            return Err(DeviceError::NoQueues);
        }
        let read_only = geometry.read_only || !config.writable;
        let capacity = capacity(geometry.size, block);
        let physical = geometry.physical_block_size.max(block);
        let mut features = 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_TOPOLOGY
            | 1 << VIRTIO_BLK_F_FLUSH
            | 1 << VIRTIO_BLK_F_CONFIG_WCE
            | 1 << VIRTIO_BLK_F_MQ;
        features |= if read_only {
            1 << VIRTIO_BLK_F_RO
        } else {
            1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        };
        let mut id = [0; ID_SIZE];
        id.iter_mut().zip(config.serial.bytes()).for_each(|(to, from)| *to = from);
        let sectors = |bytes: u32| (u64::from(bytes) / SECTOR) as u32;
        Ok(Device {
            capacity: AtomicU64::new(capacity),
            config: Config {
                capacity,
                size_max: SIZE_MAX,
                seg_max: SEG_MAX,
                blk_size: block,
                physical_block_exp: (physical / block).checked_ilog2().unwrap_or(0) as u8,
                min_io_size: u16::try_from(physical / block).unwrap_or(1),
                opt_io_size: 0,
                writeback: true,
                num_queues,
                max_discard_sectors: MAX_RANGE_SECTORS,
                max_discard_seg: MAX_RANGES,
                discard_sector_alignment: sectors(geometry.discard_granularity.max(block)),
                max_write_zeroes_sectors: MAX_RANGE_SECTORS,
                max_write_zeroes_seg: MAX_RANGES,
                write_zeroes_may_unmap: geometry.discard,
            },
            features,
            logical_block_size: block,
            read_only,
            id,
            trace_name: crate::trace_name(config.serial),
            negotiated: AtomicU64::new(0),
            writethrough: config.writethrough,
            writeback: AtomicBool::new(!config.writethrough),
            kept: KeptModes::default(),
        })
    }

    /// Returns the feature bits of the device type (virtio 1.3, 5.2.3).
    ///
    /// Those of queues and transport are not among them.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Sets the accepted features, bits of [`features`](Self::features).
    ///
    /// They say whether the driver can flush.
    pub fn set_features(&self, negotiated: u64) {
        self.negotiated.store(negotiated, Ordering::Relaxed);
    }

    /// Resets the device: no features, the configured write cache mode.
    pub fn reset(&self) {
        self.set_features(0);
        self.kept.set(DISK, &self.writeback, !self.writethrough);
    }

    /// Returns whether the driver has chosen write-back mode.
    pub fn is_writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Sets the mode that another process handed over, and that the driver knows.
    pub fn set_writeback(&self, writeback: bool) {
        self.kept.set(DISK, &self.writeback, writeback);
        self.write_cache_is_known();
    }

    /// Keeps the write cache mode in `record` from now on.
    ///
    /// The mode that an earlier process recorded is taken over if it is stricter: write-through replaces write-back.
    /// Returns whether the record was in use. No queue may run.
    pub fn keep_write_cache(&self, record: Option<CacheRecord>) -> bool {
        self.kept.keep(record, iter::once(&self.writeback))
    }

    /// Records the write cache mode for the next process.
    ///
    /// Call this once the driver has seen the answer to its write to the configuration space.
    pub fn write_cache_is_known(&self) {
        self.kept.answered(iter::once(&self.writeback));
    }

    /// Returns the current configuration space.
    pub fn config_space(&self) -> [u8; CONFIG_SIZE] {
        Config {
            capacity: self.capacity.load(Ordering::Relaxed),
            writeback: self.writeback.load(Ordering::Relaxed),
            ..self.config
        }
        .to_bytes()
    }

    /// Sets the node's size in bytes.
    ///
    /// Returns whether the configuration space has changed, of which the driver must be notified (5.2.5.1).
    pub fn set_size(&self, bytes: u64) -> bool {
        let capacity = capacity(bytes, self.logical_block_size);
        self.capacity.swap(capacity, Ordering::Relaxed) != capacity
    }

    /// Writes to the configuration space from byte `offset` on.
    ///
    /// Only `writeback` is writable (5.2.5): 0 is write-through, all other values are write-back.
    ///
    /// # Errors
    ///
    /// The write includes other bytes, which were ignored.
    pub fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigIgnored> {
        let index = CONFIG_WRITEBACK.checked_sub(offset as usize);
        let value = index.and_then(|index| data.get(index));
        if let Some(value) = value {
            self.kept.set(DISK, &self.writeback, *value != 0);
        }
        match (value, data.len()) {
            (Some(_), 1) => Ok(()),
            (_, len) => Err(ConfigIgnored { offset, len }),
        }
    }

    /// Whether each write must reach stable storage before it is answered: the driver chose write-through, or cannot
    /// flush (5.2.6.2).
    pub(crate) fn is_write_through(&self) -> bool {
        let negotiated = self.negotiated.load(Ordering::Relaxed);
        if negotiated & (1 << VIRTIO_BLK_F_CONFIG_WCE) != 0 {
            !self.writeback.load(Ordering::Relaxed)
        } else {
            self.writethrough || negotiated & (1 << VIRTIO_BLK_F_FLUSH) == 0
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(crate) fn trace_name(&self) -> &CStr {
        &self.trace_name
    }

    pub(crate) fn id(&self) -> &[u8; ID_SIZE] {
        &self.id
    }

    /// Converts a range of sectors to its first byte. Returns `None` if it is not on the disk, or not in whole
    /// blocks.
    pub(crate) fn range(&self, sector: u64, bytes: u64) -> Option<u64> {
        let offset = sector.checked_mul(SECTOR)?;
        let end = offset.checked_add(bytes)?;
        let block = u64::from(self.logical_block_size);
        let whole = offset.is_multiple_of(block) && bytes.is_multiple_of(block);
        (whole && end <= self.capacity.load(Ordering::Relaxed) * SECTOR).then_some(offset)
    }
}

/// Number of sectors in the whole blocks of `bytes` bytes.
fn capacity(bytes: u64, block: u32) -> u64 {
    (bytes - bytes % u64::from(block)) / SECTOR
}

/// Why a configuration is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The logical block size is not a power of two from 512 to 2 MiB.
    #[error("logical-block-size {0} must be a power of 2 between 512 and {MAX_BLOCK} (bytes)")]
    LogicalBlockSize(u32),
    /// A device without queues.
    #[error("num-queues must be at least 1")]
    NoQueues,
}

/// A write to the configuration space of which bytes were ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the driver writes {len} bytes at offset {offset} of the configuration space, of which only the \
     writeback toggle, 1 byte at {CONFIG_WRITEBACK}, is writable; ignored the others"
)]
pub struct ConfigIgnored {
    /// First byte of the write, in the configuration space.
    pub offset: u32,
    /// Length, bytes.
    pub len: usize,
}
