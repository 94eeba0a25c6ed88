//! The behaviour of an NBD client.

use super::life::Disturbance;
use crate::image::Format;
use crate::random::Random;

/// The behaviour of a client.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) format: Format,
    /// Sectors of the disk.
    pub(crate) sectors: u32,
    /// Connections at the same time.
    pub(super) connections: u16,
    /// Requests of a connection at the same time, at most.
    pub(super) depth: usize,
    /// Requests sent at once, at most.
    pub(super) batch: u64,
    /// One request in `large` is for very many sectors.
    pub(super) large: u64,
    /// One send in `pieces` is split; 0 for none.
    pub(super) pieces: u64,
    /// Maximum length of a receive, bytes.
    pub(super) sip: usize,
    /// Maximum pause between batches, nanoseconds.
    pub(super) think_ns: u64,
    /// Disturbances, and the maximum time between them.
    pub(super) disturbances: Vec<Disturbance>,
    pub(super) calm_ns: u64,
}

impl Plan {
    pub(crate) fn new(random: &Random) -> Self {
        let connections = random.pick(&[1, 1, 2, 4]);
        // Below and above the daemon's limit per connection.
        let depth = random.pick(&[1, 2, 8, 32, 160]);
        let calm = random.one_in(3);
        let disturbances = Disturbance::ALL.iter().filter(|_| !calm && random.one_in(2));
        Plan {
            format: Format::Raw,
            sectors: random.pick(&[64, 1024, 4096]),
            connections,
            depth: if connections == 1 { depth } else { depth.min(64) },
            batch: random.pick(&[1, 4, 16, 200]),
            large: random.pick(&[8, 256, 256, 0]),
            pieces: random.pick(&[0, 3, 20]),
            sip: random.pick(&[700, 4096, 65536, 65536]),
            think_ns: random.pick(&[0, 5_000, 100_000]),
            disturbances: disturbances.copied().collect(),
            calm_ns: random.pick(&[1_000_000, 5_000_000, 20_000_000]),
        }
    }
}
