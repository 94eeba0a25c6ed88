//! Ownership of descriptors: a kill closes the daemon's descriptors. Guests keep theirs.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

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

    /// Closes the daemon's descriptors, as the kernel does for a killed process.
    pub(crate) fn close_others(&self) {
        let kept = self.0.borrow();
        for fd in open().filter(|fd| !kept.contains(fd)) {
            // The list includes the descriptor of the directory itself, which is closed by now.
            let _ = nix::unistd::close(fd);
        }
    }

    pub(crate) fn forget(&self, fd: RawFd) {
        self.0.borrow_mut().remove(&fd);
    }
}

fn open() -> impl Iterator<Item = RawFd> {
    let list = std::fs::read_dir("/proc/self/fd").expect("a list of descriptors");
    let all: Vec<_> =
        list.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    all.into_iter()
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
