//! The rows of the table: which loads are measured, on which file, over which socket.

use crate::load::arrivals::{Arrivals, Pace};
use crate::load::offsets::Order;
use crate::load::queue::Op;
use crate::load::{Load, Threads};
use crate::peers::rows::load;

/// Which file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// One that is read and written past the page cache, as far as a server can.
    Direct,
    /// One that the page cache has all of.
    Cached,
}

/// One row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Its name in the table; names are unique.
    pub(crate) name: String,
    /// The file.
    pub(crate) disk: Disk,
    /// Over TCP, instead of a unix socket.
    pub(crate) tcp: bool,
    /// What; a queue is a connection.
    pub(crate) load: Load,
}

/// Those of the short form: of each kind one.
const QUICK: [&str; 4] = [
    "cached randwrite depth 64",
    "direct randread depth 1",
    "cached randread depth 16 x 4 connections",
    "cached randread depth 64, TCP",
];

/// All of them, or those of the short form.
pub(crate) fn rows(quick: bool) -> Vec<Row> {
    use Disk::{Cached, Direct};
    use Op::{Read, Write};
    let mut rows = Vec::new();
    for depth in [1, 16, 64] {
        rows.push(random(Cached, Read, depth));
        rows.push(random(Cached, Write, depth));
    }
    for depth in [1, 16, 64] {
        rows.push(random(Direct, Read, depth));
        rows.push(random(Direct, Write, depth));
    }
    rows.extend([
        random(Cached, Read, 16).connections(4),
        random(Direct, Write, 16).connections(4),
        random(Cached, Read, 1).over_tcp(),
        random(Cached, Read, 64).over_tcp(),
        random(Cached, Read, 1).paced(5_000),
        sequential(Cached, Read),
        sequential(Cached, Write),
        sequential(Cached, Read).over_tcp(),
    ]);
    if quick {
        rows.retain(|row| QUICK.contains(&row.name.as_str()));
    }
    rows
}

/// 4 KiB anywhere, over a unix socket, as fast as they are answered.
fn random(disk: Disk, op: Op, depth: usize) -> Row {
    let verb = match op {
        Op::Read => "randread",
        Op::Write => "randwrite",
    };
    let name = format!("{} {verb} depth {depth}", disk.name());
    let load = Load { op, depth, ..load() };
    Row { name, disk, tcp: false, load }
}

/// 128 KiB, one after the other.
fn sequential(disk: Disk, op: Op) -> Row {
    let verb = match op {
        Op::Read => "read",
        Op::Write => "write",
    };
    let name = format!("{} {verb} 128k depth 16", disk.name());
    let order = Order::Sequential;
    let load = Load { op, depth: 16, order, block_size: 128 << 10, ..load() };
    Row { name, disk, tcp: false, load }
}

impl Row {
    fn connections(mut self, count: usize) -> Self {
        self.name += &format!(" x {count} connections");
        self.load.queues = count;
        self.load.threads = Threads::PerQueue;
        self
    }

    fn over_tcp(mut self) -> Self {
        self.name += ", TCP";
        self.tcp = true;
        self
    }

    fn paced(mut self, per_second: u32) -> Self {
        self.name += &format!(", {per_second}/s");
        self.load.arrivals = Arrivals::Paced(Pace { per_second: per_second.into(), burst: 1 });
        self
    }
}

impl Disk {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Cached => "cached",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_those_of_the_short_form_are_there() {
        let mut names: Vec<String> = rows(false).into_iter().map(|row| row.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(rows(true).len(), QUICK.len());
    }
}
