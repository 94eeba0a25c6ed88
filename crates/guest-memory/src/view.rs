//! An I/O thread's view of a guest's memory.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{IoBufs, LoopMemory, MemoryOwner, Places};

use crate::access;
use crate::dirty::Logging;
use crate::error::AccessError;
use crate::memory::GuestMemory;
use crate::region::MappedRegion;
use crate::registered::RegisteredRegion;

/// One thread's view of a [`GuestMemory`], kept in an `Rc`.
///
/// It translates addresses, copies, and makes segments for the kernel. It remembers recently used regions. Addresses
/// are guest-physical, lengths are in bytes.
///
/// A range may span adjacent regions. After an error, a copy or a list may be partly done.
pub struct MemoryView {
    memory: Arc<GuestMemory>,
    /// Registrations with the thread's loop, in the order of the regions.
    registered: Box<[Option<LoopMemory>]>,
    logging: Logging,
    /// What the memory's [`Source`](crate::Source) has found.
    found: RefCell<Vec<Arc<MappedRegion>>>,
    hits: [Cell<Hit>; HITS],
    /// Index of the hit to be replaced next.
    oldest: Cell<usize>,
}

/// Number of remembered regions. A guest has memory below and above 4 GiB. A client of libblkio has one region for its
/// rings and headers, and others for its data. Each request uses two of them alternately.
const HITS: usize = 4;

/// A remembered region, copied so that a hit follows no pointer.
#[derive(Clone, Copy)]
struct Hit {
    guest_addr: u64,
    size: u64,
    host: *mut u8,
    places: Option<Places>,
}

impl MemoryView {
    /// Returns a view of `memory`.
    pub fn new(memory: Arc<GuestMemory>) -> Rc<Self> {
        Self::with_logging(memory, &[], Logging::new())
    }

    /// Returns a view of `memory` for a loop with which `registered` is registered.
    ///
    /// Segments in those regions use the registration, see [`IoBufs::push_registered`]. `logging` decides whether
    /// writes through the view are logged.
    pub fn with_logging(
        memory: Arc<GuestMemory>,
        registered: &[RegisteredRegion],
        logging: Logging,
    ) -> Rc<Self> {
        let registered = memory.regions().iter().map(|region| {
            let found = registered.iter().find(|r| Arc::ptr_eq(r.region(), region))?;
            Some(found.memory().clone())
        });
        let registered = registered.collect();
        let nowhere = Hit { guest_addr: 0, size: 0, host: std::ptr::null_mut(), places: None };
        let hits = std::array::from_fn(|_| Cell::new(nowhere));
        let (found, oldest) = (RefCell::default(), Cell::new(0));
        Rc::new(MemoryView { memory, registered, logging, found, hits, oldest })
    }

    /// Returns the memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns whether, and where, writes through this view are logged.
    #[inline]
    pub fn logging(&self) -> &Logging {
        &self.logging
    }

    /// Returns which part of the memory or of the log was taken away, if any.
    ///
    /// The front end has shrunk that part's file.
    pub fn lost(&self) -> Option<String> {
        if let Some(addr) = self.lost_region() {
            return Some(format!("the memory at {addr:#x} was taken away"));
        }
        self.logging.is_lost().then(|| "the log of a migration was taken away".into())
    }

    /// The guest address of a region whose file was shrunk.
    fn lost_region(&self) -> Option<u64> {
        let found = self.found.borrow();
        let lost_later = || found.iter().map(|region| &**region).find(|region| region.is_lost());
        self.memory.lost_region().or_else(lost_later).map(MappedRegion::guest_addr)
    }

    /// Marks what an operation wrote to `bufs`, if writes are logged.
    ///
    /// These are `len` bytes, in segments of this view. Call this when the operation has ended, with or without
    /// success, before the driver learns of it.
    #[inline]
    pub fn mark_bufs(&self, bufs: &IoBufs, len: u64) {
        if self.logging.is_on() {
            self.mark_bufs_now(bufs, len);
        }
    }

    #[cold]
    fn mark_bufs_now(&self, bufs: &IoBufs, len: u64) {
        let mut marked = 0;
        for segment in bufs.iovecs() {
            let (mut host, mut left) = (segment.iov_base as usize, segment.iov_len);
            // A segment may span regions that are mapped adjacently.
            while left > 0 {
                let offset_in = |region: &Arc<MappedRegion>| {
                    let offset = host.checked_sub(region.host().as_ptr() as usize)? as u64;
                    (offset < region.size()).then_some((region.guest_addr(), region.size(), offset))
                };
                let found = self.memory.regions().iter().find_map(offset_in);
                let Some((guest_addr, size, offset)) = found else { break };
                let there = usize::try_from(size - offset).unwrap_or(usize::MAX).min(left);
                self.logging.mark(guest_addr + offset, there as u64);
                marked += there as u64;
                host += there;
                left -= there;
            }
        }
        if marked != len {
            // The list differs from the operation's. As the written place is unknown, mark everything.
            debug_assert!(false, "{marked} of {len} bytes came back");
            for region in self.memory.regions() {
                self.logging.mark(region.guest_addr(), region.size());
            }
        }
    }

    /// Appends `len` bytes from guest address `addr` on to `bufs` as segments.
    ///
    /// The view becomes the owner of an empty list, and keeps the memory mapped while the operation is in flight.
    /// Allocates only when the list exceeds its capacity.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory; `bufs` may then have a part of the range.
    ///
    /// # Panics
    ///
    /// When `bufs` holds segments of another owner.
    #[inline]
    pub fn push_iovecs(
        self: &Rc<Self>,
        addr: u64,
        len: usize,
        bufs: &mut IoBufs,
    ) -> Result<(), AccessError> {
        if bufs.is_empty() {
            bufs.set_owner(Rc::clone(self) as Rc<dyn MemoryOwner>);
        } else {
            let owned =
                bufs.owner().is_some_and(|o| std::ptr::addr_eq(Rc::as_ptr(o), Rc::as_ptr(self)));
            assert!(owned, "segments of two owners in one list");
        }
        self.pieces(addr, len, |host, len, hit, offset| {
            let place = hit.places.and_then(|places| places.at(offset, len));
            // SAFETY: `pieces` returns addresses inside a region of `self.memory` or `self.found`, mapped readable and writable. The
            // list's owner is `self`, which keeps the memory and its registration. No reference to guest memory exists.
            // `places` are those of the whole region, from its first byte on.
            unsafe { bufs.push_registered(host, len, place) };
        })
    }

    /// Copies guest memory from guest address `addr` on to `dst`.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory.
    #[inline]
    pub fn read_bytes(&self, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        let mut rest = &mut *dst;
        self.pieces(addr, rest.len(), |host, len, _, _| {
            let (piece, tail) = std::mem::take(&mut rest).split_at_mut(len);
            // SAFETY: `pieces` returns `len` mapped bytes of guest memory, which is never part of a Rust object
            // such as `dst`.
            unsafe { access::copy_from(host, piece) };
            rest = tail;
        })
    }

    /// Copies `src` to guest memory from guest address `addr` on.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory.
    #[inline]
    pub fn write_bytes(&self, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        let mut rest = src;
        let copied = self.pieces(addr, rest.len(), |host, len, _, _| {
            let (piece, tail) = rest.split_at(len);
            // SAFETY: as in `read_bytes`, in the other direction.
            unsafe { access::copy_to(piece, host) };
            rest = tail;
        });
        self.logging.mark(addr, src.len() as u64);
        copied
    }

    /// Reads `N` bytes at `addr`.
    ///
    /// # Errors
    ///
    /// As for [`read_bytes`](Self::read_bytes); also for the other reading functions.
    #[inline]
    pub fn read_array<const N: usize>(&self, addr: u64) -> Result<[u8; N], AccessError> {
        let mut bytes = [0; N];
        match self.one_piece(addr, N) {
            // SAFETY: `one_piece` returns `N` mapped bytes of guest memory, which do not overlap `bytes`.
            Some(host) => unsafe { access::copy_from(host, &mut bytes) },
            None => self.read_bytes(addr, &mut bytes)?,
        }
        Ok(bytes)
    }

    /// Reads the byte at `addr`.
    ///
    /// # Errors
    ///
    /// As for [`read_bytes`](Self::read_bytes).
    #[inline]
    pub fn read_u8(&self, addr: u64) -> Result<u8, AccessError> {
        self.read_array(addr).map(u8::from_le_bytes)
    }

    /// Reads a little-endian word of 16 bits at `addr`, which may have any alignment.
    ///
    /// # Errors
    ///
    /// As for [`read_bytes`](Self::read_bytes).
    #[inline]
    pub fn read_u16(&self, addr: u64) -> Result<u16, AccessError> {
        self.read_array(addr).map(u16::from_le_bytes)
    }

    /// Reads a little-endian word of 32 bits at `addr`, which may have any alignment.
    ///
    /// # Errors
    ///
    /// As for [`read_bytes`](Self::read_bytes).
    #[inline]
    pub fn read_u32(&self, addr: u64) -> Result<u32, AccessError> {
        self.read_array(addr).map(u32::from_le_bytes)
    }

    /// Reads a little-endian word of 64 bits at `addr`, which may have any alignment.
    ///
    /// # Errors
    ///
    /// As for [`read_bytes`](Self::read_bytes).
    #[inline]
    pub fn read_u64(&self, addr: u64) -> Result<u64, AccessError> {
        self.read_array(addr).map(u64::from_le_bytes)
    }

    /// Writes `value` to the byte at `addr`.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when it is not memory.
    #[inline]
    pub fn write_u8(&self, addr: u64, value: u8) -> Result<(), AccessError> {
        match self.one_piece(addr, 1) {
            // SAFETY: `one_piece` returns one mapped byte of guest memory.
            Some(host) => unsafe { access::copy_to(&[value], host) },
            None => return self.write_bytes(addr, &[value]),
        }
        self.logging.mark(addr, 1);
        Ok(())
    }

    /// Reads the little-endian word of 32 bits at `addr`, with acquire ordering.
    ///
    /// The guest publishes by the word what it wrote before. Reads that follow see that.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the word is not memory, or the word is not aligned to its size.
    #[inline]
    pub fn load_acquire(&self, addr: u64) -> Result<u32, AccessError> {
        let host = self.word(addr)?;
        // SAFETY: `word` gives four mapped bytes of guest memory.
        unsafe { access::load_acquire(host) }.ok_or(AccessError { addr, len: 4 })
    }

    /// Writes `value` as a little-endian word at `addr`, with release ordering.
    ///
    /// By the word the guest sees what was written before.
    ///
    /// # Errors
    ///
    /// As [`load_acquire`](Self::load_acquire).
    #[inline]
    pub fn store_release(&self, addr: u64, value: u32) -> Result<(), AccessError> {
        let host = self.word(addr)?;
        // SAFETY: `word` gives four mapped bytes of guest memory.
        unsafe { access::store_release(host, value) }.ok_or(AccessError { addr, len: 4 })?;
        self.logging.mark(addr, 4);
        Ok(())
    }

    /// Where the four bytes at `addr` are mapped.
    #[inline]
    fn word(&self, addr: u64) -> Result<*mut u8, AccessError> {
        if let Some(host) = self.one_piece(addr, 4) {
            return Ok(host);
        }
        self.miss(addr, 4)?;
        self.one_piece(addr, 4).ok_or(AccessError { addr, len: 4 })
    }

    /// Prefetches the cache line at `addr`, if it is in a remembered region.
    ///
    /// For reading, or `for_writing`. Does not wait. Has no effect on an address that is not memory.
    #[inline]
    pub fn prefetch(&self, addr: u64, for_writing: bool) {
        if let Some(host) = self.one_piece(addr, 1) {
            access::prefetch(host, for_writing);
        }
    }

    /// The mapped address of `addr`, if it is in a remembered region.
    #[inline]
    fn hit(&self, addr: u64) -> Option<Hit> {
        self.hits.iter().map(Cell::get).find(|hit| addr.wrapping_sub(hit.guest_addr) < hit.size)
    }

    /// The mapped address of the range, if it is in one remembered region. For accesses of a fixed size, which then take a
    /// few instructions.
    #[inline]
    fn one_piece(&self, addr: u64, len: usize) -> Option<*mut u8> {
        let hit = self.hit(addr)?;
        let offset = addr - hit.guest_addr;
        (len as u64 <= hit.size - offset).then(|| hit.host.wrapping_add(offset as usize))
    }

    /// Calls `f` with each piece of the range, in order: a host address, the number of adjacent mapped bytes, at least 1,
    /// the region, and the offset in the region.
    #[inline]
    fn pieces(
        &self,
        mut addr: u64,
        mut len: usize,
        mut f: impl FnMut(*mut u8, usize, &Hit, u64),
    ) -> Result<(), AccessError> {
        while len > 0 {
            let hit = match self.hit(addr) {
                Some(hit) => hit,
                None => self.miss(addr, len)?,
            };
            let offset = addr - hit.guest_addr;
            let there = usize::try_from(hit.size - offset).unwrap_or(usize::MAX);
            let n = len.min(there);
            f(hit.host.wrapping_add(offset as usize), n, &hit, offset);
            len -= n;
            // Cannot wrap: a region's end fits 64 bits (`Region::map`).
            addr += n as u64;
        }
        Ok(())
    }

    /// Looks up the region of `addr` and remembers it.
    #[cold]
    fn miss(&self, addr: u64, len: usize) -> Result<Hit, AccessError> {
        let Some((index, region)) = self.memory.indexed_region_at(addr) else {
            let region = self.find(addr).ok_or(AccessError { addr, len: len as u64 })?;
            return Ok(self.remember(&region, None));
        };
        let registered = self.registered.get(index).and_then(Option::as_ref);
        Ok(self.remember(region, registered))
    }

    /// The region of `addr` that the memory's source finds, or has found. The view keeps it mapped.
    fn find(&self, addr: u64) -> Option<Arc<MappedRegion>> {
        let known = self.found.borrow().iter().find(|region| region.contains(addr)).cloned();
        known.or_else(|| {
            let region = self.memory.find(addr)?;
            self.found.borrow_mut().push(region.clone());
            Some(region)
        })
    }

    /// Remembers a region that the memory or the view keeps mapped.
    fn remember(&self, region: &MappedRegion, registered: Option<&LoopMemory>) -> Hit {
        let hit = Hit {
            guest_addr: region.guest_addr(),
            size: region.size(),
            host: region.host().as_ptr(),
            places: registered.map(LoopMemory::places),
        };
        let oldest = self.oldest.get();
        self.hits[oldest].set(hit);
        self.oldest.set((oldest + 1) % HITS);
        hit
    }
}

impl MemoryOwner for MemoryView {
    fn is_lost(&self) -> bool {
        crate::losses() != 0 && self.lost_region().is_some()
    }
}

impl std::fmt::Debug for MemoryView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("MemoryView").field(&self.memory).finish()
    }
}
