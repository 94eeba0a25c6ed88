//! Survives a front end that shrinks the file of a guest's memory.
//!
//! An access beyond the new end raises SIGBUS, which by default ends the process and with it the disks of all
//! other guests. The handler replaces the whole mapping by anonymous memory, so that the access completes, and
//! marks the region as lost. The session of that guest sees [`losses`] change and stops. Other faults go to the
//! previous handler.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock};

use event_loop::sync::lock;
use libc::{c_int, c_void, siginfo_t};

/// The most regions that are watched at a time; further ones are not. Linux limits a process to fewer mappings
/// by default (vm.max_map_count, 65530). Miri needs a minute to create the full table, so there it is small.
const PLACES: usize = if cfg!(miri) { 1 << 6 } else { 1 << 16 };

/// The regions, for the handler, which can take no lock.
static TABLE: [Place; PLACES] = [const { Place::new() }; PLACES];
/// The number of entries that were ever used.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);
/// Held while the table changes.
static CHANGES: Mutex<()> = Mutex::new(());
/// The previous action of SIGBUS.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

struct Place {
    /// Counts uses and releases of the entry: odd while it is in use.
    changes: AtomicUsize,
    /// The mapping's first byte.
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

impl Place {
    const fn new() -> Self {
        Place {
            changes: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    fn is_free(&self) -> bool {
        self.changes.load(Ordering::Relaxed).is_multiple_of(2)
    }

    /// Uses a free entry. The caller holds the lock.
    fn take(&self, start: usize, len: usize) {
        // Pairs with the fence in `range`: a reader of a value below then sees the new `changes`.
        fence(Ordering::Release);
        self.lost.store(false, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        // Release: a reader that sees the entry in use sees the values.
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Releases a used entry. The caller holds the lock.
    fn free(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Returns the first byte and the length of one mapping. `None`: the entry is free, or has changed meanwhile.
    fn range(&self) -> Option<(usize, usize)> {
        self.range_while(|| {})
    }

    /// As `range`, with a call between the loads, for tests.
    fn range_while(&self, happens: impl FnOnce()) -> Option<(usize, usize)> {
        let changes = self.changes.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        happens();
        let len = self.len.load(Ordering::Relaxed);
        // The fence in `take` pairs a value of a later mapping with a later `changes`. The values alone do not
        // show the change: a later mapping may begin at the same address.
        fence(Ordering::Acquire);
        let unchanged = self.changes.load(Ordering::Relaxed) == changes;
        (unchanged && !changes.is_multiple_of(2)).then_some((start, len))
    }
}

static LOSSES: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of regions lost since the process began.
///
/// When it has changed, ask [`MappedRegion::is_lost`](crate::MappedRegion::is_lost).
#[inline]
pub fn losses() -> usize {
    LOSSES.load(Ordering::Acquire)
}

/// A watched mapping. Drop it before the mapping.
#[derive(Debug)]
pub(crate) struct Watched(Option<usize>);

impl Watched {
    /// Watches a mapping of `len` bytes from `start` on, whole pages of its file.
    pub(crate) fn new(start: NonNull<c_void>, len: usize) -> Self {
        let _changing = lock(&CHANGES);
        install();
        let free = TABLE.iter().position(Place::is_free);
        let Some(index) = free else {
            log::warn!("more than {PLACES} memory regions: a front end that shrinks one is fatal");
            return Watched(None);
        };
        TABLE[index].take(start.as_ptr() as usize, len);
        HIGHEST.fetch_max(index + 1, Ordering::Release);
        Watched(Some(index))
    }

    /// Returns whether the mapping was replaced by anonymous memory.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.is_some_and(|index| TABLE[index].lost.load(Ordering::Acquire))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            let _changing = lock(&CHANGES);
            TABLE[index].free();
        }
    }
}

/// Installs the handler, once.
fn install() {
    // Miri has no signals.
    if cfg!(miri) {
        return;
    }
    BEFORE.get_or_init(|| {
        // SAFETY: zeroes are a valid `sigaction`: the default action, no flags, an empty mask.
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_bus_error;
        ours.sa_sigaction = handler as usize;
        // On the alternate signal stack, which the previous handler may rely on.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both are valid for the call; the handler does only what a signal handler may. What
        // faults before `BEFORE` is set ends by the default action.
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, &raw mut before) } != 0 {
            log::warn!("sigaction failed: {}", std::io::Error::last_os_error());
        }
        before
    });
}

/// Only what is async-signal-safe (signal-safety(7)): atomics, mmap(2), sigaction(2).
extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands a valid `info` to a handler with SA_SIGINFO.
    let code = unsafe { (*info).si_code };
    // A signal that a process sent has no address.
    let fault = code > 0;
    // SAFETY: as above; a SIGBUS of the kernel's has an address.
    let addr = if fault { unsafe { (*info).si_addr() as usize } } else { 0 };
    let places = TABLE.iter().take(HIGHEST.load(Ordering::Acquire));
    for place in places.filter(|_| fault) {
        // The entry of this mapping cannot change now: the mapping is being accessed.
        let Some((start, len)) = place.range() else { continue };
        if addr.wrapping_sub(start) < len && replace(start, len) {
            place.lost.store(true, Ordering::Release);
            LOSSES.fetch_add(1, Ordering::Release);
            return;
        }
    }
    let Some(before) = BEFORE.get() else { return by_default(fault) };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => by_default(fault),
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: what sigaction(2) gave as a handler with SA_SIGINFO is of this type.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: likewise, without SA_SIGINFO.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Replaces a mapping by anonymous memory.
fn replace(start: usize, len: usize) -> bool {
    // SAFETY: errno belongs to the thread, which may be about to look at it.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is a mapping of ours that lives, since one of its users has just faulted in it;
    // no reference to its contents exists, and its addresses stay valid.
    let mapped = unsafe {
        libc::mmap(
            start as *mut c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    mapped != libc::MAP_FAILED
}

/// Ends the process by the default action.
fn by_default(fault: bool) {
    // SAFETY: sets the default action. A fault then happens again by itself; what was sent is sent
    // again, and comes when the handler returns.
    unsafe {
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
        if !fault {
            libc::raise(libc::SIGBUS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `range` never combines the start of one mapping with the length of another, even where both begin at the same
    /// address.
    #[test]
    fn a_range_is_that_of_one_mapping() {
        let place = Place::new();
        assert_eq!(place.range(), None);
        assert_eq!(place.range_while(|| place.take(4096, 1)), None);
        assert_eq!(place.range(), Some((4096, 1)));
        let again = || {
            place.free();
            place.take(4096, 2);
        };
        assert_eq!(place.range_while(again), None);
        assert_eq!(place.range(), Some((4096, 2)));
        assert_eq!(place.range_while(|| place.free()), None);
        assert_eq!(place.range(), None);
    }
}
