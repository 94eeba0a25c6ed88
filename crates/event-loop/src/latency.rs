//! How long things took, as counts in fixed buckets.

use crate::stats::Counter;

/// Buckets per doubling: one is at most a quarter wider than where it begins.
const PER_OCTAVE: u32 = 4;
/// Everything shorter is one bucket: 512 ns.
const FIRST_OCTAVE: u32 = 9;
/// Everything from here on is one bucket: 2^36 ns, a good minute.
const END_OCTAVE: u32 = 36;
/// Number of buckets.
pub const LATENCY_BUCKETS: usize = ((END_OCTAVE - FIRST_OCTAVE) * PER_OCTAVE) as usize + 2;

/// Counts of latencies, by buckets from 512 ns to 69 s.
///
/// There are four buckets of equal width per power of two. All shorter latencies are in one bucket, and all longer ones in another.
///
/// Written by one thread, with plain stores; a reader may see one bucket a little older than
/// another.
#[derive(Debug)]
pub struct LatencyCounters([Counter; LATENCY_BUCKETS]);

impl Default for LatencyCounters {
    fn default() -> Self {
        LatencyCounters(std::array::from_fn(|_| Counter::default()))
    }
}

impl LatencyCounters {
    /// Counts `n` that took `ns` nanoseconds each. Only the owning thread may.
    pub fn add(&self, ns: u64, n: u64) {
        if let Some(counter) = self.0.get(bucket(ns)) {
            counter.add(n);
        }
    }

    /// Takes a snapshot.
    pub fn get(&self) -> Latencies {
        Latencies(self.0.iter().map(Counter::get).collect())
    }
}

/// The bucket that a latency falls into.
fn bucket(ns: u64) -> usize {
    let Some(octave) = ns.checked_ilog2().filter(|octave| *octave >= FIRST_OCTAVE) else {
        return 0;
    };
    let quarter = (ns >> (octave - 2)) as u32 & (PER_OCTAVE - 1);
    let place = (octave - FIRST_OCTAVE) * PER_OCTAVE + quarter + 1;
    (place as usize).min(LATENCY_BUCKETS - 1)
}

/// Where a bucket ends, nanoseconds, itself not included; `u64::MAX` of the last.
fn end(bucket: usize) -> u64 {
    let Some(place) = (bucket as u32).checked_sub(1) else { return 1 << FIRST_OCTAVE };
    let octave = FIRST_OCTAVE + place / PER_OCTAVE;
    if octave >= END_OCTAVE {
        return u64::MAX;
    }
    u64::from(PER_OCTAVE + 1 + place % PER_OCTAVE) << (octave - 2)
}

/// A snapshot of [`LatencyCounters`], or a sum of several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Latencies(Vec<u64>);

impl Latencies {
    /// Returns the number of latencies.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the non-empty buckets: beginning and end in nanoseconds, and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(bucket, count)| (bucket.checked_sub(1).map_or(0, end), end(bucket), *count))
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Latencies) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, other) in self.0.iter_mut().zip(&other.0) {
            *mine += other;
        }
    }

    /// Returns the number of latencies below `ns` nanoseconds.
    ///
    /// `ns` must be the end of a bucket: any power of two from 512 is.
    pub fn below(&self, ns: u64) -> u64 {
        self.buckets().take_while(|(_, end, _)| *end <= ns).map(|(_, _, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_lies_in_its_bucket_and_buckets_are_narrow() {
        let mut before = 0;
        for octave in 0..64 {
            for step in 0..64 {
                let ns = (1u64 << octave) + ((1u64 << octave) >> 6) * step;
                let at = bucket(ns);
                assert!(at >= before, "{ns}");
                before = at;
                let begin = at.checked_sub(1).map_or(0, end);
                assert!(begin <= ns && (ns < end(at) || end(at) == u64::MAX), "{ns}");
                if (1..LATENCY_BUCKETS - 1).contains(&at) {
                    assert!(end(at) - begin <= begin / 4, "{ns}");
                }
            }
        }
        assert_eq!(before, LATENCY_BUCKETS - 1);
    }

    #[test]
    fn counts_are_those_of_all_writers() {
        let (one, other) = (LatencyCounters::default(), LatencyCounters::default());
        one.add(1000, 3);
        one.add(0, 1);
        other.add(u64::MAX, 2);
        let mut all = Latencies::default();
        all.add(&one.get());
        all.add(&other.get());
        assert_eq!(all.count(), 6);
        assert_eq!([all.below(512), all.below(1024), all.below(1 << 36)], [1, 4, 4]);
        let buckets: Vec<_> = all.buckets().collect();
        assert_eq!(buckets, [(0, 512, 1), (896, 1024, 3), (1 << 36, u64::MAX, 2)]);
    }
}
