//! What happens when a front end shrinks a file that it has handed over: an access to what is gone raises
//! SIGBUS, which would end the process, and with it the disks of all other guests.
//!
//! The handler puts anonymous memory in the place of the whole mapping, so that the access goes on, and
//! marks the region as lost. A guest whose memory was taken away has no use for what is read or written
//! there; whoever serves it finds out by [`losses`] and stops. Faults elsewhere go to the handler
//! that was there before.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use event_loop::sync::lock;
use libc::{c_int, c_void, siginfo_t};

use crate::view::MemoryView;

/// Regions that can be watched over at a time. Those beyond are not: more mappings than Linux gives a process
/// unless it is told to (vm.max_map_count, 65530).
const PLACES: usize = 1 << 16;

/// The regions, for the handler, which can take no lock.
static TABLE: [Place; PLACES] = [const { Place::new() }; PLACES];
/// Places that were ever taken.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);
/// Taken to change the table.
static CHANGES: Mutex<()> = Mutex::new(());
/// What handled SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

struct Place {
    /// The mapping's first byte; 0: the place is free.
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

impl Place {
    const fn new() -> Self {
        Place { start: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) }
    }
}

/// How many regions were lost since the process began: when this has changed, ask
/// [`MappedRegion::is_lost`](crate::MappedRegion::is_lost).
#[inline]
pub fn losses() -> usize {
    event_loop::lost::losses()
}

/// A mapping that is watched over. To be dropped before the mapping is.
#[derive(Debug)]
pub(crate) struct Watched(Option<usize>);

impl Watched {
    /// Watches over a mapping of `len` bytes from `start` on, whole pages of its file's.
    pub(crate) fn new(start: NonNull<c_void>, len: usize) -> Self {
        let _changing = lock(&CHANGES);
        install();
        let free = TABLE.iter().position(|place| place.start.load(Ordering::Relaxed) == 0);
        let Some(index) = free else {
            log::warn!("more than {PLACES} memory regions: a front end that shrinks one is fatal");
            return Watched(None);
        };
        let place = &TABLE[index];
        place.lost.store(false, Ordering::Relaxed);
        place.len.store(len, Ordering::Relaxed);
        // The handler sees the length once it sees the start.
        place.start.store(start.as_ptr() as usize, Ordering::Release);
        HIGHEST.fetch_max(index + 1, Ordering::Release);
        Watched(Some(index))
    }

    /// Nothing.
    pub(crate) const fn none() -> Self {
        Watched(None)
    }

    /// Whether it was replaced by anonymous memory.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.is_some_and(|index| TABLE[index].lost.load(Ordering::Acquire))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            let _changing = lock(&CHANGES);
            TABLE[index].start.store(0, Ordering::Release);
        }
    }
}

/// Installs the handler, once.
fn install() {
    BEFORE.get_or_init(|| {
        event_loop::lost::ask_by(|owner| {
            let view = owner.downcast_ref::<MemoryView>();
            view.is_some_and(|view| view.memory().lost_region().is_some())
        });
        // SAFETY: zeroes are a valid `sigaction`: the default action, no flags, an empty mask.
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_bus_error;
        ours.sa_sigaction = handler as usize;
        // On the stack for signals, where a thread has one; whoever was there before may want it.
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
    // Sent by somebody, it has no address.
    let fault = code > 0;
    // SAFETY: as above; a SIGBUS of the kernel's has an address.
    let addr = if fault { unsafe { (*info).si_addr() as usize } } else { 0 };
    let places = TABLE.iter().take(HIGHEST.load(Ordering::Acquire));
    for place in places.filter(|_| fault) {
        let start = place.start.load(Ordering::Acquire);
        let len = place.len.load(Ordering::Relaxed);
        if start != 0 && addr.wrapping_sub(start) < len && replace(start, len) {
            place.lost.store(true, Ordering::Release);
            event_loop::lost::lost();
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

/// Puts anonymous memory in the place of a mapping.
fn replace(start: usize, len: usize) -> bool {
    // SAFETY: errno belongs to the thread, which may be about to look at it.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is a mapping of ours that lives, since one of its users has just faulted in it;
    // nobody has a reference to its contents, and its addresses stay valid.
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

/// Has it end as if there were no handler.
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
