//! Open images received from the previous process: a node takes its descriptor from here when it is
//! opened. The open file description stays the same, and with it the image's locks.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// An open image that one process hands over to another.
#[derive(Debug)]
pub struct OpenImage<Fd> {
    /// The path by which it was opened.
    pub path: PathBuf,
    /// The descriptor for I/O.
    pub fd: Fd,
    /// The descriptor that holds the locks; `None`: it is `fd`. After a reopen, I/O uses a new descriptor
    /// while the locks stay with the first.
    pub lock: Option<Fd>,
}

/// Received images that no node has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    images: Vec<OpenImage<OwnedFd>>,
    /// The other process still has them.
    shared: bool,
    owned: Arc<AtomicBool>,
}

impl Inherited {
    pub(crate) fn add(&mut self, image: OpenImage<OwnedFd>) {
        self.images.push(image);
        self.shared = true;
    }

    /// Whether the other process still has the images, and continues with them if the handover fails.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared
    }

    /// Whether the received images belong to this process alone, which may then release their locks.
    pub(crate) fn owned(&self) -> &Arc<AtomicBool> {
        &self.owned
    }

    /// Makes this process the only owner. Images that no node has taken are closed.
    pub(crate) fn own(&mut self) {
        self.images.clear();
        self.shared = false;
        self.owned.store(true, Ordering::Relaxed);
    }

    /// Returns the images for a thread that opens nodes, until [`give_back`](Self::give_back).
    pub(crate) fn lend(&mut self) -> Inherited {
        let images = std::mem::take(&mut self.images);
        Inherited { images, shared: self.shared, owned: self.owned.clone() }
    }

    /// Takes the images that the thread has not used.
    pub(crate) fn give_back(&mut self, mut lent: Inherited) {
        self.images.append(&mut lent.images);
    }

    /// Takes the image at `path` if it was received and has the wanted access. Returns also the descriptor
    /// of the locks if that is another one.
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

    /// Takes the file of that name in any folder. Names are unique among received files.
    pub(crate) fn take_named(&mut self, name: &str) -> Option<File> {
        let is_it = |image: &OpenImage<_>| image.path.file_name() == Some(name.as_ref());
        let index = self.images.iter().position(is_it)?;
        Some(self.images.swap_remove(index).fd.into())
    }
}

/// The open images, for a handover.
#[derive(Debug, Clone, Default)]
pub(crate) struct Images(Vec<Image>);

#[derive(Debug, Clone)]
struct Image {
    /// The node's name.
    name: String,
    path: PathBuf,
    fd: Weak<OwnedFd>,
    /// The descriptor of the locks, if there are any.
    lock: Weak<OwnedFd>,
    flush_failed: Weak<AtomicI32>,
}

impl Images {
    pub(crate) fn remember(
        &mut self,
        name: &str,
        path: &Path,
        fd: &Arc<OwnedFd>,
        lock: Option<&Arc<OwnedFd>>,
        flush_failed: &Arc<AtomicI32>,
    ) {
        self.0.retain(|image| image.fd.strong_count() > 0);
        let lock = lock.map(Arc::downgrade).unwrap_or_default();
        let (fd, flush_failed) = (Arc::downgrade(fd), Arc::downgrade(flush_failed));
        let (name, path) = (name.to_owned(), path.to_owned());
        self.0.push(Image { name, path, fd, lock, flush_failed });
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = OpenImage<Arc<OwnedFd>>> {
        // After a reopen, the first descriptor remains for the locks.
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

    /// Adds the images of a copy that are not among these.
    pub(crate) fn merge(&mut self, copy: Images) {
        self.0.retain(|image| image.fd.strong_count() > 0);
        let known = self.0.len();
        for image in copy.0.into_iter().filter(|image| image.fd.strong_count() > 0) {
            if !self.0[..known].iter().any(|other| other.fd.ptr_eq(&image.fd)) {
                self.0.push(image);
            }
        }
    }

    /// The state of failed flushes of that node.
    pub(crate) fn flush_failed(&self, name: &str) -> Option<Arc<AtomicI32>> {
        let mut of_node = self.0.iter().filter(|image| image.name == name);
        of_node.find_map(|image| image.flush_failed.upgrade())
    }

    /// Returns an image whose node has had a failed flush.
    pub(crate) fn with_failed_flush(&self) -> Option<&Path> {
        let failed = |image: &&Image| {
            image.flush_failed.upgrade().is_some_and(|failed| failed.load(Ordering::Relaxed) != 0)
        };
        self.0.iter().find(failed).map(|image| image.path.as_path())
    }
}

/// A path that opens `file` again, even if its name has changed.
pub(crate) fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}
