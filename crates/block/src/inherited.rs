//! Images that the process before this one had open, and hands over: a node that is opened takes its
//! descriptor from here. The open file description stays the same, and with it the image's locks.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// An image that is open: what one process hands over, and the other makes a node of.
#[derive(Debug)]
pub struct OpenImage<Fd> {
    /// By which it was opened.
    pub path: PathBuf,
    /// What is read and written.
    pub fd: Fd,
    /// The descriptor that holds its locks; `None`: that is the same. A node that was opened anew has
    /// another one, and the locks stay with the first.
    pub lock: Option<Fd>,
}

/// Images that were handed over and that no node has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    images: Vec<OpenImage<OwnedFd>>,
    /// Another process has them, too.
    shared: bool,
    owned: Arc<AtomicBool>,
}

impl Inherited {
    pub(crate) fn add(&mut self, image: OpenImage<OwnedFd>) {
        self.images.push(image);
        self.shared = true;
    }

    /// Whether another process has images that this one opens, and goes on with them if nothing comes of that.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Whether those that were handed over belong to this process alone, which may then unlock them.
    pub(crate) fn owned(&self) -> &Arc<AtomicBool> {
        &self.owned
    }

    /// From now on they do, and those that no node has taken are nobody's.
    pub(crate) fn own(&mut self) {
        self.images.clear();
        self.shared = false;
        self.owned.store(true, Ordering::Relaxed);
    }

    /// The image at `path`, if it is there, open as it is wanted, and what its locks are held by if that
    /// is another descriptor.
    pub(crate) fn take(
        &mut self,
        path: &Path,
        direct: bool,
        read_only: bool,
    ) -> Option<(File, Option<OwnedFd>)> {
        let fits = |fd: &OwnedFd| {
            let flags = fcntl(fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
            flags.is_ok_and(|flags| {
                flags.contains(OFlag::O_DIRECT) == direct
                    && (flags & OFlag::O_ACCMODE == OFlag::O_RDONLY) == read_only
            })
        };
        let index = self.images.iter().position(|image| image.path == path && fits(&image.fd))?;
        let OpenImage { fd, lock, .. } = self.images.swap_remove(index);
        Some((fd.into(), lock))
    }

    /// The file of that name, wherever it lies, if it is there: no other is called so.
    pub(crate) fn take_named(&mut self, name: &str) -> Option<File> {
        let is_it = |image: &OpenImage<_>| image.path.file_name() == Some(name.as_ref());
        let index = self.images.iter().position(is_it)?;
        Some(self.images.swap_remove(index).fd.into())
    }
}

/// The images that are open, for who takes over.
#[derive(Debug, Default)]
pub(crate) struct Images(Vec<Image>);

#[derive(Debug)]
struct Image {
    /// The node's name.
    name: String,
    path: PathBuf,
    fd: Weak<OwnedFd>,
    /// What its locks are held by, if there are any.
    lock: Weak<OwnedFd>,
    flush_failed: Weak<AtomicBool>,
}

impl Images {
    pub(crate) fn remember(
        &mut self,
        name: &str,
        path: &Path,
        fd: &Arc<OwnedFd>,
        lock: Option<&Arc<OwnedFd>>,
        flush_failed: &Arc<AtomicBool>,
    ) {
        self.0.retain(|image| image.fd.strong_count() > 0);
        let lock = lock.map(Arc::downgrade).unwrap_or_default();
        let (fd, flush_failed) = (Arc::downgrade(fd), Arc::downgrade(flush_failed));
        let (name, path) = (name.to_owned(), path.to_owned());
        self.0.push(Image { name, path, fd, lock, flush_failed });
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = OpenImage<Arc<OwnedFd>>> {
        // Of one that was opened anew the first descriptor is still there, for the locks.
        let holds_locks_only = |image: &Image| {
            let is_of = |other: &Image| other.lock.ptr_eq(&image.fd) && !other.fd.ptr_eq(&image.fd);
            self.0.iter().any(is_of)
        };
        self.0.iter().filter(move |image| !holds_locks_only(image)).filter_map(|image| {
            let fd = image.fd.upgrade()?;
            let lock = image.lock.upgrade().filter(|lock| !Arc::ptr_eq(lock, &fd));
            Some(OpenImage { path: image.path.clone(), fd, lock })
        })
    }

    /// Whether a flush of that node's has failed.
    pub(crate) fn flush_failed(&self, name: &str) -> Option<Arc<AtomicBool>> {
        let mut of_node = self.0.iter().filter(|image| image.name == name);
        of_node.find_map(|image| image.flush_failed.upgrade())
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
