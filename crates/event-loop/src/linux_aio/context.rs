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
    /// The completion ring, where it has the shape we know. It is mapped for as long as the context.
    ring: Option<NonNull<RingHead>>,
}

// SAFETY: a context and the mapping of its ring belong to the process, not to the thread that made
// them; who has the `Context` is the only one to use them, since it is not `Sync`.
unsafe impl Send for Context {}

impl Context {
    /// A context with room for `capacity` operations in flight.
    pub(super) fn new(capacity: u32) -> io::Result<Context> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: io_setup(2) writes the context's id to `id`, which is 0 before, as it wants.
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

    /// Does without the mapped ring, as with a kernel whose ring we do not know.
    #[cfg(test)]
    pub(super) fn forget_ring(&mut self) {
        self.ring = None;
    }

    /// Takes it from the process behind the loop's back: nothing works any more.
    #[cfg(test)]
    pub(super) fn destroy_underneath(&self) {
        assert!(self.ring.is_none(), "the ring would be unmapped");
        assert!(Context { id: self.id, ring: None }.destroy());
    }

    /// Whether completions can be seen without a system call.
    pub(super) fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Whether there are completions, as far as can be seen without a system call.
    pub(super) fn has_completions(&self) -> bool {
        self.head().is_some_and(|ring| {
            ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire)
        })
    }

    fn head(&self) -> Option<&RingHead> {
        // SAFETY: the ring is mapped while the context lives; what others write to it while this
        // reference lives is atomic.
        self.ring.map(|ring| unsafe { ring.as_ref() })
    }

    /// io_submit(2): how many of `iocbs` were taken, from the first on; an error is the first one's.
    ///
    /// # Safety
    ///
    /// The pointers lead to operations whose descriptors and memory stay valid until the completion,
    /// and nobody holds a Rust reference to memory that is written to.
    pub(super) unsafe fn submit(&self, iocbs: &mut [*mut Iocb]) -> io::Result<usize> {
        // SAFETY: `iocbs.len()` pointers to operations, as the caller promises; the kernel copies
        // each and writes to its `key` only.
        let taken = check(unsafe {
            libc::syscall(libc::SYS_io_submit, self.id, iocbs.len(), iocbs.as_mut_ptr())
        })?;
        Ok(usize::try_from(taken).unwrap_or(0).min(iocbs.len()))
    }

    /// Appends completions to `into`, oldest first, as far as its capacity goes. Does not wait.
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
            // SAFETY: the events follow the head in one mapping, and `next` is less than their
            // number; the kernel wrote this one before it moved the tail, and writes there again
            // only after the head has passed it.
            let event = unsafe { ring.add(1).cast::<IoEvent>().add(next as usize).read() };
            into.push(completion(&event));
            next = if next + 1 == head.nr { 0 } else { next + 1 };
            room -= 1;
        }
        head.head.store(next, Ordering::Release);
        Ok(())
    }

    /// Waits for a completion, and appends what has come to `into`.
    pub(super) fn wait(&self, into: &mut Vec<Completion>) -> io::Result<()> {
        self.fetch(into, true).map(drop)
    }

    fn fetch_all(&self, into: &mut Vec<Completion>) -> io::Result<()> {
        while self.fetch(into, false)? == FETCH {}
        Ok(())
    }

    /// io_getevents(2), once: how many events there were.
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

    /// Waits until nothing is in flight any more, as io_destroy(2) does. `false`: that failed, and
    /// what is in flight still is.
    pub(super) fn destroy(self) -> bool {
        // SAFETY: the id is that of a context, which nobody uses from here on.
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
