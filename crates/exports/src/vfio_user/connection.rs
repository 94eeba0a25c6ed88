//! A connection to a client: messages in, replies out, never blocking.

#![forbid(unsafe_code)]

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, Readiness};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::MsgFlags;

use super::error::ConnectionError;
use super::wire::{HEADER_LEN, Header, MAX_FDS, MAX_PAYLOAD, WireError};
use crate::vhost_user::descriptors::{Descriptors, Desk, Wrong};
use crate::vhost_user::fd_passing;

/// Messages taken in a row before other tasks of the loop get their turn.
const TURN: u32 = 16;

/// A message as received, with its header parsed.
pub(super) struct Incoming {
    pub(super) header: Header,
    /// Its descriptors. More than a message may have, or a wrong kind, are an error.
    pub(super) fds: Result<Vec<OwnedFd>, WireError>,
}

/// A connected socket.
pub(super) struct Connection {
    event_loop: EventLoop,
    socket: Arc<OwnedFd>,
    readable: Readiness,
    desk: Rc<Desk>,
    /// Messages left in this turn.
    turn: u32,
}

impl Connection {
    /// Takes a connected stream socket. `desk` checks received descriptors.
    pub(super) fn new(event_loop: &EventLoop, socket: OwnedFd, desk: Rc<Desk>) -> Self {
        let socket = Arc::new(socket);
        let events = PollFlags::POLLIN.bits().cast_unsigned().into();
        let readable = Readiness::new(event_loop, socket.clone(), events);
        Connection { event_loop: event_loop.clone(), socket, readable, desk, turn: TURN }
    }

    /// The connection for a handover to another process, between two messages.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(super) fn save(&self) -> std::io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Waits until something can be received, without receiving it.
    pub(super) async fn readable(&self) {
        loop {
            let mut poll = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            if nix::poll::poll(&mut poll, PollTimeout::ZERO) != Ok(0) {
                return;
            }
            self.readable.wait().await;
        }
    }

    /// Waits for the next complete message, and puts its payload into `payload`, exactly as long as the header
    /// says. `None`: the client has disconnected.
    ///
    /// # Errors
    ///
    /// It disconnected within a message, or the bytes are malformed.
    pub(super) async fn receive(
        &mut self,
        payload: &mut Vec<u8>,
    ) -> Result<Option<Incoming>, ConnectionError> {
        self.take_turns().await;
        let mut fds = Descriptors::new(self.desk.clone(), MAX_FDS);
        let mut header = [0; HEADER_LEN];
        if !self.fill(&mut header, &mut fds, true).await? {
            return Ok(None);
        }
        let header = Header::parse(header).map_err(ConnectionError::Framing)?;
        debug_assert!(header.payload_len <= MAX_PAYLOAD, "checked by the header");
        payload.clear();
        payload.resize(header.payload_len, 0);
        self.fill(payload, &mut fds, false).await?;
        let fds = fds.looked_at().await;
        let fds = fds.map_err(|error| ConnectionError::Os { call: "clone", error })?;
        let fds = fds.map_err(|wrong| match wrong {
            Wrong::TooMany => WireError::TooManyDescriptors,
            Wrong::Kind(number) => WireError::WrongDescriptor(number),
        });
        Ok(Some(Incoming { header, fds }))
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

    /// Sends a reply, with a descriptor. `false`: the client has disconnected.
    pub(super) async fn reply(
        &self,
        bytes: &[u8],
        fd: Option<OwnedFd>,
    ) -> Result<bool, ConnectionError> {
        let mut fds = fd.as_ref().map(|fd| fd.as_raw_fd());
        let mut rest = bytes;
        let mut writable = None;
        while !rest.is_empty() {
            let iov = [IoSlice::new(rest)];
            match fd_passing::send(
                self.socket.as_fd(),
                &iov,
                fds.as_slice(),
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(sent) => {
                    // The descriptor goes with the first byte.
                    fds = None;
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

    /// Yields to other tasks now and then, however much this client sends (fairness contract).
    async fn take_turns(&mut self) {
        if self.turn > 0 {
            self.turn -= 1;
            return;
        }
        self.turn = TURN;
        event_loop::take_turns().await;
    }
}
