//! An AIO context: the system calls, and the completion ring that the kernel maps into the process.

#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::abi::{IoEvent, Iocb, RING_MAGIC, RingHead};
use crate::ring::Completion;

/// Events fetched by one io_getevents(2).
const FETCH: usize = 64;

/// A context of io_setup(2), for one thread.
pub(super) struct Context {
    id: libc::c_ulong,
    /// The completion ring, if its layout is known. Mapped as long as the context exists.
    ring: Option<NonNull<RingHead>>,
}

// SAFETY: a context and the mapping of its ring belong to the process, not to a thread. The owner of the
// `Context` is its only user, since it is not `Sync`.
unsafe impl Send for Context {}

impl Context {
    /// Creates a context with room for `capacity` operations in flight.
    pub(super) fn new(capacity: u32) -> io::Result<Context> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: io_setup(2) writes the context's id to `id`, which has to be 0 before.
        check(unsafe { libc::syscall(libc::SYS_io_setup, capacity, &raw mut id) })?;
        let head = NonNull::new(id as *mut RingHead);
        let ring = head.filter(|head| {
            // SAFETY: a context's id is the address of its ring, readable and writable, which begins
            // with a `RingHead` of at least this size; these fields never change.
            let head = unsafe { head.as_ref() };
            head.magic == RING_MAGIC
                && head.incompat_features == 0
                && head.header_length as usize == size_of::<RingHead>()
                && head.nr > 0
        });
        Ok(Context { id, ring })
    }

    /// Stops using the mapped ring, as with a kernel whose ring has another layout.
    #[cfg(test)]
    pub(super) fn forget_ring(&mut self) {
        self.ring = None;
    }

    /// Destroys the context without the loop's knowledge: all its calls fail from now on.
    #[cfg(test)]
    pub(super) fn destroy_underneath(&self) {
        assert!(self.ring.is_none(), "the ring would be unmapped");
        assert!(Context { id: self.id, ring: None }.destroy());
    }

    /// Whether completions can be seen without a system call.
    pub(super) fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Whether the mapped ring has completions. No system call.
    pub(super) fn has_completions(&self) -> bool {
        self.head().is_some_and(|ring| {
            ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
        })
    }

    fn head(&self) -> Option<&RingHead> {
        // SAFETY: the ring is mapped while the context lives. The fields that the kernel writes are atomic.
        self.ring.map(|ring| unsafe { ring.as_ref() })
    }

    /// Calls io_submit(2). Returns how many of `iocbs` were taken, from the first on, or the first's error.
    ///
    /// # Safety
    ///
    /// The pointers lead to operations whose descriptors and memory stay valid until the completion. No Rust
    /// reference exists to memory that is written to.
    pub(super) unsafe fn submit(&self, iocbs: &mut [*mut Iocb]) -> io::Result<usize> {
        // SAFETY: `iocbs.len()` pointers to operations, as the caller promises; the kernel copies
        // each and writes to its `key` only.
        let taken = check(unsafe {
            libc::syscall(libc::SYS_io_submit, self.id, iocbs.len(), iocbs.as_mut_ptr())
        })?;
        Ok(usize::try_from(taken).unwrap_or(0).min(iocbs.len()))
    }

    /// Appends completions to `into`, oldest first, up to its capacity. Does not wait.
    pub(super) fn reap(&self, into: &mut Vec<Completion>) -> io::Result<()> {
        let (Some(ring), Some(head)) = (self.ring, self.head()) else {
            return self.fetch_all(into);
        };
        let tail = head.tail.load(Ordering::Acquire);
        let mut next = head.head.load(Ordering::Relaxed);
        if next >= head.nr || tail >= head.nr {
            return self.fetch_all(into);
        }
        let mut room = into.capacity() - into.len();
        while next != tail && room > 0 {
            // SAFETY: the events follow the head in one mapping, and `next` is below their number. The
            // kernel wrote this event before it moved the tail, and overwrites it only once the head has
            // passed it.
            let event = unsafe { ring.add(1).cast::<IoEvent>().add(next as usize).read() };
            into.push(completion(&event));
            next = if next + 1 == head.nr { 0 } else { next + 1 };
            room -= 1;
        }
        head.head.store(next, Ordering::Release);
        Ok(())
    }

    /// Waits for a completion, and appends all available ones to `into`.
    pub(super) fn wait(&self, into: &mut Vec<Completion>) -> io::Result<()> {
        self.fetch(into, true).map(drop)
    }

    fn fetch_all(&self, into: &mut Vec<Completion>) -> io::Result<()> {
        while self.fetch(into, false)? == FETCH {}
        Ok(())
    }

    /// Calls io_getevents(2) once. Returns the number of events.
    fn fetch(&self, into: &mut Vec<Completion>, wait: bool) -> io::Result<usize> {
        let room = (into.capacity() - into.len()).min(FETCH);
        if room == 0 {
            return Ok(0);
        }
        let mut events = [const { std::mem::MaybeUninit::<IoEvent>::uninit() }; FETCH];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = if wait { std::ptr::null() } else { &raw const now };
        let least = usize::from(wait);
        let count = loop {
            // SAFETY: writes at most `room` events to `events`, which has room for them, and reads
            // `timeout`, which lives across the call.
            let count = check(unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.id,
                    least,
                    room,
                    events.as_mut_ptr(),
                    timeout,
                )
            });
            match count {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                count => break usize::try_from(count?).unwrap_or(0),
            }
        };
        for event in events.iter().take(count) {
            // SAFETY: the kernel has written `count` events.
            into.push(completion(unsafe { event.assume_init_ref() }));
        }
        Ok(count)
    }

    /// Calls io_destroy(2), which waits until nothing is in flight. Returns `false` if that failed and
    /// operations are still in flight.
    pub(super) fn destroy(self) -> bool {
        // SAFETY: the id belongs to a context that is not used from here on.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) == 0 }
    }
}

fn completion(event: &IoEvent) -> Completion {
    let limit = if event.result < 0 { -libc::EIO } else { i32::MAX };
    let result = i32::try_from(event.result).unwrap_or(limit);
    Completion { user_data: event.data, result, more: false }
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
