//! The dirty log of a live migration: which pages of a guest's memory were written (vhost-user, "Migration").
//!
//! The log has one bit per 4096 bytes of guest addresses, in memory shared with the front end. The front end
//! clears bits and copies their pages at any time. So a page is marked after the write: the front end could
//! clear an earlier mark before the write.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::Error;
use crate::region::{MappedRegion, Region};

/// Bytes of guest memory per bit (VHOST_LOG_PAGE).
///
/// Independent of the guest's page size.
pub const LOG_PAGE: u64 = 0x1000;

/// Bytes of guest memory per byte of the log.
const PER_BYTE: u64 = LOG_PAGE * 8;

/// A mapped log, shared by all threads that write to the guest's memory.
#[derive(Debug)]
pub struct DirtyLog {
    region: MappedRegion,
}

impl DirtyLog {
    /// Maps `size` bytes of a file from `offset` on (SET_LOG_BASE).
    ///
    /// A file that is shrunk later makes the log [lost](Self::is_lost).
    ///
    /// # Errors
    ///
    /// As of [`Region::map`].
    pub fn map(fd: OwnedFd, offset: u64, size: u64) -> Result<DirtyLog, Error> {
        let region = Region { guest_addr: 0, size, user_addr: 0, mmap_offset: offset, fd };
        Ok(DirtyLog { region: region.map()? })
    }

    /// Returns its size in bytes.
    pub fn size(&self) -> u64 {
        self.region.size()
    }

    /// Returns the first guest address without a bit.
    pub fn end(&self) -> u64 {
        self.region.size().saturating_mul(PER_BYTE)
    }

    /// Returns whether an access has found that the front end shrank the file.
    ///
    /// Marks are lost since then.
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }

    /// Marks the pages of `len` bytes from `addr` on.
    ///
    /// Pages beyond [`end`](Self::end) are ignored.
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
            // No check whether the bits are set already: that load could execute before the write is visible,
            // and a front end that clears the bits in between would copy the old page.
            byte.fetch_or((((1u16 << bits) - 1) << bit) as u8, Ordering::SeqCst);
            page += bits;
        }
    }
}

/// The logging of one thread's writes to a guest's memory.
///
/// All views of the thread share it, also views of requests in flight, so switching it takes effect for all of them
/// at once.
#[derive(Debug, Clone, Default)]
pub struct Logging(Rc<LoggingState>);

#[derive(Default)]
struct LoggingState {
    on: Cell<bool>,
    log: RefCell<Option<Arc<DirtyLog>>>,
    /// Notifies the front end of marks, once per batch.
    notify: RefCell<Option<Rc<dyn Fn()>>>,
    marked: Cell<bool>,
}

impl std::fmt::Debug for LoggingState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Logging").field("log", &self.log).finish_non_exhaustive()
    }
}

impl Logging {
    /// Returns a switch that is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Logs writes that end from now on in `log`. `None` stops logging.
    pub fn set(&self, log: Option<Arc<DirtyLog>>) {
        self.0.on.set(log.is_some());
        self.0.log.replace(log);
    }

    /// Sets the notification of marks (SET_LOG_FD), see [`tell`](Self::tell).
    pub fn set_notify(&self, notify: Option<Rc<dyn Fn()>>) {
        self.0.notify.replace(notify);
    }

    /// Ends a batch: notifies the front end if pages were marked.
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

    /// Returns whether writes are logged.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.on.get()
    }

    /// Returns whether marks are lost, see [`DirtyLog::is_lost`].
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
