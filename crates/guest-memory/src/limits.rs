//! What all front ends together may map: a front end must not exhaust the address space of the process, as the next
//! allocation for another front end would then abort it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of regions that are mapped at a time: half of the address space of x86-64, which has 47 bits.
pub const MAX_MAPPED: u64 = 1 << 46;

/// Regions that are mapped at a time: half of the mappings that Linux allows a process (`vm.max_map_count`, 65530 by
/// default).
pub const MAX_REGIONS: u64 = 1 << 15;

/// Bounds of [`default_max_memory`], bytes. A small machine may run guests with much memory to plug in, and no front end
/// may take all of [`MAX_MAPPED`].
const DEFAULT_BOUNDS: (u64, u64) = (64 << 30, 4 << 40);

/// Returns the bytes of regions that one front end may have mapped, unless configured: four times the machine's memory,
/// from 64 GiB to 4 TiB.
pub fn default_max_memory() -> u64 {
    let total = nix::sys::sysinfo::sysinfo().map_or(0, |machine| machine.ram_total());
    total.saturating_mul(4).clamp(DEFAULT_BOUNDS.0, DEFAULT_BOUNDS.1)
}

static BYTES: AtomicU64 = AtomicU64::new(0);
static REGIONS: AtomicU64 = AtomicU64::new(0);

/// A region's share of the limits, given back on drop.
#[derive(Debug)]
pub(crate) struct Share {
    bytes: u64,
}

impl Share {
    /// Takes a share for one region. `None`: the process has no room for it.
    pub(crate) fn take(bytes: u64) -> Option<Share> {
        take(&BYTES, bytes, MAX_MAPPED).then_some(())?;
        let share = take(&REGIONS, 1, MAX_REGIONS).then_some(Share { bytes });
        if share.is_none() {
            BYTES.fetch_sub(bytes, Ordering::Relaxed);
        }
        share
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.bytes, Ordering::Relaxed);
        REGIONS.fetch_sub(1, Ordering::Relaxed);
    }
}

fn take(used: &AtomicU64, more: u64, limit: u64) -> bool {
    let add = |used: u64| used.checked_add(more).filter(|&used| used <= limit);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}
