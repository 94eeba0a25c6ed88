//! A logical unit: its properties and its state.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use block::node::Geometry;

use super::cdb::Blocks;
use super::sense::Sense;

/// Maximum length of an UNMAP or WRITE SAME range: 1 GiB.
const MAX_RANGE: u64 = 1 << 30;
/// Maximum length of a read or write, bytes: the limit of one read(2), `MAX_RW_COUNT`.
const MAX_TRANSFER: u64 = 0x7fff_f000;

/// Configuration of a logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LunConfig {
    /// The geometry of the node.
    pub geometry: Geometry,
    /// Serial number in ASCII, part of the device identification.
    pub serial: String,
}

/// Unit attention conditions (SAM-5, 5.14) in the order of their priority: the bit of each, and its sense data.
const ATTENTIONS: [(u8, Sense); 4] = [
    // POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
    (Attention::PowerOn as u8, Sense::attention(0x29, 0x00)),
    // BUS DEVICE RESET FUNCTION OCCURRED.
    (Attention::Reset as u8, Sense::attention(0x29, 0x03)),
    // I_T NEXUS LOSS OCCURRED.
    (Attention::NexusLoss as u8, Sense::attention(0x29, 0x07)),
    // CAPACITY DATA HAS CHANGED.
    (Attention::Capacity as u8, Sense::attention(0x2a, 0x09)),
];

/// A unit attention condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attention {
    PowerOn = 1,
    Reset = 2,
    NexusLoss = 4,
    Capacity = 8,
}

/// A logical unit, shared by all threads.
#[derive(Debug)]
pub(crate) struct Lun {
    /// Size of a logical block, bytes.
    pub(crate) block_size: u32,
    /// A physical block has `1 << physical_exp` logical blocks.
    pub(crate) physical_exp: u8,
    pub(crate) read_only: bool,
    /// Whether the node supports UNMAP.
    pub(crate) thin: bool,
    /// Granularity of UNMAP, logical blocks.
    pub(crate) unmap_granularity: u32,
    pub(crate) serial: String,
    /// Capacity in logical blocks.
    blocks: AtomicU64,
    /// The default of the write cache mode in the caching page.
    pub(crate) default_write_cache: bool,
    /// WCE in the caching page.
    write_cache: AtomicBool,
    /// Pending [`Attention`]s.
    attentions: AtomicU8,
    /// An event for a changed capacity is pending.
    event: AtomicBool,
}

impl Lun {
    /// `block`: size of a logical block, bytes, a power of two.
    pub(crate) fn new(config: LunConfig, block: u32, writable: bool, writethrough: bool) -> Self {
        let LunConfig { geometry, serial } = config;
        let read_only = geometry.read_only || !writable;
        let physical = geometry.physical_block_size.max(block);
        Lun {
            block_size: block,
            physical_exp: (physical / block).checked_ilog2().unwrap_or(0).min(15) as u8,
            read_only,
            thin: geometry.discard && !read_only,
            unmap_granularity: geometry.discard_granularity.max(block) / block,
            serial,
            blocks: AtomicU64::new(geometry.size / u64::from(block)),
            default_write_cache: !writethrough,
            write_cache: AtomicBool::new(!writethrough),
            attentions: AtomicU8::new(Attention::PowerOn as u8),
            event: AtomicBool::new(false),
        }
    }

    /// Logical blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Sets the node's size in bytes. Returns whether the capacity has changed.
    pub(crate) fn set_size(&self, bytes: u64) -> bool {
        let blocks = bytes / u64::from(self.block_size);
        let changed = self.blocks.swap(blocks, Ordering::Relaxed) != blocks;
        if changed {
            self.attend(Attention::Capacity);
        }
        changed
    }

    /// Sets whether an event is pending. Returns whether that is a change.
    pub(crate) fn set_event(&self, there_is: bool) -> bool {
        self.event.swap(there_is, Ordering::Relaxed) != there_is
    }

    /// Whether each write must be on the medium before it is answered.
    pub(crate) fn is_write_through(&self) -> bool {
        !self.has_write_cache()
    }

    /// WCE.
    pub(crate) fn has_write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    /// WCE, which changes through the device's [`KeptModes`](crate::virtio::KeptModes).
    pub(crate) fn write_cache(&self) -> &AtomicBool {
        &self.write_cache
    }

    /// Establishes a unit attention condition.
    pub(crate) fn attend(&self, attention: Attention) {
        self.attentions.fetch_or(attention as u8, Ordering::Relaxed);
    }

    /// Takes the condition to be reported next.
    pub(crate) fn take_attention(&self) -> Option<Sense> {
        let pending = self.attentions.load(Ordering::Relaxed);
        if pending == 0 {
            return None;
        }
        let (bit, sense) = ATTENTIONS.into_iter().find(|(bit, _)| pending & bit != 0)?;
        // Another thread may have taken it meanwhile.
        (self.attentions.fetch_and(!bit, Ordering::Relaxed) & bit != 0).then_some(sense)
    }

    /// The state to hand over: byte 0 has WCE in bit 0 and a pending event in bit 1, byte 1 [`Attention`]s.
    pub(crate) fn save(&self) -> [u8; 2] {
        let event = self.event.load(Ordering::Relaxed);
        let flags = u8::from(self.has_write_cache()) | u8::from(event) << 1;
        [flags, self.attentions.load(Ordering::Relaxed)]
    }

    /// Restores saved state. Returns whether an event is pending.
    pub(crate) fn restore(&self, saved: &[u8]) -> bool {
        let [flags, attentions] = *saved else { return false };
        self.write_cache.store(flags & 1 != 0, Ordering::Relaxed);
        self.attentions.store(attentions, Ordering::Relaxed);
        let event = flags & 2 != 0;
        self.event.store(event, Ordering::Relaxed);
        event
    }

    /// Maximum logical blocks of a read or write.
    pub(crate) fn max_transfer(&self) -> u32 {
        (MAX_TRANSFER / u64::from(self.block_size)) as u32
    }

    /// Maximum logical blocks of an UNMAP descriptor, and of a WRITE SAME.
    pub(crate) fn max_range(&self) -> u32 {
        (MAX_RANGE / u64::from(self.block_size)) as u32
    }

    /// Returns offset and length in bytes.
    ///
    /// # Errors
    ///
    /// A block is beyond the end of the medium.
    pub(crate) fn range(&self, blocks: Blocks) -> Result<(u64, u64), Sense> {
        let count = u64::from(blocks.count);
        match blocks.lba.checked_add(count) {
            Some(end) if end <= self.blocks() => {
                let size = u64::from(self.block_size);
                Ok((blocks.lba * size, count * size))
            }
            _ => Err(Sense::LBA_OUT_OF_RANGE),
        }
    }

    /// Refuses a change of a read-only medium.
    pub(crate) fn check_writable(&self) -> Result<(), Sense> {
        if self.read_only { Err(Sense::WRITE_PROTECTED) } else { Ok(()) }
    }
}
