//! The log of a migration: which pages of a guest's memory were written, for a front end that sends
//! them to another machine while the guest runs (vhost-user, "Migration").
//!
//! One bit for each 4096 bytes of guest addresses, in memory that is shared with the front end. It
//! takes bits away and copies their pages at any time, so a page is marked after it was written: a
//! mark that came first could be gone again before the write.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::Error;
use crate::region::{MappedRegion, Region};

/// Bytes of guest memory that a bit stands for (VHOST_LOG_PAGE), whatever the guest's pages are.
pub const LOG_PAGE: u64 = 0x1000;

/// Bytes of guest memory that a byte of the log stands for.
const PER_BYTE: u64 = LOG_PAGE * 8;

/// A log, mapped as long as it lives, and shared by all threads that write to the guest's memory.
#[derive(Debug)]
pub struct DirtyLog {
    region: MappedRegion,
}

impl DirtyLog {
    /// Maps `size` bytes of a file from `offset` on (SET_LOG_BASE). A file that is shrunk later makes
    /// the log [lost](Self::is_lost).
    ///
    /// # Errors
    ///
    /// As of [`Region::map`].
    pub fn map(fd: OwnedFd, offset: u64, size: u64) -> Result<DirtyLog, Error> {
        let region = Region { guest_addr: 0, size, user_addr: 0, mmap_offset: offset, fd };
        Ok(DirtyLog { region: region.map()? })
    }

    /// The first guest address that there is no bit for.
    pub fn end(&self) -> u64 {
        self.region.size().saturating_mul(PER_BYTE)
    }

    /// Whether the front end has shrunk the file under it, and somebody has noticed: what is marked
    /// since then, nobody sees.
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }

    /// Marks the pages of `len` bytes from `addr` on, which were written. Those beyond
    /// [`end`](Self::end) have no mark.
    pub fn mark(&self, addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|more| addr.saturating_add(more)) else { return };
        let last = last.min(self.end() - 1) / LOG_PAGE;
        let mut page = addr / LOG_PAGE;
        while page <= last {
            let (byte, bit) = (page / 8, page % 8);
            let bits = (last - page + 1).min(8 - bit);
            // SAFETY: `page * LOG_PAGE < end`, so the byte is inside the mapping, which lives as long
            // as this value and has no Rust references to it; all our accesses are atomic.
            let byte =
                unsafe { AtomicU8::from_ptr(self.region.host().as_ptr().add(byte as usize)) };
            // Without a look beforehand whether the bits are set already: such a load may be carried
            // out before the write that it is about is seen by others, and a front end that takes
            // the bits away in between would copy the old page.
            byte.fetch_or((((1u16 << bits) - 1) << bit) as u8, Ordering::SeqCst);
            page += bits;
        }
    }
}

/// Whether, and where, one thread's writes to a guest's memory are logged. Views share it, those that
/// requests in flight keep included: what is switched on counts for them all at once.
#[derive(Debug, Clone, Default)]
pub struct Logging(Rc<State>);

#[derive(Default)]
struct State {
    on: Cell<bool>,
    log: RefCell<Option<Arc<DirtyLog>>>,
    /// Called when something was marked, once for many marks.
    notify: RefCell<Option<Rc<dyn Fn()>>>,
    marked: Cell<bool>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Logging").field("log", &self.log).finish_non_exhaustive()
    }
}

impl Logging {
    /// Switched off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Has writes that end from now on logged in `log`, or not any more.
    pub fn set(&self, log: Option<Arc<DirtyLog>>) {
        self.0.on.set(log.is_some());
        self.0.log.replace(log);
    }

    /// Has somebody told of marks (SET_LOG_FD), at the end of a batch of them: see
    /// [`tell`](Self::tell).
    pub fn set_notify(&self, notify: Option<Rc<dyn Fn()>>) {
        self.0.notify.replace(notify);
    }

    /// The end of a batch: tells of marks, if there were any and somebody wants to know.
    #[inline]
    pub fn tell(&self) {
        if self.is_on() {
            self.tell_now();
        }
    }

    #[cold]
    fn tell_now(&self) {
        if self.0.marked.replace(false)
            && let Some(notify) = self.0.notify.borrow().clone()
        {
            notify();
        }
    }

    /// Whether writes are logged.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.on.get()
    }

    /// Whether marks go where nobody sees them: see [`DirtyLog::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.0.log.borrow().as_ref().is_some_and(|log| log.is_lost())
    }

    /// Marks the pages of `len` bytes from `addr` on, if writes are logged.
    #[inline]
    pub fn mark(&self, addr: u64, len: u64) {
        if self.is_on() {
            self.mark_now(addr, len);
        }
    }

    #[cold]
    fn mark_now(&self, addr: u64, len: u64) {
        if let Some(log) = &*self.0.log.borrow() {
            log.mark(addr, len);
            self.0.marked.set(true);
        }
    }
}
