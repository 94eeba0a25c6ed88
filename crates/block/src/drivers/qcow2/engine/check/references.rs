//! How often something refers to each cluster of a file.

use std::collections::HashMap;

/// Counts that lie side by side in memory.
const CHUNK: usize = 4096;

/// Counts of references. Takes memory where clusters are in use only.
#[derive(Debug, Default)]
pub(super) struct References {
    chunks: Vec<Option<Box<[u16; CHUNK]>>>,
    /// Counts that do not fit, of clusters that have the largest number above.
    large: HashMap<u64, u64>,
    /// No cluster from here on has a reference.
    used: u64,
}

impl References {
    /// The references to a cluster.
    pub(super) fn of(&self, cluster: u64) -> u64 {
        let (chunk, at) = (cluster as usize / CHUNK, cluster as usize % CHUNK);
        match self.chunks.get(chunk).and_then(Option::as_deref).map(|chunk| chunk[at]) {
            None => 0,
            Some(u16::MAX) => self.large.get(&cluster).copied().unwrap_or(u16::MAX.into()),
            Some(count) => count.into(),
        }
    }

    /// Adds references to a cluster.
    pub(super) fn add(&mut self, cluster: u64, more: u64) {
        let (chunk, at) = (cluster as usize / CHUNK, cluster as usize % CHUNK);
        self.used = self.used.max(cluster + 1);
        if chunk >= self.chunks.len() {
            self.chunks.resize(chunk + 1, None);
        }
        let count = &mut self.chunks[chunk].get_or_insert_with(|| Box::new([0; CHUNK]))[at];
        let before = match *count {
            u16::MAX => self.large.get(&cluster).copied().unwrap_or(u16::MAX.into()),
            count => count.into(),
        };
        let after = before.saturating_add(more);
        *count = u16::try_from(after).unwrap_or(u16::MAX);
        if *count == u16::MAX {
            self.large.insert(cluster, after);
        }
    }

    /// The end of the last cluster with a reference, as a number of clusters.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// No cluster from here on has references.
    pub(super) fn end(&self) -> u64 {
        (self.chunks.len() * CHUNK) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_any_size_are_kept() {
        let mut references = References::default();
        (0..69_000).for_each(|_| references.add(5000, 1));
        references.add(5000, 1000);
        references.add(3, 1);
        assert_eq!([3, 4, 5000, 5001, 1 << 40].map(|at| references.of(at)), [1, 0, 70_000, 0, 0]);
        assert_eq!(references.used(), 5001);
        assert!((5001..=8192).contains(&references.end()));
    }
}
