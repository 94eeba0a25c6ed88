//! Ownership of descriptors: a kill closes the daemon's descriptors. Guests keep theirs.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// The descriptors that do not belong to the daemon.
#[derive(Debug, Default)]
pub(crate) struct Fds(RefCell<BTreeSet<RawFd>>);

impl Fds {
    pub(crate) fn keep(&self, fd: RawFd) {
        self.0.borrow_mut().insert(fd);
    }

    /// Marks all open descriptors as not the daemon's.
    pub(crate) fn keep_all(&self) {
        self.0.borrow_mut().extend(open());
    }

    /// Closes the descriptors of daemons except `others`, as the kernel does for a process that has ended.
    pub(crate) fn close_all_but(&self, others: &BTreeSet<RawFd>) {
        let kept = self.0.borrow();
        close(open().filter(|fd| !kept.contains(fd) && !others.contains(fd)));
    }

    pub(crate) fn forget(&self, fd: RawFd) {
        self.0.borrow_mut().remove(&fd);
    }
}

/// Closes descriptors of a daemon that has ended.
pub(crate) fn close(all: impl IntoIterator<Item = RawFd>) {
    for fd in all {
        let _ = nix::unistd::close(fd);
    }
}

/// All open descriptors.
pub(crate) fn open() -> impl Iterator<Item = RawFd> {
    // The list itself gets the lowest free number, as any new descriptor does.
    let own = File::open("/dev/null").expect("a descriptor").as_raw_fd();
    let list = std::fs::read_dir("/proc/self/fd").expect("a list of descriptors");
    let all: Vec<RawFd> =
        list.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    all.into_iter().filter(move |fd| *fd != own)
}

/// A descriptor that belongs to a guest.
#[derive(Debug)]
pub(crate) struct Kept {
    fd: OwnedFd,
    fds: Rc<Fds>,
}

impl Kept {
    pub(crate) fn new(fds: &Rc<Fds>, fd: OwnedFd) -> Rc<Self> {
        fds.keep(fd.as_raw_fd());
        Rc::new(Kept { fd, fds: fds.clone() })
    }

    /// An eventfd of a guest, which does not block.
    pub(crate) fn eventfd(fds: &Rc<Fds>) -> Rc<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Kept::new(fds, EventFd::from_flags(flags).expect("an eventfd").into())
    }

    /// Whether this eventfd was signalled since the last call.
    pub(crate) fn was_signalled(&self) -> bool {
        nix::unistd::read(&self.fd, &mut [0; 8]).is_ok()
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
