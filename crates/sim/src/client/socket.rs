//! A client's end of a connection.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};

use super::connection::Gone;
use crate::world::World;

/// A client socket that wakes the server's loops on use.
pub(crate) struct Socket {
    /// `None` only while dropped.
    stream: Option<UnixStream>,
    world: Rc<World>,
    /// Bytes received since the socket was last empty.
    backlog: Cell<usize>,
}

/// A backlog at which the server's side may have had no room. Below the size of a socket buffer.
const FULL: usize = 16 << 10;

impl Socket {
    /// Connects. The connection waits in the listener's queue if no daemon runs.
    pub(crate) fn connect(world: &Rc<World>) -> Rc<Self> {
        let stream = world.nbd_listener().connect();
        world.fds.keep(stream.as_raw_fd());
        world.poke_all();
        Rc::new(Socket { stream: Some(stream), world: world.clone(), backlog: Cell::new(0) })
    }

    /// Sends as many bytes as the socket takes, and returns their number. `shakes_hands`: wakes the control loop,
    /// otherwise the serving loops.
    pub(crate) fn send(&self, bytes: &[u8], shakes_hands: bool) -> Result<usize, Gone> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        match send(self.as_fd().as_raw_fd(), bytes, flags) {
            Ok(sent) => {
                if shakes_hands {
                    self.world.poke_control();
                } else {
                    self.world.poke_io();
                }
                Ok(sent)
            }
            Err(Errno::EAGAIN) => Ok(0),
            Err(_) => Err(Gone),
        }
    }

    /// Receives the bytes that have arrived, and returns their number, which may be 0.
    pub(super) fn receive(&self, into: &mut [u8]) -> Result<usize, Gone> {
        match recv(self.as_fd().as_raw_fd(), into, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(Gone),
            Ok(taken) => {
                self.backlog.set(self.backlog.get() + taken);
                if self.backlog.get() > FULL {
                    // The server has room to send again.
                    self.world.poke_all();
                }
                if taken < into.len() {
                    self.backlog.set(0);
                }
                Ok(taken)
            }
            Err(Errno::EAGAIN) => {
                self.backlog.set(0);
                Ok(0)
            }
            Err(_) => Err(Gone),
        }
    }

    /// Shuts down the sending side.
    pub(super) fn end_output(&self) {
        // Fails if the server has closed the connection, which ends the output too.
        let _ = shutdown(self.as_fd().as_raw_fd(), Shutdown::Write);
        self.world.poke_all();
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_ref().expect("it is open").as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.world.fds.forget(self.as_fd().as_raw_fd());
        drop(self.stream.take());
        self.world.poke_all();
    }
}
