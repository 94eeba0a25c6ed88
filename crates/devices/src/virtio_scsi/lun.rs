//! A logical unit: what it is, and the little state that it has.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use block::node::Geometry;

use super::cdb::Blocks;
use super::sense::Sense;

/// Most bytes of an UNMAP or WRITE SAME range: 1 GiB.
const MAX_RANGE: u64 = 1 << 30;
/// Most bytes of a read or write: what one read(2) transfers at most, `MAX_RW_COUNT`.
const MAX_TRANSFER: u64 = 0x7fff_f000;

/// What a logical unit is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LunConfig {
    /// Of the node behind it.
    pub geometry: Geometry,
    /// Serial number, in ASCII: part of its name in the world.
    pub serial: String,
}

/// Unit attention conditions (SAM-5, 5.14), the one that is told first in front: a bit each, and what
/// the driver is told.
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
    /// Bytes of a logical block.
    pub(crate) block_size: u32,
    /// Physical blocks have `1 << physical_exp` logical ones.
    pub(crate) physical_exp: u8,
    pub(crate) read_only: bool,
    /// Whether UNMAP is any use.
    pub(crate) thin: bool,
    /// Of UNMAP, logical blocks.
    pub(crate) unmap_granularity: u32,
    pub(crate) serial: String,
    /// Logical blocks.
    blocks: AtomicU64,
    /// The mode in the caching page that is the default.
    pub(crate) default_write_cache: bool,
    /// WCE in the caching page.
    write_cache: AtomicBool,
    /// Pending [`Attention`]s.
    attentions: AtomicU8,
    /// The driver is to be told by an event that the capacity has changed.
    event: AtomicBool,
}

impl Lun {
    /// `block`: bytes of a logical block, a power of two.
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

    /// The node has so many bytes now; whether that is another capacity.
    pub(crate) fn set_size(&self, bytes: u64) -> bool {
        let blocks = bytes / u64::from(self.block_size);
        let changed = self.blocks.swap(blocks, Ordering::Relaxed) != blocks;
        if changed {
            self.attend(Attention::Capacity);
        }
        changed
    }

    /// Sets whether there is an event to tell; whether that is a change.
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

    /// Takes the condition that is to be told next.
    pub(crate) fn take_attention(&self) -> Option<Sense> {
        let pending = self.attentions.load(Ordering::Relaxed);
        if pending == 0 {
            return None;
        }
        let (bit, sense) = ATTENTIONS.into_iter().find(|(bit, _)| pending & bit != 0)?;
        // Another thread may have told it meanwhile.
        (self.attentions.fetch_and(!bit, Ordering::Relaxed) & bit != 0).then_some(sense)
    }

    /// What it has to remember: WCE in bit 0 and a pending event in bit 1, then [`Attention`]s.
    pub(crate) fn save(&self) -> [u8; 2] {
        let event = self.event.load(Ordering::Relaxed);
        let flags = u8::from(self.has_write_cache()) | u8::from(event) << 1;
        [flags, self.attentions.load(Ordering::Relaxed)]
    }

    /// Takes up what was saved; whether there is an event to tell.
    pub(crate) fn restore(&self, saved: &[u8]) -> bool {
        let [flags, attentions] = *saved else { return false };
        self.write_cache.store(flags & 1 != 0, Ordering::Relaxed);
        self.attentions.store(attentions, Ordering::Relaxed);
        let event = flags & 2 != 0;
        self.event.store(event, Ordering::Relaxed);
        event
    }

    /// Most logical blocks of a read or write.
    pub(crate) fn max_transfer(&self) -> u32 {
        (MAX_TRANSFER / u64::from(self.block_size)) as u32
    }

    /// Most logical blocks of an UNMAP descriptor, and of a WRITE SAME.
    pub(crate) fn max_range(&self) -> u32 {
        (MAX_RANGE / u64::from(self.block_size)) as u32
    }

    /// Offset and length in bytes.
    ///
    /// # Errors
    ///
    /// The medium does not have all these blocks.
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

    /// Refuses what would change the medium, if it must not change.
    pub(crate) fn check_writable(&self) -> Result<(), Sense> {
        if self.read_only { Err(Sense::WRITE_PROTECTED) } else { Ok(()) }
    }
}
