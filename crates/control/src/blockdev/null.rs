//! `null-co` and `null-aio`: no storage at all.

use block::options::{Driver, NullOptions};

use super::{DriverRow, Inherited, OwnTable};
use crate::table::{Field, Kind, Need, put};

/// The size of a null node when none is given, as in QSD.
const SIZE: u64 = 1 << 30;

pub(super) static NULL_CO: DriverRow = DriverRow {
    name: "null-co",
    help: "reads and writes nothing, and answers at once; for measuring",
    example: "null-co,node-name=n,size=8589934592",
    own: &OwnTable { fields: FIELDS, start: new, build: |null| Ok(Driver::NullCo(null)) },
};

pub(super) static NULL_AIO: DriverRow = DriverRow {
    name: "null-aio",
    help: "the same, answered from the event loop",
    example: "null-aio,node-name=n,size=8589934592,latency-ns=100000",
    own: &OwnTable { fields: FIELDS, start: new, build: |null| Ok(Driver::NullAio(null)) },
};

fn new(_: Inherited) -> NullOptions {
    NullOptions { size: SIZE, latency_ns: 0, read_zeroes: false }
}

static FIELDS: &[Field<NullOptions>] = &[
    Field {
        name: "size",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, bytes| put(&mut node.size, bytes.unsigned_abs()),
        },
        need: Need::Default("1073741824"),
        help: "size of the disk, in bytes",
    },
    Field {
        name: "latency-ns",
        kind: Kind::Int {
            range: 0..=i64::MAX,
            set: |node, ns| put(&mut node.latency_ns, ns.unsigned_abs()),
        },
        need: Need::Default("0"),
        help: "how long each request takes, in nanoseconds",
    },
    Field {
        name: "read-zeroes",
        kind: Kind::Bool(|node, on| put(&mut node.read_zeroes, on)),
        need: Need::Default("off"),
        help: "clear the buffers of reads; off leaves them as they are",
    },
];
