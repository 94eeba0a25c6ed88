//! The behaviour of a guest with AHCI.

use super::life::Disturbance;
use crate::image::Format;
use crate::random::Random;

/// The behaviour of a guest.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) format: Format,
    /// Sectors of the disk.
    pub(crate) sectors: u32,
    /// Maximum commands in flight.
    pub(crate) depth: u32,
    /// Maximum commands announced at once.
    pub(crate) batch: u64,
    /// The driver uses native command queuing once in so many times.
    pub(crate) queued: u64,
    /// Maximum pause between batches, nanoseconds.
    pub(crate) think_ns: u64,
    /// Interrupts come by the pin, not by messages.
    pub(crate) has_pin: bool,
    /// One register write in so many is answered; 0 for none.
    pub(crate) answered: u64,
    /// One send in so many is in pieces; 0 for none.
    pub(crate) pieces: u64,
    /// Disturbances, and the number of batches between two; 0 for none.
    pub(crate) disturbances: Vec<Disturbance>,
    pub(crate) calm: u64,
}

impl Plan {
    pub(crate) fn new(random: &Random) -> Self {
        let disturbances: Vec<_> =
            Disturbance::ALL.iter().filter(|_| random.one_in(2)).copied().collect();
        Plan {
            format: Format::Raw,
            sectors: random.pick(&[64, 1024, 4096]),
            depth: random.pick(&[1, 2, 8, 32]),
            batch: random.pick(&[1, 4, 32]),
            queued: random.pick(&[1, 2, 2, 0]),
            think_ns: random.pick(&[0, 5_000, 100_000]),
            has_pin: random.one_in(4),
            answered: random.pick(&[0, 0, 1, 4]),
            pieces: random.pick(&[0, 0, 8, 64]),
            calm: if disturbances.is_empty() { 0 } else { random.pick(&[0, 10, 50, 200]) },
            disturbances,
        }
    }
}
