//! State shared by the device's queues: logical units, features, configuration space; and the channels to its
//! parts on other threads.

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

/// Maximum data segments of a request: a queue of 128 entries less request and response.
const SEG_MAX: u32 = 126;
/// Maximum length of a request, sectors of 512 bytes: the value that 5.6.4 recommends for no limit.
const MAX_SECTORS: u32 = 0xffff;
/// Requests that a driver should keep in flight on a logical unit.
const CMD_PER_LUN: u32 = 128;
/// Maximum number of logical units: the range of peripheral device addressing.
pub const MAX_LUNS: usize = 256;
/// Largest logical block, bytes: that of QSD's virtio-blk.
const MAX_BLOCK: u32 = 2 << 20;

/// Configuration of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Its name in trace points.
    pub name: String,
    /// Logical units, 1 to [`MAX_LUNS`], numbered from 0.
    pub luns: Vec<LunConfig>,
    /// Number of request queues, at least one.
    pub num_queues: u16,
    /// Size of a logical block, bytes: a power of two from 512 to 2 MiB.
    pub logical_block_size: u32,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether the device starts with its write cache off. The guest may switch it on.
    pub writethrough: bool,
}

/// A virtio-scsi device with one target.
///
/// Its queues' threads and the control plane share it.
pub struct Device {
    trace_name: CString,
    luns: Box<[Lun]>,
    num_queues: u16,
    negotiated: AtomicU64,
    /// Number of logical units with a pending event.
    events: AtomicUsize,
    /// The device's parts, one per loop that has queues.
    parts: Mutex<Vec<Part>>,
    /// The record in which the units' write cache modes (WCE) outlive the process.
    kept: KeptModes,
}

/// The way to send orders to a part.
struct Part {
    id: u64,
    orders: mailbox::Sender<Order>,
}

impl Device {
    /// Returns a device on nodes with the configured geometries.
    ///
    /// # Errors
    ///
    /// The configuration is not valid.
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

    /// Returns the feature bits of the device type (virtio 1.3, 5.6.3).
    ///
    /// Those of queues and transport are not among them.
    pub fn features(&self) -> u64 {
        1 << VIRTIO_SCSI_F_CHANGE
    }

    /// Sets the accepted features, bits of [`features`](Self::features).
    ///
    /// They say whether it accepts events.
    pub fn set_features(&self, negotiated: u64) {
        self.negotiated.store(negotiated, Ordering::Relaxed);
    }

    /// Resets the device.
    ///
    /// Each logical unit gets a unit attention condition for the new driver.
    pub fn reset(&self) {
        self.set_features(0);
        self.luns.iter().for_each(|lun| lun.attend(Attention::PowerOn));
    }

    /// Returns the state of the logical units for a process that takes over.
    ///
    /// The state has two bytes per logical unit.
    pub fn save(&self) -> Vec<u8> {
        self.luns.iter().flat_map(Lun::save).collect()
    }

    /// Restores state [saved](Self::save) by another process.
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

    /// Keeps WCE of the logical units in `record` from now on.
    ///
    /// The modes that an earlier process recorded are taken over if they are stricter: a cache goes off, not on.
    /// Returns whether the record was in use. No queue may run.
    pub fn keep_write_caches(&self, record: Option<CacheRecord>) -> bool {
        self.kept.keep(record, self.luns.iter().map(Lun::write_cache))
    }

    /// Sets WCE of a logical unit.
    pub(crate) fn set_write_cache(&self, number: u16, on: bool) {
        if let (Some(lun), Ok(disk)) = (self.lun(number), u8::try_from(number)) {
            self.kept.set(disk, lun.write_cache(), on);
        }
    }

    /// Records the write cache modes, once the driver has seen the answer to a MODE SELECT.
    pub(crate) fn write_caches_are_known(&self) {
        self.kept.answered(self.luns.iter().map(Lun::write_cache));
    }

    pub(crate) fn trace_name(&self) -> &CStr {
        &self.trace_name
    }

    /// Returns the configuration space.
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

    /// Writes to the configuration space from byte `offset` on (5.6.4).
    ///
    /// Writes the fields in any number of parts, as legacy drivers write each byte. Only the present sizes of CDB and
    /// sense data are accepted. Returns whether other fields were written, which is ignored.
    ///
    /// # Errors
    ///
    /// The write would change the size of CDB or sense data, and with it the layout of requests.
    pub fn write_config(&self, offset: u32, data: &[u8]) -> Result<bool, ConfigError> {
        let space = self.config_space();
        let mut ignored = false;
        for (at, byte) in (offset as usize..).zip(data) {
            match (CONFIG_SENSE_SIZE..CONFIG_CDB_SIZE + 4).contains(&at) {
                true if space.get(at) == Some(byte) => {}
                true => return Err(ConfigError { offset, len: data.len() }),
                false => ignored = true,
            }
        }
        Ok(ignored)
    }

    /// Sets the size of logical unit `lun`'s node, in bytes.
    ///
    /// A new capacity is reported to the driver by a unit attention condition, and by an event if the driver accepts
    /// events.
    pub fn set_size(&self, lun: usize, bytes: u64) {
        let Some(lun) = self.luns.get(lun) else { return };
        if !lun.set_size(bytes) {
            return;
        }
        if lun.set_event(true) {
            self.events.fetch_add(1, Ordering::Relaxed);
        }
        for part in lock(&self.parts).iter() {
            // Fails if the part's loop has ended, and with it its event queue.
            let _ = part.orders.send(Order::TellEvents);
        }
    }

    pub(crate) fn lun(&self, number: u16) -> Option<&Lun> {
        self.luns.get(usize::from(number))
    }

    pub(crate) fn luns(&self) -> &[Lun] {
        &self.luns
    }

    /// Whether an event is pending that the driver accepts.
    pub(crate) fn has_event(&self) -> bool {
        self.events.load(Ordering::Relaxed) > 0
            && self.negotiated.load(Ordering::Relaxed) & (1 << VIRTIO_SCSI_F_CHANGE) != 0
    }

    /// Takes a pending event: the number of a logical unit with a new capacity.
    pub(crate) fn take_event(&self) -> Option<u16> {
        let number = self.luns.iter().position(|lun| lun.set_event(false))?;
        self.events.fetch_sub(1, Ordering::Relaxed);
        Some(number as u16)
    }

    /// Adds the part of a loop. Returns its number, and the receiver of its orders.
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

    /// Sends an order to all parts. Each part answers to one of the receivers.
    pub(crate) fn order_all<T>(
        &self,
        order: impl Fn(oneshot::Sender<T>) -> Order,
    ) -> Vec<oneshot::Receiver<T>> {
        let ask = |part: &Part| {
            let (sender, receiver) = oneshot::channel();
            // Fails if the part's loop has ended, which closes the receiver.
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

/// Why a configuration is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The logical block size is not a power of two from 512 to 2 MiB.
    #[error("logical-block-size {0} must be a power of 2 between 512 and {MAX_BLOCK} (bytes)")]
    LogicalBlockSize(u32),
    /// A device without request queues.
    #[error("num-queues must be at least 1")]
    NoQueues,
    /// Too many logical units, or none.
    #[error("a target has from 1 to {MAX_LUNS} logical units, not {0}")]
    Luns(usize),
}

/// A refused write to the configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{len} bytes at offset {offset} of the configuration space cannot be written; sense_size and \
     cdb_size take {SENSE_SIZE} and {CDB_SIZE}"
)]
pub struct ConfigError {
    /// First byte of the write, in the configuration space.
    pub offset: u32,
    /// Length, bytes.
    pub len: usize,
}
