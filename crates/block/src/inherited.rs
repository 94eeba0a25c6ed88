//! Images that the process before this one had open, and hands over: a node that is opened takes its
//! descriptor from here. The open file description stays the same, and with it the image's locks.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// Images that were handed over and that no node has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inherited(Vec<(PathBuf, OwnedFd)>);

impl Inherited {
    pub(crate) fn add(&mut self, path: PathBuf, fd: OwnedFd) {
        self.0.push((path, fd));
    }

    /// The image at `path`, if it is there, open as it is wanted.
    pub(crate) fn take(&mut self, path: &Path, direct: bool, read_only: bool) -> Option<File> {
        let fits = |fd: &OwnedFd| {
            let flags = fcntl(fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
            flags.is_ok_and(|flags| {
                flags.contains(OFlag::O_DIRECT) == direct
                    && (flags & OFlag::O_ACCMODE == OFlag::O_RDONLY) == read_only
            })
        };
        let index = self.0.iter().position(|(at, fd)| at == path && fits(fd))?;
        Some(self.0.swap_remove(index).1.into())
    }
}

/// The images that are open, for who takes over.
#[derive(Debug, Default)]
pub(crate) struct Images(Vec<(PathBuf, Weak<OwnedFd>)>);

impl Images {
    pub(crate) fn remember(&mut self, path: &Path, fd: &Arc<OwnedFd>) {
        self.0.retain(|(_, fd)| fd.strong_count() > 0);
        self.0.push((path.to_owned(), Arc::downgrade(fd)));
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&Path, Arc<OwnedFd>)> {
        self.0.iter().filter_map(|(path, fd)| Some((path.as_path(), fd.upgrade()?)))
    }
}

/// The way to open once more what `file` is, wherever its name has gone.
pub(crate) fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}
