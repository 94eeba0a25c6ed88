//! Images that the process before this one had open, and hands over: a node that is opened takes its
//! descriptor from here. The open file description stays the same, and with it the image's locks.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// Images that were handed over and that no node has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    images: Vec<(PathBuf, OwnedFd)>,
    owned: Arc<AtomicBool>,
}

impl Inherited {
    pub(crate) fn add(&mut self, path: PathBuf, fd: OwnedFd) {
        self.images.push((path, fd));
    }

    /// Whether those that were handed over belong to this process alone, which may then unlock them.
    pub(crate) fn owned(&self) -> &Arc<AtomicBool> {
        &self.owned
    }

    /// From now on they do.
    pub(crate) fn own(&self) {
        self.owned.store(true, Ordering::Relaxed);
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
        let index = self.images.iter().position(|(at, fd)| at == path && fits(fd))?;
        Some(self.images.swap_remove(index).1.into())
    }
}

/// The images that are open, for who takes over.
#[derive(Debug, Default)]
pub(crate) struct Images(Vec<Image>);

#[derive(Debug)]
struct Image {
    path: PathBuf,
    fd: Weak<OwnedFd>,
    flush_failed: Weak<AtomicBool>,
}

impl Images {
    pub(crate) fn remember(
        &mut self,
        path: &Path,
        fd: &Arc<OwnedFd>,
        flush_failed: &Arc<AtomicBool>,
    ) {
        self.0.retain(|image| image.fd.strong_count() > 0);
        let (fd, flush_failed) = (Arc::downgrade(fd), Arc::downgrade(flush_failed));
        self.0.push(Image { path: path.to_owned(), fd, flush_failed });
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&Path, Arc<OwnedFd>)> {
        self.0.iter().filter_map(|image| Some((image.path.as_path(), image.fd.upgrade()?)))
    }

    /// One whose node has had a flush fail.
    pub(crate) fn with_failed_flush(&self) -> Option<&Path> {
        let failed = |image: &&Image| {
            image.flush_failed.upgrade().is_some_and(|failed| failed.load(Ordering::Relaxed))
        };
        self.0.iter().find(failed).map(|image| image.path.as_path())
    }
}

/// The way to open once more what `file` is, wherever its name has gone.
pub(crate) fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}
