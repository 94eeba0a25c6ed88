//! An I/O thread's view of a guest's memory.

#![allow(unsafe_code)]

use std::any::Any;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{IoBufs, LoopMemory, Places};

use crate::access;
use crate::dirty::Logging;
use crate::error::AccessError;
use crate::memory::GuestMemory;
use crate::region::MappedRegion;
use crate::registered::RegisteredRegion;

/// One thread's view of a [`GuestMemory`], kept in an `Rc`: translation that remembers the
/// regions it last hit, copies, and segments for the kernel. Addresses are guest-physical, lengths bytes.
///
/// Ranges may run from one region into the next where both touch. An error leaves a copy or a list
/// half done.
pub struct MemoryView {
    memory: Arc<GuestMemory>,
    /// What of it is registered with the thread's loop: by the regions' order.
    registered: Box<[Option<LoopMemory>]>,
    logging: Logging,
    hits: [Cell<Hit>; HITS],
    /// The hit to be replaced next.
    oldest: Cell<usize>,
}

/// Regions remembered: a guest has memory below and above 4 GiB, and a client of libblkio one region
/// for its rings and headers and others for its data. Each request touches two of them in turn.
const HITS: usize = 4;

/// A region of an earlier hit, copied out so that the next hit follows no pointer.
#[derive(Clone, Copy)]
struct Hit {
    guest_addr: u64,
    size: u64,
    host: *mut u8,
    places: Option<Places>,
}

impl MemoryView {
    /// A view of `memory`.
    pub fn new(memory: Arc<GuestMemory>) -> Rc<Self> {
        Self::with_logging(memory, &[], Logging::new())
    }

    /// A view of `memory`, for a loop that `registered` is registered with: segments in its regions
    /// say so, see [`IoBufs::push_registered`]. Writes through it are logged when `logging` says so.
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
        Rc::new(MemoryView { memory, registered, logging, hits, oldest: Cell::new(0) })
    }

    /// The memory looked at.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Whether, and where, writes through this view are logged.
    #[inline]
    pub fn logging(&self) -> &Logging {
        &self.logging
    }

    /// Whether some of the memory, or of the log, was taken away by the front end: which, if so.
    pub fn lost(&self) -> Option<String> {
        if let Some(region) = self.memory.lost_region() {
            return Some(format!("the memory at {:#x} was taken away", region.guest_addr()));
        }
        self.logging.is_lost().then(|| "the log of a migration was taken away".into())
    }

    /// Marks what an operation has written to `bufs`, `len` bytes in segments of this view's, if writes
    /// are logged. To be called when it has ended, well or not, and before the driver is told.
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
            // A segment goes on in the next region where both are mapped side by side.
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
            // Not what the operation was given. Where it has written is not known, so anywhere.
            debug_assert!(false, "{marked} of {len} bytes came back");
            for region in self.memory.regions() {
                self.logging.mark(region.guest_addr(), region.size());
            }
        }
    }

    /// Appends `addr..addr + len` to `bufs` as segments. An empty list becomes owned by this view,
    /// which keeps the memory mapped while the operation is in flight. Allocates only when the list
    /// grows beyond its capacity.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory; `bufs` may then hold a part of it.
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
            bufs.set_owner(Rc::clone(self) as Rc<dyn Any>);
        } else {
            let owned =
                bufs.owner().is_some_and(|o| std::ptr::addr_eq(Rc::as_ptr(o), Rc::as_ptr(self)));
            assert!(owned, "segments of two owners in one list");
        }
        self.pieces(addr, len, |host, len, hit, offset| {
            let place = hit.places.and_then(|places| places.at(offset, len));
            // SAFETY: `pieces` gives addresses inside a region of `self.memory`, mapped readable and
            // writable; the list's owner is `self`, which keeps it, and what is registered of it. No
            // reference to guest memory is made anywhere. `places` are those of the whole region,
            // from its first byte on.
            unsafe { bufs.push_registered(host, len, place) };
        })
    }

    /// Copies guest memory from `addr` on to `dst`.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory.
    #[inline]
    pub fn read_bytes(&self, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        let mut rest = &mut *dst;
        self.pieces(addr, rest.len(), |host, len, _, _| {
            let (piece, tail) = std::mem::take(&mut rest).split_at_mut(len);
            // SAFETY: `pieces` gives `len` mapped bytes of guest memory, which is never part of a
            // Rust object such as `dst`.
            unsafe { access::copy_from(host, piece) };
            rest = tail;
        })
    }

    /// Copies `src` to guest memory from `addr` on.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when part of the range is not memory.
    #[inline]
    pub fn write_bytes(&self, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        let mut rest = src;
        let copied = self.pieces(addr, rest.len(), |host, len, _, _| {
            let (piece, tail) = rest.split_at(len);
            // SAFETY: as in `read_bytes`, the other way round.
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
    /// As [`read_bytes`](Self::read_bytes); so for all that read.
    #[inline]
    pub fn read_array<const N: usize>(&self, addr: u64) -> Result<[u8; N], AccessError> {
        let mut bytes = [0; N];
        match self.one_piece(addr, N) {
            // SAFETY: `one_piece` gives `N` mapped bytes of guest memory, of which `bytes` is no part.
            Some(host) => unsafe { access::copy_from(host, &mut bytes) },
            None => self.read_bytes(addr, &mut bytes)?,
        }
        Ok(bytes)
    }

    /// Reads the byte at `addr`.
    #[inline]
    pub fn read_u8(&self, addr: u64) -> Result<u8, AccessError> {
        self.read_array(addr).map(u8::from_le_bytes)
    }

    /// Reads a little-endian word of 16 bits; any alignment, like all that follow.
    #[inline]
    pub fn read_u16(&self, addr: u64) -> Result<u16, AccessError> {
        self.read_array(addr).map(u16::from_le_bytes)
    }

    /// Reads a little-endian word of 32 bits.
    #[inline]
    pub fn read_u32(&self, addr: u64) -> Result<u32, AccessError> {
        self.read_array(addr).map(u32::from_le_bytes)
    }

    /// Reads a little-endian word of 64 bits.
    #[inline]
    pub fn read_u64(&self, addr: u64) -> Result<u64, AccessError> {
        self.read_array(addr).map(u64::from_le_bytes)
    }

    /// Writes the byte at `addr`.
    ///
    /// # Errors
    ///
    /// [`AccessError`] when it is not memory.
    #[inline]
    pub fn write_u8(&self, addr: u64, value: u8) -> Result<(), AccessError> {
        match self.one_piece(addr, 1) {
            // SAFETY: `one_piece` gives one mapped byte of guest memory.
            Some(host) => unsafe { access::copy_to(&[value], host) },
            None => return self.write_bytes(addr, &[value]),
        }
        self.logging.mark(addr, 1);
        Ok(())
    }

    /// Reads the little-endian word of 32 bits at `addr`, by which the guest publishes what it wrote before: that is
    /// seen by reads that follow.
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

    /// Writes the little-endian word of 32 bits at `addr`, by which the guest sees what was written before.
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

    /// Fetches the cache line at `addr` into the cache, if it lies in a region of an earlier hit: to
    /// be read, or, `for_writing`, to be written as well. The CPU goes on meanwhile; an address that
    /// is not memory does nothing.
    #[inline]
    pub fn prefetch(&self, addr: u64, for_writing: bool) {
        if let Some(host) = self.one_piece(addr, 1) {
            access::prefetch(host, for_writing);
        }
    }

    /// Where `addr` lies, if in a region of an earlier hit.
    #[inline]
    fn hit(&self, addr: u64) -> Option<Hit> {
        self.hits.iter().map(Cell::get).find(|hit| addr.wrapping_sub(hit.guest_addr) < hit.size)
    }

    /// Where the range is mapped, if it lies in the region of an earlier hit: for accesses of a fixed
    /// size, which then are a few instructions.
    #[inline]
    fn one_piece(&self, addr: u64, len: usize) -> Option<*mut u8> {
        let hit = self.hit(addr)?;
        let offset = addr - hit.guest_addr;
        (len as u64 <= hit.size - offset).then(|| hit.host.wrapping_add(offset as usize))
    }

    /// Calls `f` with each piece of the range, in order: a host address and how many bytes are
    /// mapped there one after the other, at least 1; and the region, and the offset in it.
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
            // A region's end fits 64 bits (`Region::map`), so this does not wrap.
            addr += n as u64;
        }
        Ok(())
    }

    /// Finds the region of `addr` and remembers it.
    #[cold]
    fn miss(&self, addr: u64, len: usize) -> Result<Hit, AccessError> {
        let Some((index, region)) = self.memory.indexed_region_at(addr) else {
            return Err(AccessError { addr, len: len as u64 });
        };
        let registered = self.registered.get(index).and_then(Option::as_ref);
        let hit = Hit {
            guest_addr: region.guest_addr(),
            size: region.size(),
            host: region.host().as_ptr(),
            places: registered.map(LoopMemory::places),
        };
        let oldest = self.oldest.get();
        self.hits[oldest].set(hit);
        self.oldest.set((oldest + 1) % HITS);
        Ok(hit)
    }
}

impl std::fmt::Debug for MemoryView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("MemoryView").field(&self.memory).finish()
    }
}
