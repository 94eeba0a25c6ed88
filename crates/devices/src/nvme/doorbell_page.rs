//! The doorbell registers as a page of memory, which the driver has mapped.
//!
//! A write to the page wakes no thread and leaves no trace beside its value. So each worker reads the doorbells of its queues without
//! end while there are any, and the first worker those of the admin queue while the controller is enabled.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use guest_memory::{Error, GuestMemory, MappedRegion, MemoryView, Region};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;

use super::bits::{DOORBELLS_AT, DoorbellOf, MSIX_TABLE_AT};
use super::controller::Controller;
use super::queues::ADMIN_BELLS;
use super::worker::{Notice, Order, Worker};

/// Bytes of the page.
const SIZE: u64 = MSIX_TABLE_AT as u64 - DOORBELLS_AT;

/// A page of doorbells, in a file at the same offset as in BAR 0.
///
/// These are bytes 0x1000 to 0x1fff of BAR 0 (section 3.1).
#[derive(Clone)]
pub struct DoorbellPage(Arc<MappedRegion>);

impl DoorbellPage {
    /// Offset in BAR 0, and in the file, in bytes.
    pub const OFFSET: u64 = DOORBELLS_AT;
    /// Length in bytes.
    pub const SIZE: u64 = SIZE;

    /// Returns a page of zeroes. Other processes cannot take it away.
    ///
    /// # Errors
    ///
    /// memfd_create(2), ftruncate(2), fcntl(2), mmap(2).
    pub fn new() -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create("ringmill-doorbells", flags)?;
        ftruncate(&fd, (Self::OFFSET + Self::SIZE).try_into().map_err(io::Error::other)?)?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS))?;
        Self::map(fd).map_err(|error| io::Error::other(error.to_string()))
    }

    /// Maps the page of another process, which has made it by [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// The file can be made shorter, or cannot be mapped.
    pub fn received(fd: OwnedFd) -> Result<Self, String> {
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).map_err(|errno| errno.desc().to_owned())?;
        if !SealFlag::from_bits_truncate(seals).contains(SEALS) {
            return Err("the page of doorbells can be made shorter".to_owned());
        }
        Self::map(fd).map_err(|error| error.to_string())
    }

    fn map(fd: OwnedFd) -> Result<Self, Error> {
        let (guest_addr, user_addr) = (Self::OFFSET, Self::OFFSET);
        let region =
            Region { guest_addr, size: Self::SIZE, user_addr, mmap_offset: Self::OFFSET, fd };
        region.map().map(|region| DoorbellPage(Arc::new(region)))
    }

    /// Returns the file, for others to map.
    pub fn file(&self) -> &OwnedFd {
        self.0.file()
    }

    /// The page as memory, at its offset in BAR 0.
    pub(super) fn memory(&self) -> Arc<GuestMemory> {
        Arc::new(GuestMemory::from_regions([self.0.clone()]).unwrap_or_default())
    }
}

/// No seal forbids writing.
const SEALS: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// A thread's view of the page.
pub(super) struct PageView(Rc<MemoryView>);

impl PageView {
    pub(super) fn new(memory: Arc<GuestMemory>) -> Self {
        PageView(MemoryView::new(memory))
    }

    /// The value of a doorbell.
    #[inline]
    pub(super) fn value(&self, of: DoorbellOf) -> u32 {
        // The page is memory of this process.
        self.0.load_acquire(DOORBELLS_AT + of.offset()).unwrap_or_default()
    }

    /// Sets a doorbell to 0, for a new queue.
    pub(super) fn clear(&self, of: DoorbellOf) {
        self.set(of, 0);
    }

    /// Sets a doorbell that the driver has written by message.
    pub(super) fn set(&self, of: DoorbellOf, value: u32) {
        let set = self.0.store_release(DOORBELLS_AT + of.offset(), value);
        debug_assert!(set.is_ok(), "the page is memory of this process");
    }
}

impl Controller {
    /// Returns the page of doorbells, if they are mapped.
    pub fn doorbell_page(&self) -> Option<DoorbellPage> {
        self.page.borrow().clone()
    }

    /// Replaces the page of doorbells, while the controller is reset.
    pub fn set_doorbell_page(&self, page: DoorbellPage) {
        if let Some(shared) = &self.shared.page {
            shared.set(page.memory());
            self.page.replace(Some(page));
        }
    }

    pub(super) fn page_view(&self) -> Option<PageView> {
        self.shared.page.as_ref().map(|page| PageView::new(page.get()))
    }

    /// Takes the admin queue's doorbells from the page of doorbells.
    pub(super) fn take_admin_page(&self) {
        if let Some(page) = self.page_view() {
            for bell in ADMIN_BELLS {
                self.ring(bell, page.value(bell));
            }
        }
    }

    /// Makes the first worker watch the admin queue's doorbells in the page.
    pub(super) fn watch_admin(&self) {
        if let Some(first) = self.workers.first() {
            first.order(Order::WatchAdmin);
        }
    }
}

impl Worker {
    /// A turn of a worker that reads the page of doorbells without end.
    pub(super) fn take_turn_of_page(&self) {
        if self.is_paused.get() {
            return;
        }
        let (is_admin_rung, has_commands, goes_on) = {
            let mut state = self.state.borrow_mut();
            (state.is_admin_rung(), state.has_commands(), state.watches_page())
        };
        if is_admin_rung {
            self.notify(Notice::AdminDoorbell);
        }
        if has_commands || self.doorbells.is_rung() {
            self.take_turn();
        }
        if goes_on {
            self.look_again();
        }
    }
}
