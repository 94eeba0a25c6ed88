//! Whose descriptors are whose: a daemon that is killed loses all of its own, and guests keep theirs.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

/// The descriptors that are not the daemon's.
#[derive(Debug, Default)]
pub(crate) struct Fds(RefCell<BTreeSet<RawFd>>);

impl Fds {
    pub(crate) fn keep(&self, fd: RawFd) {
        self.0.borrow_mut().insert(fd);
    }

    /// Keeps all that are open now.
    pub(crate) fn keep_all(&self) {
        self.0.borrow_mut().extend(open());
    }

    /// Closes what is not kept, as the kernel does for a process that is killed.
    pub(crate) fn close_others(&self) {
        let kept = self.0.borrow();
        for fd in open().filter(|fd| !kept.contains(fd)) {
            // One of them was that of the list, which is gone.
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

/// A descriptor of a guest's.
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
