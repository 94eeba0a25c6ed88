//! Resource limits, and what they mean for ringmill.

use std::fmt;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, rlim_t};

use super::pinning::Pinning;
use super::row;

/// Descriptors of a queue: its kick and its call.
const FDS_PER_QUEUE: rlim_t = 2;

/// Soft and hard limits by getrlimit(2).
pub(super) struct Limits {
    memlock: Option<(rlim_t, rlim_t)>,
    nofile: Option<(rlim_t, rlim_t)>,
    pinning: Pinning,
}

impl Limits {
    pub(super) fn read() -> Self {
        Self {
            memlock: getrlimit(Resource::RLIMIT_MEMLOCK).ok(),
            nofile: getrlimit(Resource::RLIMIT_NOFILE).ok(),
            pinning: Pinning::take(),
        }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memlock = self.memlock.map_or("unknown".to_owned(), |(soft, hard)| {
            format!("{} (hard limit {})", bytes(soft), bytes(hard))
        });
        row(f, "RLIMIT_MEMLOCK", &memlock)?;
        let soft = self.memlock.map(|(soft, _)| soft);
        row(f, "pinned memory", &self.pinning.describe(soft))?;
        let nofile = self.nofile.map_or("unknown".to_owned(), |(soft, hard)| {
            // The daemon raises the soft limit to the hard one.
            let queues = hard / FDS_PER_QUEUE;
            format!("{} (hard limit {}): about {} queues", count(soft), count(hard), count(queues))
        });
        row(f, "RLIMIT_NOFILE", &nofile)
    }
}

fn count(limit: rlim_t) -> String {
    if limit >= RLIM_INFINITY / FDS_PER_QUEUE { "unlimited".to_owned() } else { limit.to_string() }
}

/// A number of bytes, rounded down to the largest unit that fits.
pub(crate) fn bytes(number: u64) -> String {
    if number == RLIM_INFINITY {
        return "unlimited".to_owned();
    }
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| number >> shift > 0) {
        Some((shift, unit)) => {
            let (whole, tenths) = (number >> shift, ((number % (1 << shift)) * 10) >> shift);
            if tenths == 0 { format!("{whole} {unit}") } else { format!("{whole}.{tenths} {unit}") }
        }
        None => format!("{number} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_words() {
        assert_eq!(bytes(0), "0 bytes");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(8 << 20), "8 MiB");
        assert_eq!(bytes(3 << 40), "3 TiB");
        assert_eq!(bytes(RLIM_INFINITY), "unlimited");
    }

    #[test]
    fn limits_in_words() {
        let limits = Limits {
            memlock: Some((8 << 20, RLIM_INFINITY)),
            nofile: Some((1024, 4096)),
            pinning: Pinning::Counted,
        };
        let text = limits.to_string();
        assert!(text.contains("8 MiB (hard limit unlimited)"), "{text}");
        assert!(text.contains("pinned memory             up to 8 MiB for all"), "{text}");
        assert!(text.contains("1024 (hard limit 4096): about 2048 queues"), "{text}");
    }
}
