//! The loads that polling policies are compared on.

use crate::load::arrivals::{Arrivals, Pace};
use crate::load::{Load, Threads, Wait};
use crate::peers::rows::load;

/// The kind of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// A null node: answers at once.
    Null,
    /// A loop device over memory: answers within some 10 us.
    Ram,
    /// A file with `O_DIRECT`.
    File,
}

impl Disk {
    fn name(self) -> &'static str {
        match self {
            Disk::Null => "null",
            Disk::Ram => "RAM disk",
            Disk::File => "file",
        }
    }
}

/// A load, and the I/O thread's other loads meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct LiveLoad {
    /// Its name.
    pub(crate) name: String,
    /// The disk that is measured.
    pub(crate) disk: Disk,
    /// The load on it.
    pub(crate) load: Load,
    /// I/O threads that share its queues.
    pub(crate) io_threads: usize,
    /// Other disks, each with an export and a load.
    pub(crate) beside: Vec<(Disk, Load)>,
}

impl LiveLoad {
    /// A load on a disk.
    pub(crate) fn new(what: &str, disk: Disk, load: Load) -> Self {
        let wait = match load.wait {
            Wait::Signal => "",
            Wait::Poll => ", client polls",
        };
        let name = format!("{}, {what}{wait}", disk.name());
        LiveLoad { name, disk, load, io_threads: 1, beside: Vec::new() }
    }

    fn beside(mut self, what: &str, others: Vec<(Disk, Load)>) -> Self {
        self.name += &format!(", beside {what}");
        self.beside = others;
        self
    }
}

fn closed(depth: usize) -> Load {
    Load { depth, ..load() }
}

fn paced(per_second: f64, burst: u32) -> Load {
    let depth = 64.min(1.max(per_second as usize / 1_000).max(burst as usize));
    Load { arrivals: Arrivals::Paced(Pace { per_second, burst }), depth, ..load() }
}

fn thinking(ns: u64) -> Load {
    Load { arrivals: Arrivals::Thinking(ns), ..load() }
}

/// All of them.
pub(crate) fn all() -> Vec<LiveLoad> {
    let mut loads = Vec::new();
    for wait in [Wait::Signal, Wait::Poll] {
        for disk in [Disk::Null, Disk::Ram, Disk::File] {
            let mut add = |what: &str, load| {
                loads.push(LiveLoad::new(what, disk, Load { wait, ..load }));
            };
            for depth in [1, 4, 16, 64] {
                add(&format!("depth {depth}"), closed(depth));
            }
            let queues = Load { queues: 4, threads: Threads::PerQueue, ..closed(16) };
            if wait == Wait::Signal {
                add("4 queues, depth 16 each", queues);
            } else {
                // Polling threads would compete for the CPU.
                add("4 queues, depth 16 each", Load { threads: Threads::One, ..queues });
            }
            for rate in [500.0, 2_000.0, 20_000.0, 200_000.0] {
                // A load beyond the file's limit does not depend on polling.
                if disk != Disk::File || rate < 100_000.0 {
                    add(&format!("{rate:.0}/s"), paced(rate, 1));
                }
            }
        }
        let mut null = |what: &str, load| {
            loads.push(LiveLoad::new(what, Disk::Null, Load { wait, ..load }));
        };
        null("16000/s by 32", paced(16_000.0, 32));
        null("computes 10 us", thinking(10_000));
        null("computes 50 us", thinking(50_000));
    }
    // The daemon has one CPU.
    for threads in [2, 8] {
        let load = Load { queues: threads, threads: Threads::PerQueue, ..closed(1) };
        let what = format!("{threads} I/O threads on one CPU");
        loads.push(LiveLoad { io_threads: threads, ..LiveLoad::new(&what, Disk::File, load) });
    }
    let slow = vec![(Disk::File, closed(1))];
    loads.push(LiveLoad::new("20000/s", Disk::Null, paced(20_000.0, 1)).beside("a file", slow));
    let idle = vec![(Disk::Null, paced(0.5, 1)); 50];
    loads.push(LiveLoad::new("depth 1", Disk::Null, closed(1)).beside("50 idle", idle.clone()));
    loads.push(LiveLoad::new("depth 4", Disk::File, closed(4)).beside("50 idle", idle));
    loads
}
