//! A connection to a front end: messages in, replies out, never blocking.
//!
//! A front end that sends half a message, or does not read its replies, costs one waiting task and
//! a buffer for one message. It costs no thread, and does not delay others.

#![forbid(unsafe_code)]

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::MsgFlags;

use super::descriptors::{Descriptors, Desk, Wrong};
use super::error::ConnectionError;
use super::fd_passing;
use super::wire::{HEADER_LEN, Header, MAX_FDS, MAX_PAYLOAD, Reply, WireError};

/// Messages taken in a row before other tasks of the loop get their turn.
const TURN: u32 = 16;

/// A message as received, with its header parsed.
pub(crate) struct Incoming {
    pub(crate) header: Header,
    /// Exactly as long as the header says.
    pub(crate) payload: Vec<u8>,
    /// Its descriptors. More than a message may have, or a wrong kind, are an error.
    pub(crate) fds: Result<Vec<OwnedFd>, WireError>,
}

/// A connected socket.
pub(crate) struct Connection {
    event_loop: EventLoop,
    socket: Arc<OwnedFd>,
    readable: Readiness,
    desk: Rc<Desk>,
    /// Messages left in this turn.
    turn: u32,
}

impl Connection {
    /// Takes a connected stream socket, which need not be non-blocking. `desk` checks received descriptors.
    pub(crate) fn new(event_loop: &EventLoop, socket: OwnedFd, desk: Rc<Desk>) -> Self {
        let socket = Arc::new(socket);
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let readable = Readiness::new(event_loop, socket.clone(), events);
        Connection { event_loop: event_loop.clone(), socket, readable, desk, turn: TURN }
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
    pub(crate) fn save(&self) -> std::io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Waits for the next complete message; `None`: the front end has disconnected.
    ///
    /// # Errors
    ///
    /// It disconnected within a message, or the bytes are malformed.
    pub(crate) async fn receive(&mut self) -> Result<Option<Incoming>, ConnectionError> {
        self.take_turns().await;
        let mut fds = Descriptors::new(self.desk.clone(), MAX_FDS);
        let mut header = [0; HEADER_LEN];
        if !self.fill(&mut header, &mut fds, true).await? {
            return Ok(None);
        }
        let header = Header::parse(header).map_err(ConnectionError::Framing)?;
        debug_assert!(header.payload_len <= MAX_PAYLOAD, "checked by the header");
        let mut payload = vec![0; header.payload_len];
        self.fill(&mut payload, &mut fds, false).await?;
        let fds = fds.looked_at().await;
        let fds = fds.map_err(|error| ConnectionError::Os { call: "clone", error })?;
        let fds = fds.map_err(|wrong| match wrong {
            Wrong::TooMany => WireError::TooManyDescriptors,
            Wrong::Kind(number) => WireError::WrongDescriptor(number),
        });
        Ok(Some(Incoming { header, payload, fds }))
    }

    /// Fills `buf`. `false`: the stream ended before the first byte, and `may_end` is set.
    ///
    /// Never reads beyond the message, so that descriptors are those of this message.
    async fn fill(
        &mut self,
        buf: &mut [u8],
        fds: &mut Descriptors,
        may_end: bool,
    ) -> Result<bool, ConnectionError> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match fd_passing::receive(self.socket.as_fd(), rest) {
                Ok(received) if received.len == 0 => {
                    return if may_end && filled == 0 {
                        Ok(false)
                    } else {
                        Err(ConnectionError::CutShort)
                    };
                }
                Ok(received) => {
                    filled += received.len;
                    fds.add(received.fds).await;
                }
                Err(Errno::EAGAIN) => self.readable.wait().await,
                Err(Errno::EINTR) => {}
                // If replies are unread at the other end, its close resets the connection.
                Err(Errno::ECONNRESET) if may_end && filled == 0 => return Ok(false),
                Err(Errno::ECONNRESET) => return Err(ConnectionError::CutShort),
                Err(errno) => {
                    return Err(ConnectionError::Os { call: "recvmsg", error: errno.into() });
                }
            }
        }
        Ok(true)
    }

    /// Sends a reply with an optional descriptor. `false`: the front end has disconnected.
    pub(crate) async fn reply(
        &self,
        code: u32,
        reply: &Reply,
        mut fd: Option<OwnedFd>,
    ) -> Result<bool, ConnectionError> {
        let bytes = reply.encode(code);
        let mut rest = bytes.as_slice();
        let mut writable = None;
        while !rest.is_empty() {
            let fds: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
            let iov = [IoSlice::new(rest)];
            match fd_passing::send(self.socket.as_fd(), &iov, &fds, MsgFlags::MSG_DONTWAIT) {
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
                    return Err(ConnectionError::Os { call: "sendmsg", error: errno.into() });
                }
            }
        }
        Ok(true)
    }

    /// Yields to other tasks now and then, however much this front end sends (fairness contract).
    async fn take_turns(&mut self) {
        if self.turn > 0 {
            self.turn -= 1;
            return;
        }
        self.turn = TURN;
        event_loop::take_turns().await;
    }
}
