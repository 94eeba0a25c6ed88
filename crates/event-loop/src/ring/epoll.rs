//! The ring's replacement on machines without io_uring: epoll for descriptors and sockets. File I/O uses the
//! thread pool.

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::ring::{Completion, Ready, Ring, RingFile, RingOp, Wait, socket};

/// Mode of a poll that ends with its first event and is then removed. Miri supports only EPOLLET.
const ONCE: i32 = if cfg!(miri) { libc::EPOLLET } else { libc::EPOLLONESHOT };

/// Events taken by one epoll_pwait2(2).
const BATCH: usize = 128;

/// epoll behind the ring interface. It polls descriptors, and reads and writes sockets and pipes once ready.
pub(crate) struct EpollRing {
    epoll: OwnedFd,
    /// Polls that are armed.
    armed: HashMap<u64, Armed>,
    completions: VecDeque<Completion>,
    /// The last wait filled the event list, so further events may be pending. The epoll descriptor, watched
    /// edge-triggered, does not signal those again.
    full: bool,
    /// epoll_pwait2(2) is available: Linux 5.11 or later, and not denied by a filter.
    has_pwait2: bool,
}

struct Armed {
    fd: RawFd,
    /// A duplicate of `fd` in the set, if `fd` is already in it for another poll.
    stand_in: Option<OwnedFd>,
    multishot: bool,
    /// The read or write of a socket or pipe that waits for this poll.
    transfer: Option<RingOp>,
}

impl EpollRing {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: epoll_create1(2) takes no memory. The returned descriptor has no other owner.
        let epoll = unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let (armed, completions) = Default::default();
        Ok(EpollRing { epoll, armed, completions, full: false, has_pwait2: true })
    }

    fn control(&self, call: i32, fd: RawFd, events: u32, user_data: u64) -> Result<(), i32> {
        let mut event = libc::epoll_event { events, u64: user_data };
        // SAFETY: epoll_ctl(2) reads `event`, which lives across the call.
        match unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), call, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    fn complete(&mut self, user_data: u64, result: i32, more: bool) {
        self.completions.push_back(Completion { user_data, result, more });
    }

    /// Ends a poll without a completion, for the simulation.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn forget(&mut self, user_data: u64) {
        self.disarm(user_data);
    }

    /// Removes a poll from the set.
    fn disarm(&mut self, user_data: u64) -> bool {
        let Some(armed) = self.armed.remove(&user_data) else { return false };
        let fd = armed.stand_in.as_ref().map_or(armed.fd, |fd| fd.as_raw_fd());
        // Fails only if the descriptor is closed, which has removed it from the set.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, user_data);
        true
    }

    /// Adds a poll to the set. epoll takes each descriptor once, unlike io_uring, so a second poll uses a
    /// duplicate.
    fn arm(&self, fd: RawFd, events: u32, user_data: u64) -> Result<Option<OwnedFd>, i32> {
        match self.control(libc::EPOLL_CTL_ADD, fd, events, user_data) {
            Err(libc::EEXIST) => {}
            result => return result.map(|()| None),
        }
        // SAFETY: the descriptor is open, by `Ring::push`'s contract.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let stand_in = fd.try_clone_to_owned();
        let stand_in = stand_in.map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
        self.control(libc::EPOLL_CTL_ADD, stand_in.as_raw_fd(), events, user_data)?;
        Ok(Some(stand_in))
    }

    /// Reads or writes a socket or pipe, now or once it is ready.
    ///
    /// # Safety
    ///
    /// That of [`Ring::push`].
    unsafe fn transfer(&mut self, fd: RawFd, op: RingOp, user_data: u64) {
        // SAFETY: this function's contract.
        let result = unsafe { socket::transfer(fd, &op) };
        if result != -libc::EAGAIN {
            return self.complete(user_data, result, false);
        }
        let write =
            matches!(op, RingOp::Rw { write: true, .. } | RingOp::RwVectored { write: true, .. });
        let events = (if write { libc::EPOLLOUT } else { libc::EPOLLIN } | ONCE) as u32;
        match self.arm(fd, events, user_data) {
            Ok(stand_in) => {
                let armed = Armed { fd, stand_in, multishot: false, transfer: Some(op) };
                self.armed.insert(user_data, armed);
            }
            Err(errno) => self.complete(user_data, -errno, false),
        }
    }

    /// Calls epoll_pwait2(2), or its nearest equivalent. Returns the count, or -1 on errors.
    fn wait(&mut self, events: &mut [libc::epoll_event], timeout: Option<libc::timespec>) -> i32 {
        let (epoll, room) = (self.epoll.as_raw_fd(), events.len() as i32);
        if cfg!(miri) {
            // Miri supports only this call. Whole milliseconds suffice, as simulations wait for ever or not at
            // all.
            let ms = timeout.map_or(-1, |t| (t.tv_sec * 1000 + t.tv_nsec / 1_000_000) as i32);
            // SAFETY: writes at most `room` events to `events`.
            return unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), room, ms) };
        }
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // The system call's timeout has 64-bit fields, like `timespec` on these machines.
        if self.has_pwait2 && cfg!(target_pointer_width = "64") {
            let (call, list) = (libc::SYS_epoll_pwait2, events.as_mut_ptr());
            let (no_mask, mask_len) = (std::ptr::null::<libc::sigset_t>(), 0_usize);
            // A raw system call, as glibc has the function only since 2.35, and 2.34 suffices otherwise.
            // SAFETY: writes at most `room` events to `events`, reads `timeout`, which lives across the
            // call, and takes no signal mask.
            let count = unsafe {
                libc::syscall(call, epoll, list, room, timeout, no_mask, mask_len) as i32
            };
            let errno = io::Error::last_os_error().raw_os_error();
            if count >= 0 || !matches!(errno, Some(libc::ENOSYS | libc::EPERM)) {
                return count;
            }
            self.has_pwait2 = false;
        }
        // ppoll(2) supports nanoseconds; epoll_wait(2) returns the events.
        let mut poll = libc::pollfd { fd: epoll, events: libc::POLLIN, revents: 0 };
        // SAFETY: one `pollfd`, and the arguments of above.
        match unsafe { libc::ppoll(&mut poll, 1, timeout, std::ptr::null()) } {
            // SAFETY: as above.
            1.. => unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), room, 0) },
            none_or_error => none_or_error,
        }
    }
}

#[cfg(any(test, feature = "sim"))]
impl std::os::fd::AsFd for EpollRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.epoll)
    }
}

impl Ring for EpollRing {
    unsafe fn push(&mut self, op: &RingOp, user_data: u64) -> bool {
        match *op {
            RingOp::PollAdd { fd, events, multishot } => {
                // Edge-triggered, like a multishot poll. The low event bits are the same in both interfaces.
                let mode = if multishot { libc::EPOLLET } else { ONCE } as u32;
                match self.arm(fd, events | mode, user_data) {
                    Ok(stand_in) => {
                        self.armed
                            .insert(user_data, Armed { fd, stand_in, multishot, transfer: None });
                    }
                    Err(errno) => self.complete(user_data, -errno, false),
                }
            }
            RingOp::PollRemove { user_data: poll } | RingOp::Cancel { user_data: poll } => {
                if self.disarm(poll) {
                    self.complete(poll, -libc::ECANCELED, false);
                    self.complete(user_data, 0, false);
                } else {
                    self.complete(user_data, -libc::ENOENT, false);
                }
            }
            RingOp::Rw { file: RingFile::Fd(fd), .. }
            | RingOp::RwVectored { file: RingFile::Fd(fd), .. } => {
                // SAFETY: the caller's promise.
                unsafe { self.transfer(fd, *op, user_data) };
            }
            // Not reached: the loop sends other file I/O to its thread pool, as `does_file_io` is false.
            _ => self.complete(user_data, -libc::EOPNOTSUPP, false),
        }
        true
    }

    fn queued(&mut self) -> u32 {
        0
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let wait = if self.completions.is_empty() { wait } else { Wait::No };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let timeout = match wait {
            Wait::No => Some(0),
            Wait::For(ns) => Some(ns),
            Wait::Forever => None,
        };
        let timeout = timeout.map(|ns| libc::timespec {
            tv_sec: (ns / 1_000_000_000).cast_signed(),
            tv_nsec: (ns % 1_000_000_000).cast_signed(),
        });
        let count = self.wait(&mut events, timeout);
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EINTR) => Ok(()),
                _ => Err(error),
            };
        };
        self.full = count == BATCH;
        for event in events.iter().take(count) {
            let (user_data, mask) = (event.u64, event.events);
            let Some(armed) = self.armed.get(&user_data) else { continue };
            let Armed { fd, multishot, transfer, .. } = *armed;
            if !multishot {
                self.disarm(user_data);
            }
            if let Some(op) = transfer {
                // SAFETY: it has not completed, so `push`'s contract still holds.
                unsafe { self.transfer(fd, op, user_data) };
                continue;
            }
            self.complete(user_data, mask.cast_signed(), multishot);
        }
        Ok(())
    }

    fn ready(&mut self) -> Ready {
        match (self.completions.is_empty(), self.full) {
            (false, _) => Ready::Completions,
            (true, true) => Ready::NeedsEnter,
            (true, false) => Ready::Nothing,
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let room = (into.capacity() - into.len()).min(self.completions.len());
        into.extend(self.completions.drain(..room));
    }

    fn pollable_fd(&self) -> Option<RawFd> {
        Some(self.epoll.as_raw_fd())
    }

    fn does_file_io(&self) -> bool {
        false
    }

    fn register_file(&mut self, _fd: RawFd) -> Option<u32> {
        None
    }

    fn unregister_file(&mut self, _index: u32) {}
}
