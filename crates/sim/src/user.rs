//! Who uses a disk: a guest, or a client of NBD.

use std::rc::Rc;

/// The one user of a disk, who knows what it may hold.
pub(crate) trait User {
    /// Puts its actors to work.
    fn start(self: Rc<Self>);

    /// Whether it has had all its answers and has gone.
    fn is_done(&self) -> bool;

    /// Sectors of its disk, as far as it knows.
    fn sectors(&self) -> u32;

    /// It is told that there are more.
    fn grow(&self, sectors: u32);

    /// Requests offered and not answered.
    fn in_flight(&self) -> u64;

    /// How many of its queues were kicked after the step in which, by `ran`, their loops last ran.
    fn unseen_kicks(&self, _ran: &dyn Fn(u16) -> u64) -> u64 {
        0
    }

    /// The daemon was killed: one that is in its process dies with it, and begins anew with the next.
    fn daemon_died(&self) {}

    /// Whether its disk may hold this.
    fn check_disk(&self, bytes: &[u8]) -> Result<(), String>;

    /// What was not flushed may be lost, and this is what is left of its disk. `anew`: it dies of that,
    /// too, and begins anew.
    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String>;

    /// Wakes those of its actors that sleep and have something to see. `sockets`: the daemon may have
    /// done something to its own.
    fn look(&self, sockets: bool);

    /// No request has been under way for too long.
    fn check_patience(&self);
}
