//! The figures of a run.

use std::collections::BTreeMap;

use super::measure::{Busy, Idle};
use crate::figures::median;
use crate::load::Load;
use crate::load::arrivals::{Arrivals, Pace};
use crate::peers::rows;

/// The rounds of one server with one number of exports.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// When idle.
    pub(crate) idle: Vec<Idle>,
    /// With one busy export, by [`DEPTHS`].
    pub(crate) one_busy: [Vec<Busy>; DEPTHS.len()],
    /// With all exports busy.
    pub(crate) all_busy: Vec<Busy>,
    /// The reason of a failure, after which nothing was measured.
    pub(crate) failed: Option<String>,
}

/// The depths at which one export is busy.
pub(crate) const DEPTHS: [usize; 2] = [1, 64];

/// A load for a number of I/O threads, with its name.
pub(crate) type ThreadLoad = (&'static str, fn(usize) -> Load);

/// The loads for one and two I/O threads: the same load for both, spread over two queues; and a queue with a load per
/// thread.
pub(crate) const SECOND_THREAD: [ThreadLoad; 4] = [
    ("the same two queues, depth 64", |_| unpaced(2)),
    ("the same two queues, 400000/s by 16", |_| paced(2, 400_000)),
    ("a queue each, depth 64", unpaced),
    ("a queue each, 200000/s by 16", |threads| paced(threads, threads as u32 * 200_000)),
];

fn unpaced(queues: usize) -> Load {
    Load { queues, depth: 64, ..rows::load() }
}

fn paced(queues: usize, per_second: u32) -> Load {
    let arrivals = Arrivals::Paced(Pace { per_second: per_second.into(), burst: 16 });
    Load { arrivals, ..unpaced(queues) }
}

/// All figures.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// By number of exports, then by server.
    by_exports: BTreeMap<usize, BTreeMap<String, Rounds>>,
    /// By [`SECOND_THREAD`]: with one I/O thread, and with two.
    pub(crate) threads: [[Vec<Busy>; 2]; SECOND_THREAD.len()],
}

impl Figures {
    /// The rounds so far.
    pub(crate) fn at(&mut self, exports: usize, server: &str) -> &mut Rounds {
        self.by_exports.entry(exports).or_default().entry(server.to_owned()).or_default()
    }

    /// The numbers of exports.
    pub(crate) fn exports(&self) -> Vec<usize> {
        self.by_exports.keys().copied().collect()
    }

    /// The failures of a server, by number of exports.
    pub(crate) fn failures(&self, server: &str) -> impl Iterator<Item = (usize, &str)> {
        self.by_exports.iter().filter_map(move |(&exports, servers)| {
            Some((exports, servers.get(server)?.failed.as_deref()?))
        })
    }

    /// The rounds of a server.
    pub(crate) fn get(&self, exports: usize, server: &str) -> Option<&Rounds> {
        self.by_exports.get(&exports)?.get(server)
    }

    /// The cost of each export beyond the smallest run's first one, for a figure of the whole server.
    pub(crate) fn each(
        &self,
        exports: usize,
        server: &str,
        figure: fn(&Idle) -> f64,
    ) -> Option<f64> {
        let fewest = *self.by_exports.keys().next()?;
        if fewest == exports {
            return None;
        }
        let median = |exports| {
            let rounds = self.get(exports, server).filter(|rounds| !rounds.idle.is_empty())?;
            Some(median(rounds.idle.iter().map(figure)))
        };
        Some((median(exports)? - median(fewest)?) / (exports - fewest) as f64)
    }
}

/// The median of a figure; NaN without rounds.
pub(crate) fn middle<T>(rounds: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    median(rounds.iter().map(figure))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::footprint::Footprint;

    #[test]
    fn the_first_export_stands_for_the_daemon_itself() {
        let idle = |kib| Idle {
            start: 1.0,
            footprint: Footprint { anonymous: kib, ..Footprint::default() },
            slab: 0.0,
            cpu: 0.0,
            switches: 0.0,
        };
        let mut figures = Figures::default();
        figures.at(1, "x").idle.push(idle(1000));
        figures.at(11, "x").idle.extend([idle(1300), idle(1200), idle(9999)]);
        let kib = |idle: &Idle| idle.footprint.anonymous as f64;
        assert_eq!(figures.each(11, "x", kib), Some(30.0));
        assert_eq!(figures.each(1, "x", kib), None);
        assert_eq!(figures.each(11, "y", kib), None);
    }
}
