//! A stream socket with messages and descriptors, for vhost-user and vfio-user; never blocking.
//!
//! A peer that sends half a message, or does not read its replies, costs one waiting task and
//! a buffer for one message. It costs no thread, and does not delay others.

#![forbid(unsafe_code)]

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, Readiness, until};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::MsgFlags;

use crate::vhost_user::descriptors::{Descriptors, Desk, Kept, Wrong};
use crate::vhost_user::fd_passing;

/// Messages taken in a row before other tasks of the loop get their turn.
const TURN: u32 = 16;

/// Time limit for the rest of a message, and for sending a reply, in nanoseconds. Peers write messages
/// at once and wait for their replies.
const MESSAGE_NS: u64 = 5_000_000_000;

/// Why no message was received or sent.
pub(crate) enum SocketError {
    /// The stream ended within a message.
    CutShort,
    /// A message was not complete, or a reply not taken, in time.
    Late,
    /// A system call failed.
    Os {
        /// The call.
        call: &'static str,
        /// The reason.
        error: io::Error,
    },
}

/// A connected stream socket.
pub(crate) struct MessageSocket {
    event_loop: EventLoop,
    socket: Arc<OwnedFd>,
    readable: Readiness,
    desk: Rc<Desk>,
    /// Until the message has been handled, which is before the next one is begun.
    kept: Kept,
    /// Messages left in this turn.
    turn: u32,
}

impl MessageSocket {
    /// Takes a connected stream socket, which need not be non-blocking. `desk` checks received descriptors.
    pub(crate) fn new(event_loop: &EventLoop, socket: OwnedFd, desk: Rc<Desk>) -> Self {
        let socket = Arc::new(socket);
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let readable = Readiness::new(event_loop, socket.clone(), events);
        let (event_loop, kept) = (event_loop.clone(), Kept::default());
        MessageSocket { event_loop, socket, readable, desk, kept, turn: TURN }
    }

    /// Waits until something can be received, without receiving it.
    pub(crate) async fn readable(&self) {
        loop {
            let mut poll = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            if nix::poll::poll(&mut poll, PollTimeout::ZERO) != Ok(0) {
                return;
            }
            self.readable.wait().await;
        }
    }

    /// A duplicate of the socket, for a handover.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(crate) fn save(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Waits for the next message and receives its header, of `N` bytes. `None`: the peer has disconnected. A message
    /// has at most `max_fds` descriptors.
    ///
    /// # Errors
    ///
    /// The stream ended within the header, or recvmsg(2) failed.
    pub(crate) async fn begin<const N: usize>(
        &mut self,
        max_fds: usize,
    ) -> Result<Option<([u8; N], Descriptors)>, SocketError> {
        self.kept.give_up();
        self.take_turns().await;
        let (mut header, mut fds) = ([0; N], Descriptors::new(self.desk.clone(), max_fds));
        let has_begun = self.fill(&mut header, &mut fds, true).await?;
        Ok(has_begun.then_some((header, fds)))
    }

    /// Receives the rest of a message, exactly as long as `payload`, and its descriptors. More than the message may
    /// have, or a wrong kind, are an error.
    ///
    /// # Errors
    ///
    /// The stream ended within the message, recvmsg(2) failed, or no thread to inspect descriptors could be started.
    pub(crate) async fn finish(
        &mut self,
        payload: &mut [u8],
        mut fds: Descriptors,
    ) -> Result<Result<Vec<OwnedFd>, Wrong>, SocketError> {
        self.fill(payload, &mut fds, false).await?;
        let fds = fds.looked_at().await;
        let fds = fds.map_err(|error| SocketError::Os { call: "clone", error })?;
        if let Ok(fds) = &fds {
            self.kept.keep(fds);
        }
        Ok(fds)
    }

    /// Fills `buf`. `false`: the stream ended before the first byte, and `may_end` is set.
    ///
    /// Never reads beyond the message, so that descriptors are those of this message.
    async fn fill(
        &mut self,
        buf: &mut [u8],
        fds: &mut Descriptors,
        may_end: bool,
    ) -> Result<bool, SocketError> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match fd_passing::receive_from_stranger(self.socket.as_fd(), rest) {
                Ok(received) if received.len == 0 => {
                    return if may_end && filled == 0 {
                        Ok(false)
                    } else {
                        Err(SocketError::CutShort)
                    };
                }
                Ok(received) => {
                    filled += received.len;
                    fds.add(received.fds).await;
                    if received.fds_are_missing {
                        return Err(SocketError::Os {
                            call: "recvmsg",
                            error: Errno::EMFILE.into(),
                        });
                    }
                }
                Err(Errno::EAGAIN) => self.readable.wait().await,
                Err(Errno::EINTR) => {}
                // If replies are unread at the other end, its close resets the connection.
                Err(Errno::ECONNRESET) if may_end && filled == 0 => return Ok(false),
                Err(Errno::ECONNRESET) => return Err(SocketError::CutShort),
                Err(errno) => {
                    return Err(SocketError::Os { call: "recvmsg", error: errno.into() });
                }
            }
        }
        Ok(true)
    }

    /// Sends a message with an optional descriptor. `false`: the peer has disconnected.
    ///
    /// # Errors
    ///
    /// sendmsg(2) failed.
    pub(crate) async fn send(
        &self,
        bytes: &[u8],
        mut fd: Option<OwnedFd>,
    ) -> Result<bool, SocketError> {
        let mut rest = bytes;
        let mut writable = None;
        while !rest.is_empty() {
            let number = fd.as_ref().map(AsRawFd::as_raw_fd);
            let (iov, fds) = ([IoSlice::new(rest)], number.as_slice());
            match fd_passing::send(self.socket.as_fd(), &iov, fds, MsgFlags::MSG_DONTWAIT) {
                Ok(sent) => {
                    // Sent with the first byte.
                    fd = None;
                    rest = rest.get(sent..).unwrap_or_default();
                }
                Err(Errno::EAGAIN) => {
                    let events = PollFlags::POLLOUT.bits().cast_unsigned().into();
                    let writable = writable.get_or_insert_with(|| {
                        Readiness::new(&self.event_loop, self.socket.clone(), events)
                    });
                    writable.wait().await;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Ok(false),
                Err(errno) => {
                    return Err(SocketError::Os { call: "sendmsg", error: errno.into() });
                }
            }
        }
        Ok(true)
    }

    /// Yields to other tasks now and then, however much the peer sends (fairness contract).
    async fn take_turns(&mut self) {
        if self.turn > 0 {
            self.turn -= 1;
            return;
        }
        self.turn = TURN;
        event_loop::take_turns().await;
    }
}

/// Limits the time of an incomplete message or of a reply. Otherwise a peer could keep an export from being handed
/// over.
pub(crate) async fn in_time<T, E: From<SocketError>>(
    event_loop: &EventLoop,
    part: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let late = event_loop.sleep_until(event_loop.now_ns() + MESSAGE_NS);
    until(part, late).await.unwrap_or_else(|()| Err(SocketError::Late.into()))
}
