//! Requests that an export's node has failed: carried from the I/O threads to a task that reports them.
//!
//! Failures of one kind are counted in a preallocated place. The task is woken once until it takes the
//! failures, so an I/O thread neither waits nor allocates for a failed request.

use std::sync::{Arc, Mutex};

use event_loop::mailbox::{self, Receiver, Sender};
use event_loop::sync::lock;
use nix::errno::Errno;

use crate::queue::Kind;

/// Kinds of failures that are counted apart until the task takes them.
const PLACES: usize = 16;

/// Failed requests with the same unit, kind and errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The number of the logical unit for virtio-scsi, else 0.
    pub unit: u16,
    /// Kind of the requests.
    pub kind: Kind,
    /// Why the requests failed.
    pub errno: Errno,
    /// Offset of the first request, bytes.
    pub offset: u64,
    /// Number of requests. There may be more that are not counted here, see [`Failures::take`].
    pub count: u64,
}

/// An export's failed requests that were not reported yet.
pub struct Failures {
    places: Mutex<Places>,
    told: Sender<()>,
}

#[derive(Default)]
struct Places {
    failures: [Option<Failure>; PLACES],
    /// Failures that found no free place.
    others: u64,
    is_told: bool,
}

impl std::fmt::Debug for Failures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Failures")
    }
}

impl Failures {
    /// Returns an empty set, and a receiver that wakes the reporting task.
    pub fn new() -> (Arc<Self>, Receiver<()>) {
        let (told, receiver) = mailbox::channel();
        (Arc::new(Failures { places: Mutex::default(), told }), receiver)
    }

    /// Adds a failure. Callable from any thread.
    #[cold]
    pub(crate) fn add(&self, unit: u16, kind: Kind, offset: u64, errno: Errno) {
        // Operations that a node lacks, and requests left by a loop that ends.
        if matches!(errno, Errno::EOPNOTSUPP | Errno::ECANCELED) {
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

    /// Takes all failures, and the number of failures that found no place among these.
    pub fn take(&self) -> (impl Iterator<Item = Failure> + use<>, u64) {
        let Places { failures, others, .. } = std::mem::take(&mut *lock(&self.places));
        (failures.into_iter().flatten(), others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_failures_are_counted_in_bounded_memory() {
        let (failures, _told) = Failures::new();
        for n in 0..48 {
            failures.add(0, Kind::Write, 4096 * n, Errno::ENOSPC);
        }
        failures.add(0, Kind::Read, 512, Errno::EIO);
        failures.add(0, Kind::Read, 512, Errno::ECANCELED);
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
