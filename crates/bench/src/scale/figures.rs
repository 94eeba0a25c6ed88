//! What was measured.

use std::collections::BTreeMap;

use super::measure::{Busy, Idle};
use crate::figures::median;
use crate::load::Load;
use crate::load::arrivals::{Arrivals, Pace};
use crate::peers::rows;

/// The rounds of one server with one number of exports.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// With nothing to do.
    pub(crate) idle: Vec<Idle>,
    /// One busy, by [`DEPTHS`].
    pub(crate) one_busy: [Vec<Busy>; DEPTHS.len()],
    /// All busy.
    pub(crate) all_busy: Vec<Busy>,
}

/// The depths at which one export is busy.
pub(crate) const DEPTHS: [usize; 2] = [1, 64];

/// A load of two queues, with its name.
pub(crate) type TwoQueues = (&'static str, fn() -> Load);

/// The loads that one and two I/O threads are measured under.
pub(crate) const SECOND_THREAD: [TwoQueues; 3] = [
    ("depth 2x64, unpaced", || Load { depth: 64, ..two_queues() }),
    ("400000/s by 16", || paced(400_000.0)),
    ("200000/s by 16", || paced(200_000.0)),
];

fn two_queues() -> Load {
    Load { queues: 2, ..rows::load() }
}

fn paced(per_second: f64) -> Load {
    let arrivals = Arrivals::Paced(Pace { per_second, burst: 16 });
    Load { arrivals, depth: 64, ..two_queues() }
}

/// All figures.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// By number of exports, then by server.
    by_exports: BTreeMap<usize, BTreeMap<String, Rounds>>,
    /// By [`SECOND_THREAD`]: with one I/O thread, and with two.
    pub(crate) threads: [[Vec<Busy>; 2]; SECOND_THREAD.len()],
    /// What could not be measured.
    pub(crate) failures: usize,
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

    /// The rounds of a server.
    pub(crate) fn get(&self, exports: usize, server: &str) -> Option<&Rounds> {
        self.by_exports.get(&exports)?.get(server)
    }

    /// What each export takes beyond the first one of the smallest run, by a figure of the whole
    /// server.
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

/// The median of a figure; NaN of none.
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
