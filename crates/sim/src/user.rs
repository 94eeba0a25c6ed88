//! The user of a disk: a guest, or an NBD client.

use std::cell::RefCell;
use std::rc::Rc;

use crate::model::Model;

/// How long an answer of the daemon may take, undisturbed, in virtual time: to a request, to a message that waits for
/// requests, and to a handshake's option. A request may wait for a backup, which holds a write back until the cluster
/// is copied. First writes to one table of a qcow2 target go one at a time. On the slowest simulated disk, a write
/// behind the whole of a small image took 139 ms.
pub(crate) const PATIENCE_NS: u64 = 1_000_000_000;

/// The only user of a disk, which knows its permitted contents.
pub(crate) trait User {
    /// Starts the user's actors.
    fn start(self: Rc<Self>);

    /// Whether the user has received all answers and has disconnected.
    fn is_done(&self) -> bool;

    /// The disk, as the user knows it.
    fn model(&self) -> &RefCell<Model>;

    /// Sectors of the disk.
    fn sectors(&self) -> u32 {
        self.model().borrow().sectors()
    }

    /// Informs the user of a larger disk.
    fn grow(&self, sectors: u32) {
        self.model().borrow_mut().grow(sectors);
    }

    /// Number of requests in flight.
    fn in_flight(&self) -> u64;

    /// Number of queues with a kick after the step in which their loop last ran, which `ran` returns.
    fn unseen_kicks(&self, _ran: &dyn Fn(u16) -> u64) -> u64 {
        0
    }

    /// Whether the disk may have these contents.
    fn check_disk(&self, bytes: &[u8]) -> Result<(), String>;

    /// Informs the user of lost unflushed data, and of the disk's contents. `anew`: the user restarts.
    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String>;

    /// Wakes sleeping actors that have an event. `sockets`: the daemon may have used its sockets.
    fn look(&self, sockets: bool);

    /// Whether a request waits for the daemon, which was told of it. Only for users that know.
    fn waits(&self) -> bool {
        false
    }

    /// Fails the run if a request has been in flight for too long.
    fn check_patience(&self);
}
