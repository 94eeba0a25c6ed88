//! The behaviour of a guest with NVMe.

use super::life::Disturbance;
use crate::image::Format;
use crate::random::Random;

/// The behaviour of a guest.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) format: Format,
    /// Sectors of the disk, which are the namespace's blocks.
    pub(crate) sectors: u32,
    /// Number of I/O queue pairs.
    pub(crate) queues: u16,
    /// Entries of each I/O queue.
    pub(crate) entries: u16,
    /// Maximum commands of a queue in flight, less than its entries.
    pub(crate) depth: u16,
    /// Maximum commands announced at once.
    pub(crate) batch: u64,
    /// Maximum pause between batches, nanoseconds.
    pub(crate) think_ns: u64,
    /// The driver has shadow doorbells.
    pub(crate) shadow: bool,
    /// The driver configures them after the creation of its queues, as Linux does.
    pub(crate) shadow_late: bool,
    /// The driver polls its completion queues, which send no interrupts.
    pub(crate) polls: bool,
    /// One doorbell message in so many is answered; 0 for none.
    pub(crate) answered: u64,
    /// One send in so many is in pieces; 0 for none.
    pub(crate) pieces: u64,
    /// Disturbances, and the maximum time between them.
    pub(crate) disturbances: Vec<Disturbance>,
    pub(crate) calm_ns: u64,
}

impl Plan {
    pub(crate) fn new(random: &Random) -> Self {
        let entries = random.pick(&[2, 4, 16, 64, 256]);
        let calm = random.one_in(4);
        let disturbances = Disturbance::ALL.iter().filter(|_| !calm && random.one_in(2));
        Plan {
            format: Format::Raw,
            sectors: random.pick(&[64, 1024, 4096]),
            queues: random.pick(&[1, 1, 2, 4]),
            entries,
            depth: random.pick(&[1, 2, 8, 32]).min(entries - 1),
            batch: random.pick(&[1, 4, 16]),
            think_ns: random.pick(&[0, 5_000, 100_000]),
            shadow: !random.one_in(3),
            shadow_late: random.one_in(2),
            polls: random.one_in(4),
            answered: random.pick(&[0, 0, 1, 4]),
            pieces: random.pick(&[0, 0, 8, 64]),
            disturbances: disturbances.copied().collect(),
            calm_ns: random.pick(&[200_000, 1_000_000, 10_000_000]),
        }
    }
}
