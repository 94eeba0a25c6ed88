//! The set of regions that are a guest's memory.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::Error;
use crate::region::MappedRegion;

/// A guest's memory: regions that do not overlap.
///
/// Immutable; a change makes a new set that shares the mappings.
#[derive(Debug, Clone, Default)]
pub struct GuestMemory {
    /// Sorted by guest address.
    regions: Vec<Arc<MappedRegion>>,
    /// Finds memory that is in none of them.
    source: Option<Arc<dyn Source>>,
}

/// Finds memory when it is first accessed, for transports that do not announce all of it.
pub trait Source: Send + Sync + fmt::Debug {
    /// Returns a region that contains the guest address. Called on any thread.
    ///
    /// `None`: no memory is there.
    fn find(&self, addr: u64) -> Option<Arc<MappedRegion>>;
}

impl GuestMemory {
    /// Returns a set without memory.
    pub const fn new() -> Self {
        GuestMemory { regions: Vec::new(), source: None }
    }

    /// Returns the set of these regions (SET_MEM_TABLE).
    ///
    /// # Errors
    ///
    /// [`Error::Overlap`] when two of them share guest addresses or user addresses.
    pub fn from_regions(
        regions: impl IntoIterator<Item = Arc<MappedRegion>>,
    ) -> Result<Self, Error> {
        let mut regions: Vec<_> = regions.into_iter().collect();
        regions.sort_by_key(|r| r.user_addr());
        no_overlap(&regions, "user", MappedRegion::user_addr)?;
        regions.sort_by_key(|r| r.guest_addr());
        no_overlap(&regions, "guest", MappedRegion::guest_addr)?;
        Ok(GuestMemory { regions, source: None })
    }

    /// Returns this set with a source of memory that is in none of its regions.
    ///
    /// Views ask the source, and keep what it finds. Rings and the other methods here know the regions alone.
    pub fn with_source(self, source: Arc<dyn Source>) -> Self {
        GuestMemory { source: Some(source), ..self }
    }

    /// Asks the source for the region that contains guest address `addr`.
    pub(crate) fn find(&self, addr: u64) -> Option<Arc<MappedRegion>> {
        self.source.as_ref()?.find(addr).filter(|region| region.contains(addr))
    }

    /// Returns this set with one region more (ADD_MEM_REG).
    ///
    /// # Errors
    ///
    /// [`Error::Overlap`] when the region shares addresses with one that is there.
    pub fn with_region(&self, region: Arc<MappedRegion>) -> Result<Self, Error> {
        Self::from_regions(self.regions.iter().cloned().chain([region]))
    }

    /// Returns this set without one region (REM_MEM_REG).
    ///
    /// The region is the one of exactly these addresses and this size, in bytes: the message names
    /// a region by all three.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRegion`].
    pub fn without_region(
        &self,
        guest_addr: u64,
        user_addr: u64,
        size: u64,
    ) -> Result<Self, Error> {
        let is_it = |r: &Arc<MappedRegion>| {
            (r.guest_addr(), r.user_addr(), r.size()) == (guest_addr, user_addr, size)
        };
        let at = self.regions.iter().position(is_it).ok_or(Error::NoSuchRegion {
            guest_addr,
            user_addr,
            size,
        })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(GuestMemory { regions, source: self.source.clone() })
    }

    /// Returns the regions, in the order of their guest addresses.
    pub fn regions(&self) -> &[Arc<MappedRegion>] {
        &self.regions
    }

    /// Returns a region whose file the front end has shrunk.
    ///
    /// See [`MappedRegion::is_lost`].
    pub fn lost_region(&self) -> Option<&MappedRegion> {
        self.regions.iter().map(|region| &**region).find(|region| region.is_lost())
    }

    /// Returns the region that guest address `addr` lies in.
    pub fn region_at(&self, addr: u64) -> Option<&Arc<MappedRegion>> {
        self.indexed_region_at(addr).map(|(_, region)| region)
    }

    /// The same, and where it is among the [`regions`](Self::regions).
    pub(crate) fn indexed_region_at(&self, addr: u64) -> Option<(usize, &Arc<MappedRegion>)> {
        let index = self.regions.partition_point(|r| r.guest_addr() <= addr).checked_sub(1)?;
        let region = self.regions.get(index)?;
        (addr - region.guest_addr() < region.size()).then_some((index, region))
    }

    /// Returns the guest address of what the front end has at `user_addr`.
    ///
    /// `None` unless all `len` bytes from there on lie in one region.
    pub fn user_to_guest(&self, user_addr: u64, len: u64) -> Option<u64> {
        let (region, offset) = self.user_range(user_addr, len)?;
        Some(region.guest_addr() + offset)
    }

    /// Returns where the front end has the guest's `addr`.
    ///
    /// `None` unless all `len` bytes from there on lie in one region.
    pub fn guest_to_user(&self, addr: u64, len: u64) -> Option<u64> {
        let region = self.region_at(addr)?;
        let offset = addr - region.guest_addr();
        (len <= region.size() - offset).then(|| region.user_addr() + offset)
    }

    /// Returns the memory of a ring: `len` bytes from `user_addr` on.
    ///
    /// `user_addr` is an address of the front end, as SET_VRING_ADDR gives it, aligned to `align`
    /// bytes, a power of two.
    ///
    /// # Errors
    ///
    /// [`Error::RingOutside`] when they are not inside one region, [`Error::RingMisaligned`].
    pub fn ring_area(&self, user_addr: u64, len: u64, align: u64) -> Result<RingArea, Error> {
        let outside = Error::RingOutside { user_addr, len };
        let Some((region, offset)) = self.user_range(user_addr, len) else { return Err(outside) };
        let Ok(len) = usize::try_from(len) else { return Err(outside) };
        // SAFETY: `user_range` found `offset + len <= region.size()`.
        let base = unsafe { region.host().add(offset as usize) };
        // What the atomics need is our own alignment; the front end's is what the guest asked for.
        if !(base.as_ptr() as u64 | user_addr).is_multiple_of(align) {
            return Err(Error::RingMisaligned { user_addr, align });
        }
        Ok(RingArea { base, len, region: Arc::clone(region) })
    }

    /// The region with all of these user addresses, and their offset in it.
    fn user_range(&self, user_addr: u64, len: u64) -> Option<(&Arc<MappedRegion>, u64)> {
        self.regions.iter().find_map(|r| {
            let offset = user_addr.checked_sub(r.user_addr())?;
            let fits = offset < r.size() && len <= r.size() - offset;
            fits.then_some((r, offset))
        })
    }
}

/// Refuses neighbours, in a list sorted by `start`, that share addresses.
fn no_overlap(
    sorted: &[Arc<MappedRegion>],
    what: &'static str,
    start: fn(&MappedRegion) -> u64,
) -> Result<(), Error> {
    for pair in sorted.windows(2) {
        if let [a, b] = pair
            && start(b) - start(a) < a.size()
        {
            return Err(Error::Overlap { first: a.guest_addr(), second: b.guest_addr(), what });
        }
    }
    Ok(())
}

/// A piece of guest memory that holds a ring, mapped as long as the value lives.
///
/// The range is checked once.
#[derive(Debug, Clone)]
pub struct RingArea {
    base: NonNull<u8>,
    len: usize,
    region: Arc<MappedRegion>,
}

impl RingArea {
    /// Returns the first byte, aligned as was asked for.
    ///
    /// The pointer is valid for reads and writes of [`len`](Self::len) bytes as long as this value
    /// or a clone of it lives; by atomic or volatile access only, since the guest writes there too.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the guest address of the first byte.
    pub fn guest_addr(&self) -> u64 {
        let offset = self.base.as_ptr() as usize - self.region.host().as_ptr() as usize;
        self.region.guest_addr() + offset as u64
    }
}
