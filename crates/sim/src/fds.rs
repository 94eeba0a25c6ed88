//! Ownership of descriptors: a kill closes the daemon's descriptors. Guests keep theirs.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// The descriptors that do not belong to the daemon.
#[derive(Debug, Default)]
pub(crate) struct Fds {
    kept: RefCell<BTreeSet<RawFd>>,
    /// Number of steps of daemons.
    steps: Cell<u64>,
}

impl Fds {
    pub(crate) fn keep(&self, fd: RawFd) {
        self.kept.borrow_mut().insert(fd);
    }

    /// Marks all open descriptors as not the daemon's.
    pub(crate) fn keep_all(&self) {
        self.kept.borrow_mut().extend(open());
    }

    /// Closes the descriptors of daemons except `others`, as the kernel does for a process that has ended.
    pub(crate) fn close_all_but(&self, others: &BTreeSet<RawFd>) {
        let kept = self.kept.borrow();
        close(open().filter(|fd| !kept.contains(fd) && !others.contains(fd)));
    }

    pub(crate) fn forget(&self, fd: RawFd) {
        self.kept.borrow_mut().remove(&fd);
    }

    /// Records that a daemon is about to run.
    pub(crate) fn daemon_runs(&self) {
        self.steps.set(self.steps.get() + 1);
    }
}

/// Closes descriptors of a daemon that has ended.
pub(crate) fn close(all: impl IntoIterator<Item = RawFd>) {
    for fd in all {
        let _ = nix::unistd::close(fd);
    }
}

/// Descriptors that are asked for with one system call.
const BATCH: RawFd = 256;

/// All open descriptors, in ascending order.
pub(crate) fn open() -> impl Iterator<Item = RawFd> {
    let mut all = Vec::new();
    for first in (0..).step_by(BATCH as usize) {
        let before = all.len();
        all.extend(open_of(first..first + BATCH));
        // A new descriptor has the lowest free number, so a whole batch is free only above all others.
        if all.len() == before {
            break;
        }
    }
    all.into_iter()
}

/// The descriptors of these that are open. Cheaper than a list of `/proc/self/fd`.
fn open_of(range: Range<RawFd>) -> impl Iterator<Item = RawFd> {
    let mut asked: Vec<_> = range.map(|fd| libc::pollfd { fd, events: 0, revents: 0 }).collect();
    // SAFETY: poll(2) writes to the elements, which live across the call.
    let polled = unsafe { libc::poll(asked.as_mut_ptr(), asked.len() as libc::nfds_t, 0) };
    assert!(polled >= 0, "poll: {}", std::io::Error::last_os_error());
    let is_open = |asked: &libc::pollfd| asked.revents & libc::POLLNVAL == 0;
    asked.into_iter().filter(is_open).map(|asked| asked.fd)
}

/// A descriptor that belongs to a guest.
#[derive(Debug)]
pub(crate) struct Kept {
    fd: OwnedFd,
    fds: Rc<Fds>,
    /// Steps of daemons at the last call of [`was_signalled`](Kept::was_signalled).
    looked: Cell<Option<u64>>,
}

impl Kept {
    pub(crate) fn new(fds: &Rc<Fds>, fd: OwnedFd) -> Rc<Self> {
        fds.keep(fd.as_raw_fd());
        Rc::new(Kept { fd, fds: fds.clone(), looked: Cell::new(None) })
    }

    /// An eventfd of a guest, which does not block.
    pub(crate) fn eventfd(fds: &Rc<Fds>) -> Rc<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Kept::new(fds, EventFd::from_flags(flags).expect("an eventfd").into())
    }

    /// Whether a daemon has signalled this eventfd since the last call.
    pub(crate) fn was_signalled(&self) -> bool {
        let steps = Some(self.fds.steps.get());
        // Saves the system call if no daemon has run since.
        self.looked.replace(steps) != steps && nix::unistd::read(&self.fd, &mut [0; 8]).is_ok()
    }
}

impl std::ops::Deref for Kept {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.fds.forget(self.fd.as_raw_fd());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_of_a_daemon_is_seen_once() {
        let fds = Rc::new(Fds::default());
        let call = Kept::eventfd(&fds);
        assert!(!call.was_signalled());
        fds.daemon_runs();
        nix::unistd::write(&**call, &1u64.to_ne_bytes()).unwrap();
        assert!(call.was_signalled() && !call.was_signalled());
        fds.daemon_runs();
        assert!(!call.was_signalled());
    }

    #[test]
    fn all_open_descriptors_are_listed() {
        // More than are asked for at once.
        let file = std::fs::File::open("/dev/null").unwrap();
        let more: Vec<_> = (0..2 * BATCH).map(|_| file.try_clone().unwrap()).collect();
        let listed: BTreeSet<_> = open().collect();
        assert!(more.iter().all(|one| listed.contains(&one.as_raw_fd())));
        assert!(!listed.contains(&-1) && listed.iter().all(|fd| *fd < 4 * BATCH));
    }
}
