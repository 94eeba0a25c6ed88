//! What the load generator needs of a way to a server.

use std::os::fd::BorrowedFd;

use anyhow::Result;

use super::queue::Op;

/// A way to a server by which requests go and come back: a virtqueue, or a connection.
pub(crate) trait Requests: Send + 'static {
    /// Makes ready a request of one block, which goes with the next [`kick`](Self::kick). `slot` comes
    /// back when it is done; it must not be in flight.
    fn submit(&mut self, op: Op, offset: u64, slot: u16) -> Result<()>;

    /// Lets the server have what was submitted since the last call.
    fn kick(&mut self) -> Result<()>;

    /// Takes one completed request: its slot, and 0 or a negative errno.
    fn completed(&mut self) -> Result<Option<(u16, i32)>>;

    /// Asks for a signal on [`Self::signal_fd`] at the next completion. Returns whether there is
    /// one already: then there may be no signal.
    fn want_signal(&mut self) -> bool;

    /// Readable after a signal.
    fn signal_fd(&self) -> BorrowedFd<'_>;

    /// Takes a signal that has come.
    fn take_signal(&self) -> Result<()>;
}
