//! What a front end's descriptors are: found out, and closed, where it keeps nobody else waiting.
//!
//! To ask a file system about a file, or to close one, takes as long as that file system likes: on FUSE, as
//! whoever serves it likes, who is told of each close(2). A socket lingers, a terminal drains. So only what
//! the kernel alone answers for stays on the control thread: eventfds, unix sockets, memory on no file
//! system of others. All else goes to a thread, of which the front end's next message, and the export's next
//! front end, wait for the end.

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
use nix::fcntl::{FcntlArg, fcntl, readlink};
use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike, SockaddrStorage, getsockname, getsockopt, sockopt,
};
use nix::sys::stat::{SFlag, fstat};

/// Whether it is an eventfd.
pub(super) fn is_eventfd(fd: &OwnedFd) -> bool {
    // Nothing else tells it from other anonymous inodes: those of epoll ask whoever is in their set.
    let what = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_str());
    what.is_ok_and(|what| what == "anon_inode:[eventfd]")
}

/// Whether it is a unix stream socket.
pub(super) fn is_unix_stream(fd: &OwnedFd) -> bool {
    is_unix_socket(fd) && getsockopt(fd, sockopt::SockType) == Ok(SockType::Stream)
}

fn is_unix_socket(fd: &OwnedFd) -> bool {
    let name = getsockname::<SockaddrStorage>(fd.as_raw_fd());
    name.is_ok_and(|name| name.family() == Some(AddressFamily::Unix))
}

/// Whether neither to ask it nor to close it can wait for anybody.
fn is_plain(fd: &OwnedFd) -> bool {
    // What is on tmpfs or hugetlbfs has seals, memfds among them.
    fcntl(fd.as_fd(), FcntlArg::F_GET_SEALS).is_ok() || is_eventfd(fd) || is_unix_socket(fd)
}

/// Whether it can be memory nevertheless: a file that a disk of this machine has, a device. May wait.
fn can_be_memory(fd: &OwnedFd) -> bool {
    guest_memory::is_elsewhere(fd).is_ok_and(|is_elsewhere| !is_elsewhere)
        && fstat(fd).is_ok_and(|stat| {
            let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
            matches!(kind, SFlag::S_IFREG | SFlag::S_IFCHR)
        })
}

/// Where the descriptors of an export's front ends are looked at, and closed.
#[derive(Default)]
pub(crate) struct Desk {
    /// The threads that do so. They end when their sender goes.
    busy: RefCell<Vec<oneshot::Receiver<()>>>,
}

impl Desk {
    /// Waits until nothing is looked at or closed any more.
    pub(crate) async fn settled(&self) {
        poll_fn(|cx| {
            let mut busy = self.busy.borrow_mut();
            busy.retain_mut(|thread| Pin::new(thread).poll(cx).is_pending());
            if busy.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Has a thread take them. One that cannot be had leaves them open.
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

/// The descriptors of a message, as they come. Those that nobody takes are closed at the desk.
pub(crate) struct Descriptors {
    fds: Vec<OwnedFd>,
    /// How many a message may have.
    most: usize,
    too_many: bool,
    desk: Rc<Desk>,
}

/// Why the descriptors of a message are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// There are more than a message may have.
    TooMany,
    /// The one of this number is neither an eventfd, nor a unix socket, nor can it be memory.
    Kind(usize),
}

impl Descriptors {
    /// None yet, of at most `most`.
    pub(crate) fn new(desk: Rc<Desk>, most: usize) -> Self {
        Descriptors { fds: Vec::new(), most, too_many: false, desk }
    }

    /// Adds more. Those beyond what a message may have are closed, so that it holds no more than its share.
    pub(crate) async fn add(&mut self, more: Vec<OwnedFd>) {
        self.fds.extend(more);
        if self.too_many || self.fds.len() > self.most {
            self.too_many = true;
            self.close();
            self.desk.settled().await;
        }
    }

    /// All of them, of which each is an eventfd, a unix socket, or can be memory.
    ///
    /// # Errors
    ///
    /// There is no thread that could look: as of clone(2).
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
        drop(plain);
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
