//! Requests that an export's node has failed: from the I/O threads to a task that tells of them.
//!
//! What is alike is counted in preallocated places. The task is woken once until it looks, so an I/O thread
//! neither waits nor allocates for a request that fails.

use std::sync::{Arc, Mutex};

use block::policy::GIVEN_UP;
use event_loop::mailbox::{self, Receiver, Sender};
use event_loop::sync::lock;
use nix::errno::Errno;

use crate::stats::Kind;

/// Kinds of failures that are told apart until the task looks.
const PLACES: usize = 16;

/// Requests that have failed alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Of virtio-scsi the logical unit, else 0.
    pub unit: u16,
    /// What was asked for.
    pub kind: Kind,
    /// Why it failed.
    pub errno: Errno,
    /// Where the first one begins, in bytes.
    pub offset: u64,
    /// How many there were; of others there may be more, see [`Failures::take`].
    pub count: u64,
}

/// The failures of an export that were not told of yet.
pub struct Failures {
    places: Mutex<Places>,
    told: Sender<()>,
}

#[derive(Default)]
struct Places {
    failures: [Option<Failure>; PLACES],
    /// Those that there was no place for.
    others: u64,
    is_told: bool,
}

impl std::fmt::Debug for Failures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Failures")
    }
}

impl Failures {
    /// A place for them, and where it is told that there are some.
    pub fn new() -> (Arc<Self>, Receiver<()>) {
        let (told, receiver) = mailbox::channel();
        (Arc::new(Failures { places: Mutex::default(), told }), receiver)
    }

    /// Adds one. Callable from any thread.
    #[cold]
    pub(crate) fn add(&self, unit: u16, kind: Kind, offset: u64, errno: Errno) {
        // What a node cannot do, what is to be done again, and what a loop that ends has left.
        if matches!(errno, Errno::EOPNOTSUPP | GIVEN_UP | Errno::ECANCELED) {
            return;
        }
        let mut places = lock(&self.places);
        let Places { failures, others, is_told } = &mut *places;
        let alike = |place: &&mut Option<Failure>| {
            place.is_none_or(|old| (old.unit, old.kind, old.errno) == (unit, kind, errno))
        };
        match failures.iter_mut().find(alike) {
            Some(Some(failure)) => failure.count += 1,
            Some(place) => *place = Some(Failure { unit, kind, errno, offset, count: 1 }),
            None => *others += 1,
        }
        if !std::mem::replace(is_told, true) {
            drop(places);
            // A daemon that ends does not listen.
            let _ = self.told.send(());
        }
    }

    /// Takes what there is, and how many failures there were beside these.
    pub fn take(&self) -> (impl Iterator<Item = Failure> + use<>, u64) {
        let Places { failures, others, .. } = std::mem::take(&mut *lock(&self.places));
        (failures.into_iter().flatten(), others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_alike_is_counted_and_memory_is_bounded() {
        let (failures, _told) = Failures::new();
        for n in 0..48 {
            failures.add(0, Kind::Write, 4096 * n, Errno::ENOSPC);
        }
        failures.add(0, Kind::Read, 512, Errno::EIO);
        failures.add(0, Kind::Read, 512, GIVEN_UP);
        let of = |kind, errno, offset, count| Failure { unit: 0, kind, errno, offset, count };
        let (taken, others) = failures.take();
        let expected = [of(Kind::Write, Errno::ENOSPC, 0, 48), of(Kind::Read, Errno::EIO, 512, 1)];
        assert_eq!((taken.collect::<Vec<_>>(), others), (expected.to_vec(), 0));
        for unit in 0..20 {
            failures.add(unit, Kind::Read, 0, Errno::EIO);
        }
        let (taken, others) = failures.take();
        assert_eq!((taken.count(), others), (PLACES, 4));
        assert_eq!(failures.take().0.count(), 0);
    }
}
