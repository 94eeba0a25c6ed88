//! Inspects and closes the descriptors of a front end without delaying others.
//!
//! To query a file, or to close it, takes as long as its file system likes. On FUSE, a daemon decides that, and
//! it is informed of each close(2). A socket may linger and a terminal may drain. So the control thread
//! handles only descriptors that the kernel answers for alone: eventfds, UNIX sockets, tmpfs and hugetlbfs
//! files. All others go to a thread. The front end's next message, and the export's next front end, wait for
//! that thread. The last descriptor of a large memfd is [released](guest_memory::release()), as the kernel frees its memory.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::mem::{ManuallyDrop, take};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::thread;

use event_loop::oneshot;
use guest_memory::{is_large, release};
use nix::fcntl::{FcntlArg, fcntl, readlink};
use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike, SockaddrStorage, getsockname, getsockopt, sockopt,
};
use nix::sys::stat::{SFlag, fstat};

/// Whether the descriptor is an eventfd.
pub(super) fn is_eventfd(fd: &OwnedFd) -> bool {
    // Nothing else distinguishes it from other anonymous inodes; fstat of an epoll asks its files.
    let what = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_str());
    what.is_ok_and(|what| what == "anon_inode:[eventfd]")
}

/// Whether the descriptor is a UNIX stream socket.
pub(super) fn is_unix_stream(fd: &OwnedFd) -> bool {
    is_unix_socket(fd) && getsockopt(fd, sockopt::SockType) == Ok(SockType::Stream)
}

fn is_unix_socket(fd: &OwnedFd) -> bool {
    let name = getsockname::<SockaddrStorage>(fd.as_raw_fd());
    name.is_ok_and(|name| name.family() == Some(AddressFamily::Unix))
}

/// Whether neither a query nor a close can wait for another party.
fn is_plain(fd: &OwnedFd) -> bool {
    // Files on tmpfs or hugetlbfs, memfds included, have seals.
    fcntl(fd.as_fd(), FcntlArg::F_GET_SEALS).is_ok() || is_eventfd(fd) || is_unix_socket(fd)
}

/// Whether the descriptor can be memory: a file on a local disk, or a device. May wait.
fn can_be_memory(fd: &OwnedFd) -> bool {
    guest_memory::is_elsewhere(fd).is_ok_and(|is_elsewhere| !is_elsewhere)
        && fstat(fd).is_ok_and(|stat| {
            let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
            matches!(kind, SFlag::S_IFREG | SFlag::S_IFCHR)
        })
}

/// Inspects and closes the descriptors of an export's front ends.
#[derive(Default)]
pub(crate) struct Desk {
    /// The threads at work. Each ends by dropping its sender.
    busy: RefCell<Vec<oneshot::Receiver<()>>>,
}

impl Desk {
    /// Waits until all threads have ended.
    pub(crate) async fn settled(&self) {
        poll_fn(|cx| {
            let mut busy = self.busy.borrow_mut();
            busy.retain_mut(|thread| Pin::new(thread).poll(cx).is_pending());
            if busy.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Gives descriptors to a thread. If there is no thread, they stay open.
    fn hand(
        &self,
        fds: Vec<OwnedFd>,
        take: impl FnOnce(Vec<OwnedFd>) + Send + 'static,
    ) -> io::Result<()> {
        let (busy, end) = oneshot::channel();
        let fds = ManuallyDrop::new(fds);
        thread::Builder::new().name("descriptors".into()).spawn(move || {
            let _busy: oneshot::Sender<()> = busy;
            take(ManuallyDrop::into_inner(fds));
        })?;
        self.busy.borrow_mut().push(end);
        Ok(())
    }
}

/// Duplicates of a message's large memfds, so that no thread closes the last descriptor while it handles the message.
#[derive(Default)]
pub(crate) struct Kept(Vec<OwnedFd>);

impl Kept {
    /// Keeps the large ones of these descriptors, instead of those before.
    pub(crate) fn keep(&mut self, fds: &[OwnedFd]) {
        let large = fds.iter().filter(|fd| is_large(fd));
        // Without free descriptors, the message's own one may be the last.
        let kept = large.filter_map(|fd| fd.try_clone().ok()).collect();
        self.replace(kept);
    }

    /// Releases the descriptors.
    pub(crate) fn give_up(&mut self) {
        self.replace(Vec::new());
    }

    fn replace(&mut self, fds: Vec<OwnedFd>) {
        let before = std::mem::replace(&mut self.0, fds);
        if !before.is_empty() {
            release(before);
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// The descriptors of a message while it arrives. The desk closes those that are not taken.
pub(crate) struct Descriptors {
    fds: Vec<OwnedFd>,
    /// Most descriptors of a message.
    most: usize,
    too_many: bool,
    desk: Rc<Desk>,
}

/// Why the descriptors of a message are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// More than a message may have.
    TooMany,
    /// The descriptor at this index is no eventfd and no UNIX socket, and cannot be memory.
    Kind(usize),
}

impl Descriptors {
    /// An empty list for at most `most` descriptors.
    pub(crate) fn new(desk: Rc<Desk>, most: usize) -> Self {
        Descriptors { fds: Vec::new(), most, too_many: false, desk }
    }

    /// Adds descriptors. Excess ones are closed at once, which bounds the number of open ones.
    pub(crate) async fn add(&mut self, more: Vec<OwnedFd>) {
        self.fds.extend(more);
        if self.too_many || self.fds.len() > self.most {
            self.too_many = true;
            self.close();
            self.desk.settled().await;
        }
    }

    /// Inspects the descriptors, and returns them all: each is an eventfd, a UNIX socket, or can be memory.
    ///
    /// # Errors
    ///
    /// A thread cannot be started: as of clone(2).
    pub(crate) async fn looked_at(mut self) -> io::Result<Result<Vec<OwnedFd>, Wrong>> {
        if self.too_many {
            return Ok(Err(Wrong::TooMany));
        }
        if self.fds.iter().all(is_plain) {
            return Ok(Ok(take(&mut self.fds)));
        }
        self.desk.settled().await;
        let (sender, answer) = oneshot::channel();
        let look = move |fds: Vec<OwnedFd>| {
            let wrong = fds.iter().position(|fd| !is_plain(fd) && !can_be_memory(fd));
            sender.send(match wrong {
                None => Ok(fds),
                Some(wrong) => {
                    drop(fds);
                    Err(Wrong::Kind(wrong))
                }
            });
        };
        self.desk.hand(take(&mut self.fds), look)?;
        let looked_at = answer.await;
        self.desk.settled().await;
        Ok(looked_at.unwrap_or(Err(Wrong::TooMany)))
    }

    fn close(&mut self) {
        let (plain, others): (Vec<_>, Vec<_>) = self.fds.drain(..).partition(is_plain);
        let large: Vec<_> = plain.into_iter().filter(is_large).collect();
        if !large.is_empty() {
            release(large);
        }
        if !others.is_empty()
            && let Err(error) = self.desk.hand(others, drop)
        {
            log::error!("descriptors of a front end stay open, as there is no thread: {error}");
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        self.close();
    }
}
