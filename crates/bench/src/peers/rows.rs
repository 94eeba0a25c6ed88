//! The rows of the table: the measured loads and nodes.

use super::compare::Figure;
use super::limit::Limits;
use crate::goal::Bound;
use crate::load::arrivals::{Arrivals, Pace};
use crate::load::offsets::Order;
use crate::load::queue::Op;
use crate::load::{Load, Threads, Wait};

/// The disk of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// A null node.
    Null,
    /// A file with `O_DIRECT`.
    File,
    /// An image that is made for each measurement.
    Image(Contents, Place),
}

/// What an image holds when the measurement starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// qcow2, nothing: what is measured is the first write to each cluster.
    New,
    /// qcow2, nothing, above a raw file with data.
    Overlay,
    /// The same, where the image's header names the file instead of an option: the peer reads it by threads.
    Named,
    /// qcow2, data in each cluster.
    Mapped,
    /// qcow2, compressed data in each cluster.
    Compressed,
    /// The data of `Mapped` in an image of driver luks.
    Luks,
    /// The data of `Mapped` in a raw file.
    Raw,
}

/// Where an image lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the directory of the run.
    Disk,
    /// In a file system in memory.
    Memory,
}

/// The load of a row.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// A load.
    Load(Load),
    /// None, with a client connected to each of this many exports.
    Idle(usize),
}

/// The goal of a row: for a load the ratio to qemu-storage-daemon, for idling the figure itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// The figure.
    pub(crate) figure: Figure,
    /// The limit.
    pub(crate) bound: Bound,
}

/// One row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Its name in the table; names are unique.
    pub(crate) name: String,
    /// The disk.
    pub(crate) disk: Disk,
    /// The load.
    pub(crate) work: Work,
    /// The goals.
    pub(crate) targets: Vec<Target>,
    /// Whether the file is also read without a server.
    pub(crate) is_beside_limits: bool,
    /// The results without a server.
    pub(crate) limits: Limits,
}

/// The extent of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// A few, for CI: under a minute with one round.
    Quick,
    /// Many kinds of load, for comparisons and investigations.
    Standard,
    /// The rows with goals.
    Full,
}

/// The rows of an extent.
pub(crate) fn rows(extent: Extent) -> Vec<Row> {
    match extent {
        Extent::Quick => quick(),
        Extent::Standard => standard(),
        Extent::Full => full(),
    }
}

/// One row of each important kind.
fn quick() -> Vec<Row> {
    const KINDS: [&str; 10] = [
        "null randread 400000/s",
        "null randread 4 jobs, depth 16",
        "file randread depth 64",
        "file randwrite depth 64",
        "file read 128k depth 16",
        "new qcow2 in memory randwrite depth 64",
        "new overlay randwrite depth 64",
        "mapped qcow2 in memory randread depth 64",
        "luks in memory randread depth 64",
        "idle, 1 export",
    ];
    let mut rows = full();
    rows.retain(|row| KINDS.contains(&row.name.as_str()));
    rows
}

fn standard() -> Vec<Row> {
    use Disk::{File, Null};
    let mut rows = Vec::new();
    for disk in [Null, File] {
        // Depth is per queue. 64 on each of 4 queues would complete the list, but qemu-storage-daemon 11.1.3 stops answering
        // there on a file node.
        for (depth, queues) in [(1, 1), (64, 1), (1, 4), (16, 4)] {
            for op in [Op::Read, Op::Write] {
                rows.push(unpaced(disk, op, depth, queues));
            }
        }
        rows.push(paced(disk, 2_000, 1));
        if disk == Null {
            rows.push(paced(disk, 200_000, 16));
            rows.push(paced(disk, 400_000, 16));
        }
    }
    rows.extend([paced(Null, 200_000, 1), polled(Null, 1), polled(Null, 64), idle(1)]);
    rows
}

/// The goals of ringmill relative to qemu-storage-daemon, row by row.
fn full() -> Vec<Row> {
    use Disk::{File, Null};
    use Figure::{Cpu, Iops, P50, P99, P999};
    use Op::{Read, Write};
    let mut rows = vec![
        paced(Null, 400_000, 1).reaching(&[(Cpu, 0.50)]),
        paced(Null, 200_000, 1).reaching(&[(Cpu, 0.55)]),
        unpaced(Null, Read, 64, 1).reaching(&[(Iops, 1.05)]),
        jobs(Null, 4, 16).reaching(&[(Iops, 1.05)]),
        unpaced(Null, Read, 1, 1).reaching(&[(P50, 0.55), (Cpu, 0.80)]),
        unpaced(File, Read, 1, 1).reaching(&[(Cpu, 0.75), (P50, 0.90)]).beside_the_limit(),
        unpaced(File, Write, 1, 1).reaching(&[(Cpu, 0.75), (P50, 0.90)]),
        unpaced(File, Read, 64, 1).reaching(&[(Cpu, 0.60)]).beside_the_limit(),
        unpaced(File, Write, 64, 1).reaching(&[(Cpu, 0.65)]),
        sequential(File, 16).reaching(&[(Cpu, 0.85)]).beside_the_limit(),
        seldom(File, 2_000).reaching(&[(Cpu, 0.75), (P99, 1.0)]),
    ];
    for row in &mut rows {
        row.targets.push(Target::new(P999, 1.0));
    }
    rows.extend(images());
    rows.extend([idle(1), idle(100)]);
    rows
}

/// The goals of images.
fn images() -> Vec<Row> {
    use Contents::{Compressed, Luks, Mapped, Named, New, Overlay, Raw};
    use Figure::{Cpu, Iops};
    use Op::{Read, Write};
    use Place::{Disk, Memory};
    let on = super::rows::Disk::Image;
    let mut rows = Vec::new();
    for disk in [on(New, Memory), on(New, Disk), on(Overlay, Disk)] {
        for depth in [64, 1] {
            rows.push(unpaced(disk, Write, depth, 1).reaching(&[(Iops, 0.9), (Cpu, 1.0)]));
        }
    }
    for place in [Memory, Disk] {
        rows.push(mebibytes(on(New, place)).reaching(&[(Iops, 1.0)]));
    }
    rows.extend([
        unpaced(on(Mapped, Memory), Read, 64, 1).reaching(&[(Cpu, 0.85)]),
        unpaced(on(Mapped, Memory), Write, 64, 1).reaching(&[(Cpu, 0.85)]),
        unpaced(on(Raw, Memory), Read, 64, 1),
        unpaced(on(Overlay, Memory), Read, 64, 1).reaching(&[(Cpu, 0.4)]),
        unpaced(on(Named, Memory), Read, 64, 1).reaching(&[(Cpu, 0.4)]),
        unpaced(on(Compressed, Memory), Write, 16, 1).reaching(&[(Iops, 0.8)]),
        clusters(on(Compressed, Memory), 16).reaching(&[(Iops, 0.8)]),
        unpaced(on(Luks, Memory), Read, 64, 1).reaching(&[(Cpu, 0.8)]),
    ]);
    rows
}

impl Target {
    /// A limit of a figure.
    pub(crate) fn new(figure: Figure, limit: f64) -> Self {
        // Requests per second have a minimum, other figures a maximum.
        let is_least = figure == Figure::Iops;
        let bound = if is_least { Bound::AtLeast(limit) } else { Bound::AtMost(limit) };
        Self { figure, bound }
    }
}

impl Row {
    fn new(name: String, disk: Disk, load: Load) -> Self {
        Self {
            name,
            disk,
            work: Work::Load(load),
            targets: Vec::new(),
            is_beside_limits: false,
            limits: Limits::default(),
        }
    }

    fn reaching(mut self, targets: &[(Figure, f64)]) -> Self {
        self.targets = targets.iter().map(|&(figure, limit)| Target::new(figure, limit)).collect();
        self
    }

    /// Whether a bare echo has the same load: one unpaced request at a time.
    pub(crate) fn has_echo(&self) -> bool {
        match &self.work {
            Work::Load(load) => {
                (load.depth, load.queues, load.wait) == (1, 1, Wait::Signal)
                    && matches!(load.arrivals, Arrivals::Closed)
                    && matches!(self.disk, Disk::Null | Disk::File)
            }
            Work::Idle(_) => false,
        }
    }

    fn beside_the_limit(self) -> Self {
        Self { is_beside_limits: true, ..self }
    }
}

/// As many requests as the server takes.
pub(crate) fn unpaced(disk: Disk, op: Op, depth: usize, queues: usize) -> Row {
    let name = match queues {
        1 => format!("{} {} depth {depth}", disk.name(), verb(op)),
        _ => format!("{} {} depth {queues}x{depth}", disk.name(), verb(op)),
    };
    Row::new(name, disk, Load { op, depth, queues, ..load() })
}

/// Random reads, a queue and a client thread for each of `count` jobs.
fn jobs(disk: Disk, count: usize, depth: usize) -> Row {
    let name = format!("{} randread {count} jobs, depth {depth}", disk.name());
    let threads = Threads::PerQueue;
    Row::new(name, disk, Load { depth, queues: count, threads, ..load() })
}

/// Reads of 128 KiB, one after the other.
fn sequential(disk: Disk, depth: usize) -> Row {
    let name = format!("{} read 128k depth {depth}", disk.name());
    let order = Order::Sequential;
    Row::new(name, disk, Load { depth, order, block_size: 128 << 10, ..load() })
}

/// Writes of 1 MiB, one after the other.
fn mebibytes(disk: Disk) -> Row {
    let name = format!("{} write 1m depth 8", disk.name());
    let (op, order) = (Op::Write, Order::Sequential);
    Row::new(name, disk, Load { op, order, depth: 8, block_size: 1 << 20, ..load() })
}

/// Random writes of whole clusters.
fn clusters(disk: Disk, depth: usize) -> Row {
    let name = format!("{} randwrite 64k depth {depth}", disk.name());
    Row::new(name, disk, Load { op: Op::Write, depth, block_size: 64 << 10, ..load() })
}

/// Random reads at a fixed rate.
pub(crate) fn paced(disk: Disk, per_second: u32, burst: u32) -> Row {
    let name = match burst {
        1 => format!("{} randread {per_second}/s", disk.name()),
        _ => format!("{} randread {per_second}/s by {burst}", disk.name()),
    };
    let arrivals = Arrivals::Paced(Pace { per_second: per_second.into(), burst });
    Row::new(name, disk, Load { arrivals, depth: 64, ..load() })
}

/// Random reads at a rate so low that each completes before the next.
fn seldom(disk: Disk, per_second: u32) -> Row {
    let name = format!("{} randread {per_second}/s", disk.name());
    let arrivals = Arrivals::Paced(Pace { per_second: per_second.into(), burst: 1 });
    Row::new(name, disk, Load { arrivals, ..load() })
}

/// Unpaced, from a client that polls for completions.
fn polled(disk: Disk, depth: usize) -> Row {
    let name = format!("{} randread depth {depth}, client polls", disk.name());
    Row::new(name, disk, Load { wait: Wait::Poll, depth, ..load() })
}

/// No load.
fn idle(exports: usize) -> Row {
    let plural = if exports == 1 { "" } else { "s" };
    Row {
        name: format!("idle, {exports} export{plural}"),
        disk: Disk::Null,
        work: Work::Idle(exports),
        targets: vec![Target::new(Figure::CpuShare, 0.0), Target::new(Figure::WakeUps, 0.0)],
        is_beside_limits: false,
        limits: Limits::default(),
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
    fn name(self) -> String {
        let (contents, place) = match self {
            Self::Null => return "null".into(),
            Self::File => return "file".into(),
            Self::Image(contents, place) => (contents, place),
        };
        let contents = match contents {
            Contents::New => "new qcow2",
            Contents::Overlay => "new overlay",
            Contents::Named => "new overlay with a named base",
            Contents::Mapped => "mapped qcow2",
            Contents::Compressed => "compressed qcow2",
            Contents::Luks => "luks",
            Contents::Raw => "raw",
        };
        match place {
            Place::Disk => contents.into(),
            Place::Memory => format!("{contents} in memory"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for extent in [Extent::Quick, Extent::Standard, Extent::Full] {
            let mut names: Vec<String> = rows(extent).into_iter().map(|row| row.name).collect();
            let count = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), count);
        }
    }

    #[test]
    fn the_quick_rows_are_there() {
        assert_eq!(rows(Extent::Quick).len(), 10);
    }
}
