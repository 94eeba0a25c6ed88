//! A file descriptor that tasks wait on.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::event_loop::{EventLoop, Inner};
use crate::handlers::{Handler, HandlerId, Progress, Trigger};
use crate::task::take_turns;

/// A descriptor watched for its life, for one task to wait on.
///
/// Try the system call first; when it says `EAGAIN`, wait and try again.
pub struct Readiness {
    /// A task of the loop that waits must not keep the loop alive.
    event_loop: Weak<Inner>,
    fd: Arc<OwnedFd>,
    handler: HandlerId,
    state: Rc<ReadinessState>,
}

#[derive(Default)]
struct ReadinessState {
    fired: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Handler for ReadinessState {
    fn ready(&self, _events: u32) -> Progress {
        self.fired.set(true);
        // A foreign waker may do anything: it is not woken within the borrow.
        let waker = self.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
        Progress::Done
    }
}

impl Readiness {
    /// Watches a non-blocking descriptor for `events`, edge-triggered.
    ///
    /// `events`: `POLL*` bits of poll(2). A descriptor that cannot be polled shows as ready once.
    pub fn new(event_loop: &EventLoop, fd: Arc<OwnedFd>, events: u32) -> Self {
        let state = Rc::new(ReadinessState::default());
        let handler = event_loop.add_handler(fd.clone(), events, Trigger::Edge, state.clone());
        Readiness { event_loop: Rc::downgrade(&event_loop.0), fd, handler, state }
    }

    /// Waits until the descriptor has become ready since the last wait.
    ///
    /// An event in between counts, so the wait may end although the event has been used up. One task at a
    /// time. Dropping the future loses nothing.
    pub fn wait(&self) -> impl Future<Output = ()> + '_ {
        std::future::poll_fn(|cx| {
            if self.state.fired.replace(false) {
                Poll::Ready(())
            } else {
                let old = self.state.waker.replace(Some(cx.waker().clone()));
                drop(old);
                Poll::Pending
            }
        })
    }

    /// Stops watching.
    ///
    /// When the future completes, the loop has released its reference to the descriptor. Dropping a `Readiness`
    /// leaves the descriptor open until the kernel has cancelled the poll.
    pub async fn release(self) {
        let (event_loop, handler) = (self.event_loop.clone(), self.handler);
        drop(self);
        while event_loop.upgrade().is_some_and(|inner| EventLoop(inner).is_leaving(handler)) {
            take_turns().await;
        }
    }

    /// Receives from a socket watched for `POLLIN`.
    ///
    /// Returns the bytes received, 0 at the end of the stream.
    ///
    /// # Errors
    ///
    /// Those of recv(2), without `EAGAIN` and `EINTR`.
    pub async fn receive(&self, buf: &mut [u8]) -> nix::Result<usize> {
        loop {
            match recv(self.fd.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN) => self.wait().await,
                Err(Errno::EINTR) => {}
                received => return received,
            }
        }
    }

    /// Sends all bytes to a socket watched for `POLLOUT`.
    ///
    /// # Errors
    ///
    /// Those of send(2), without `EAGAIN` and `EINTR`. A part of the bytes may have been sent.
    pub async fn send_all(&self, mut bytes: &[u8]) -> nix::Result<()> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !bytes.is_empty() {
            match send(self.fd.as_raw_fd(), bytes, flags) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::EAGAIN) => self.wait().await,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Readiness {
    fn drop(&mut self) {
        if let Some(inner) = self.event_loop.upgrade() {
            EventLoop(inner).remove_handler(self.handler);
        }
    }
}
