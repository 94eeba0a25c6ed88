//! A client's end of a connection.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, recv, send, shutdown};

use super::connection::Gone;
use crate::world::World;

/// A socket that the server's loops are told of.
pub(super) struct Socket {
    /// There until it is dropped.
    stream: Option<UnixStream>,
    world: Rc<World>,
    /// Bytes taken since it last was empty.
    backlog: Cell<usize>,
}

/// Less than what a server has sent that finds no room for more.
const FULL: usize = 16 << 10;

impl Socket {
    /// Connects. The daemon may not be there, and find it waiting when it is.
    pub(super) fn connect(world: &Rc<World>) -> Rc<Self> {
        let stream = world.nbd_listener().connect();
        world.fds.keep(stream.as_raw_fd());
        world.poke_all();
        Rc::new(Socket { stream: Some(stream), world: world.clone(), backlog: Cell::new(0) })
    }

    /// Sends what it takes of it now, to the loop that shakes hands or to those that serve: bytes, perhaps
    /// none.
    pub(super) fn send(&self, bytes: &[u8], shakes_hands: bool) -> Result<usize, Gone> {
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

    /// Takes what has come: bytes, perhaps none.
    pub(super) fn receive(&self, into: &mut [u8]) -> Result<usize, Gone> {
        match recv(self.as_fd().as_raw_fd(), into, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(Gone),
            Ok(taken) => {
                self.backlog.set(self.backlog.get() + taken);
                if self.backlog.get() > FULL {
                    // There is room for more.
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

    /// There is nothing more to be sent.
    pub(super) fn end_output(&self) {
        // One that is closed has ended.
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
