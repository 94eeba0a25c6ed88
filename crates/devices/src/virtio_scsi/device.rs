//! The device as its queues share it: logical units, features, configuration space; and the ways to
//! its parts on other threads.

use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use event_loop::mailbox;
use event_loop::oneshot;
use event_loop::sync::lock;

use super::lun::{Attention, Lun, LunConfig};
use super::tasks::Order;
use super::wire::{
    CDB_SIZE, CONFIG_CDB_SIZE, CONFIG_SENSE_SIZE, CONFIG_SIZE, Config, SENSE_SIZE,
    VIRTIO_SCSI_F_CHANGE,
};
use crate::virtio::{CacheRecord, KeptModes};

/// Most data segments of a request: a 128-entry queue less the request and the response.
const SEG_MAX: u32 = 126;
/// Longest request, sectors of 512 bytes: what 5.6.4 recommends for a device without a limit.
const MAX_SECTORS: u32 = 0xffff;
/// Requests that a driver should keep in flight on a logical unit.
const CMD_PER_LUN: u32 = 128;
/// Most logical units: numbers that peripheral device addressing has.
pub const MAX_LUNS: usize = 256;
/// Largest logical block, bytes: that of QSD's virtio-blk.
const MAX_BLOCK: u32 = 2 << 20;

/// What a device is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Its name in trace points.
    pub name: String,
    /// Logical units, 1 to [`MAX_LUNS`], numbered from 0.
    pub luns: Vec<LunConfig>,
    /// Request queues, at least one.
    pub num_queues: u16,
    /// Bytes of a logical block: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether the device begins without a write cache. The guest may switch it on.
    pub writethrough: bool,
}

/// A virtio-scsi device with one target, shared by its queues' threads and the control plane.
pub struct Device {
    trace_name: CString,
    luns: Box<[Lun]>,
    num_queues: u16,
    negotiated: AtomicU64,
    /// Logical units that have an event to tell.
    events: AtomicUsize,
    /// Its parts, one on each loop that has queues.
    parts: Mutex<Vec<Part>>,
    /// Where WCE of its logical units outlives the process.
    kept: KeptModes,
}

/// The way to a part.
struct Part {
    id: u64,
    orders: mailbox::Sender<Order>,
}

impl Device {
    /// A device over nodes with these geometries.
    ///
    /// # Errors
    ///
    /// When the numbers do not fit together.
    pub fn new(config: DeviceConfig) -> Result<Self, DeviceError> {
        let block = config.logical_block_size;
        if !block.is_power_of_two() || !(512..=MAX_BLOCK).contains(&block) {
            return Err(DeviceError::LogicalBlockSize(block));
        }
        if config.num_queues == 0 {
            return Err(DeviceError::NoQueues);
        }
        if !(1..=MAX_LUNS).contains(&config.luns.len()) {
            return Err(DeviceError::Luns(config.luns.len()));
        }
        let (writable, writethrough) = (config.writable, config.writethrough);
        let lun = |lun| Lun::new(lun, block, writable, writethrough);
        Ok(Device {
            trace_name: crate::trace_name(config.name),
            luns: config.luns.into_iter().map(lun).collect(),
            num_queues: config.num_queues,
            negotiated: AtomicU64::new(0),
            events: AtomicUsize::new(0),
            parts: Mutex::new(Vec::new()),
            kept: KeptModes::default(),
        })
    }

    /// The device's own feature bits (5.6.3); those of queues and transport are not its business.
    pub fn features(&self) -> u64 {
        1 << VIRTIO_SCSI_F_CHANGE
    }

    /// The features that the driver took. They say whether it wants to hear of changes.
    pub fn set_features(&self, negotiated: u64) {
        self.negotiated.store(negotiated, Ordering::Relaxed);
    }

    /// Another driver comes, or the same one after a reset: each logical unit tells it so.
    pub fn reset(&self) {
        self.set_features(0);
        self.luns.iter().for_each(|lun| lun.attend(Attention::PowerOn));
    }

    /// What its logical units have to remember, for the process that takes over: two bytes of each.
    pub fn save(&self) -> Vec<u8> {
        self.luns.iter().flat_map(Lun::save).collect()
    }

    /// Goes on with what another process has [saved](Self::save).
    pub fn restore(&self, saved: &[u8]) {
        let events: usize = self
            .luns
            .iter()
            .zip(saved.chunks_exact(2))
            .filter(|(lun, saved)| lun.restore(saved))
            .count();
        self.events.store(events, Ordering::Relaxed);
        self.write_caches_are_known();
    }

    /// Keeps WCE of the logical units in `record` from now on. What that says of a driver that a process
    /// before this one has served is taken over: it may switch a write cache off, not on. Whether it says
    /// something. No queue runs.
    pub fn keep_write_caches(&self, record: Option<CacheRecord>) -> bool {
        self.kept.keep(record, self.luns.iter().map(Lun::write_cache))
    }

    /// Sets WCE of a logical unit.
    pub(crate) fn set_write_cache(&self, number: u16, on: bool) {
        if let (Some(lun), Ok(disk)) = (self.lun(number), u8::try_from(number)) {
            self.kept.set(disk, lun.write_cache(), on);
        }
    }

    /// The driver has seen the answer to a MODE SELECT.
    pub(crate) fn write_caches_are_known(&self) {
        self.kept.answered(self.luns.iter().map(Lun::write_cache));
    }

    pub(crate) fn trace_name(&self) -> &CStr {
        &self.trace_name
    }

    /// The configuration space.
    pub fn config_space(&self) -> [u8; CONFIG_SIZE] {
        Config {
            num_queues: self.num_queues.into(),
            seg_max: SEG_MAX,
            max_sectors: MAX_SECTORS,
            cmd_per_lun: CMD_PER_LUN,
            max_lun: self.luns.len() as u32 - 1,
        }
        .to_bytes()
    }

    /// Writes to the configuration space: the sizes of CDB and sense data take what they are.
    ///
    /// # Errors
    ///
    /// When anything would be changed.
    pub fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigError> {
        match offset as usize {
            CONFIG_SENSE_SIZE if data == (SENSE_SIZE as u32).to_le_bytes() => Ok(()),
            CONFIG_CDB_SIZE if data == (CDB_SIZE as u32).to_le_bytes() => Ok(()),
            _ => Err(ConfigError { offset, len: data.len() }),
        }
    }

    /// The node behind logical unit `lun` has `bytes` bytes now. If that is another capacity, the
    /// driver is told: by a unit attention condition, and by an event if it takes these.
    pub fn set_size(&self, lun: usize, bytes: u64) {
        let Some(lun) = self.luns.get(lun) else { return };
        if !lun.set_size(bytes) {
            return;
        }
        if lun.set_event(true) {
            self.events.fetch_add(1, Ordering::Relaxed);
        }
        for part in lock(&self.parts).iter() {
            // A part whose loop is gone has no queue to tell it on.
            let _ = part.orders.send(Order::TellEvents);
        }
    }

    pub(crate) fn lun(&self, number: u16) -> Option<&Lun> {
        self.luns.get(usize::from(number))
    }

    pub(crate) fn luns(&self) -> &[Lun] {
        &self.luns
    }

    /// Whether there is an event that the driver wants to hear of.
    pub(crate) fn has_event(&self) -> bool {
        self.events.load(Ordering::Relaxed) > 0
            && self.negotiated.load(Ordering::Relaxed) & (1 << VIRTIO_SCSI_F_CHANGE) != 0
    }

    /// Takes an event: the number of a logical unit whose capacity has changed.
    pub(crate) fn take_event(&self) -> Option<u16> {
        let number = self.luns.iter().position(|lun| lun.set_event(false))?;
        self.events.fetch_sub(1, Ordering::Relaxed);
        Some(number as u16)
    }

    /// A new part, on some loop: its number, and where its orders come.
    pub(crate) fn add_part(&self) -> (u64, mailbox::Receiver<Order>) {
        let (orders, receiver) = mailbox::channel();
        let mut parts = lock(&self.parts);
        let id = parts.last().map_or(0, |last| last.id + 1);
        parts.push(Part { id, orders });
        (id, receiver)
    }

    pub(crate) fn remove_part(&self, id: u64) {
        lock(&self.parts).retain(|part| part.id != id);
    }

    /// Gives an order to all parts; the answers come from each.
    pub(crate) fn order_all<T>(
        &self,
        order: impl Fn(oneshot::Sender<T>) -> Order,
    ) -> Vec<oneshot::Receiver<T>> {
        let ask = |part: &Part| {
            let (sender, receiver) = oneshot::channel();
            // Of a part whose loop is gone, the receiver learns that.
            let _ = part.orders.send(order(sender));
            receiver
        };
        lock(&self.parts).iter().map(ask).collect()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("luns", &self.luns).finish_non_exhaustive()
    }
}

/// A device that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceError {
    /// The logical block size is no power of two from 512 to 2 MiB.
    LogicalBlockSize(u32),
    /// A device without request queues.
    NoQueues,
    /// Too many logical units, or none.
    Luns(usize),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::LogicalBlockSize(size) => write!(
                f,
                "logical-block-size {size} must be a power of 2 between 512 and {MAX_BLOCK} (bytes)"
            ),
            DeviceError::NoQueues => f.write_str("num-queues must be at least 1"),
            DeviceError::Luns(luns) => {
                write!(f, "a target has from 1 to {MAX_LUNS} logical units, not {luns}")
            }
        }
    }
}

impl std::error::Error for DeviceError {}

/// A write to the configuration space that it does not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigError {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub len: usize,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes at offset {} of the configuration space cannot be written; sense_size and \
             cdb_size take {SENSE_SIZE} and {CDB_SIZE}",
            self.len, self.offset
        )
    }
}

impl std::error::Error for ConfigError {}
