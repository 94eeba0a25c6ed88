//! The rows of the table: which loads and nodes are measured.

use crate::load::arrivals::{Arrivals, Pace};
use crate::load::offsets::Order;
use crate::load::queue::Op;
use crate::load::{Load, Threads, Wait};

/// Which disk a row is measured on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// A null node.
    Null,
    /// A file with `O_DIRECT`.
    File,
}

/// What is done to it.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// A load.
    Load(Load),
    /// Nothing, with a client connected to each of this many exports.
    Idle(usize),
}

/// One row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Its name in the table; names are unique.
    pub(crate) name: String,
    /// The disk.
    pub(crate) disk: Disk,
    /// The work.
    pub(crate) work: Work,
}

/// How many rows are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// A few, for CI: under a minute with one round.
    Quick,
    /// Those that BENCHMARKS.md shows.
    Standard,
    /// Also those that take long or say little.
    Full,
}

/// The rows of an extent.
pub(crate) fn rows(extent: Extent) -> Vec<Row> {
    use Disk::{File, Null};
    use Op::{Read, Write};
    if extent == Extent::Quick {
        return vec![
            unpaced(Null, Read, 1, 1),
            unpaced(Null, Read, 64, 1),
            unpaced(File, Read, 1, 1),
            unpaced(File, Write, 16, 4),
            paced(Null, 400_000, 16),
            idle(1),
        ];
    }
    let mut rows = Vec::new();
    for disk in [Null, File] {
        // Depth is per queue. 64 on each of 4 queues would be the natural fourth, but there
        // qemu-storage-daemon 11.1.3 stops answering on a file node.
        for (depth, queues) in [(1, 1), (64, 1), (1, 4), (16, 4)] {
            for op in [Read, Write] {
                rows.push(unpaced(disk, op, depth, queues));
            }
        }
        rows.push(paced(disk, 2_000, 1));
        if disk == Null {
            rows.push(paced(disk, 200_000, 16));
            rows.push(paced(disk, 400_000, 16));
        }
    }
    rows.push(idle(1));
    if extent == Extent::Full {
        rows.push(paced(Null, 200_000, 1));
        rows.push(polled(Null, 1));
        rows.push(polled(Null, 64));
        rows.push(idle(100));
    }
    rows
}

/// As much as the server takes.
pub(crate) fn unpaced(disk: Disk, op: Op, depth: usize, queues: usize) -> Row {
    let name = match queues {
        1 => format!("{} {} depth {depth}", disk.name(), verb(op)),
        _ => format!("{} {} depth {queues}x{depth}", disk.name(), verb(op)),
    };
    Row { name, disk, work: Work::Load(Load { op, depth, queues, ..load() }) }
}

/// Random reads at a fixed rate.
pub(crate) fn paced(disk: Disk, per_second: u32, burst: u32) -> Row {
    let name = match burst {
        1 => format!("{} randread {per_second}/s", disk.name()),
        _ => format!("{} randread {per_second}/s by {burst}", disk.name()),
    };
    let arrivals = Arrivals::Paced(Pace { per_second: per_second.into(), burst });
    Row { name, disk, work: Work::Load(Load { arrivals, depth: 64, ..load() }) }
}

/// Unpaced, from a client that polls for completions.
fn polled(disk: Disk, depth: usize) -> Row {
    let name = format!("{} randread depth {depth}, client polls", disk.name());
    Row { name, disk, work: Work::Load(Load { wait: Wait::Poll, depth, ..load() }) }
}

/// Nothing.
pub(crate) fn idle(exports: usize) -> Row {
    let plural = if exports == 1 { "" } else { "s" };
    Row {
        name: format!("idle, {exports} export{plural}"),
        disk: Disk::Null,
        work: Work::Idle(exports),
    }
}

/// The load that rows vary.
pub(crate) fn load() -> Load {
    Load {
        op: Op::Read,
        order: Order::Random,
        block_size: 4096,
        depth: 1,
        queues: 1,
        threads: Threads::One,
        arrivals: Arrivals::Closed,
        wait: Wait::Signal,
        cpu: None,
    }
}

fn verb(op: Op) -> &'static str {
    match op {
        Op::Read => "randread",
        Op::Write => "randwrite",
    }
}

impl Disk {
    fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::File => "file",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = rows(Extent::Full).into_iter().map(|row| row.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
