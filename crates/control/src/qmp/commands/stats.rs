//! What exports, nodes and I/O threads have done.

use super::{Arguments, Command, CommandRow, Job, Member, Reply, Returns};
use crate::error::OptionError;
use crate::shape::Shape;
use crate::table::{self, Context, Field, Kind, Need, Table, put};
use crate::value::Value;

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "query-blockstats",
        help: "return statistics of each export, or of each node",
        example: r#"{"query-nodes": true}"#,
        arguments: Arguments::Table(&Table {
            fields: BLOCKSTATS,
            build: |nodes| Ok(Job::Run(Command::QueryBlockstats { nodes })),
        }),
        returns: Returns::Data("one for each", Reply::List(&Reply::Object(BLOCK_STATS))),
    },
    CommandRow {
        name: "block-latency-histogram-set",
        help: "count an export's latencies between boundaries, for query-blockstats; without boundaries, stop counting",
        example: r#"{"id": "export0", "boundaries": [100000, 1000000, 10000000]}"#,
        arguments: Arguments::Table(&Table {
            fields: HISTOGRAM_SET,
            build: |set: HistogramSet| {
                let HistogramSet { id, all, mut boundaries, zone_append } = set;
                let none = boundaries == LatencyBoundaries::default();
                let boundaries = match (none && !zone_append, all) {
                    (true, None) => None,
                    (_, all) => {
                        let LatencyBoundaries { read, write, flush } = &mut boundaries;
                        for kind in [read, write, flush] {
                            *kind = kind.take().or_else(|| all.clone());
                        }
                        Some(boundaries)
                    }
                };
                Ok(Job::Run(Command::BlockLatencyHistogramSet { id, boundaries }))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "x-query-export-stats",
        help: "return statistics of each queue of each export",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::XQueryExportStats)),
        returns: Returns::Data("one for each export", Reply::List(&Reply::Object(EXPORT_STATS))),
    },
    CommandRow {
        name: "x-query-iothread-stats",
        help: "return statistics of each I/O thread",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::XQueryIothreadStats)),
        returns: Returns::Data("one for each thread", Reply::List(&Reply::Object(THREAD_STATS))),
    },
];

/// Boundaries of `block-latency-histogram-set`, nanoseconds, as they were given; `None`: nothing is
/// said of the kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LatencyBoundaries {
    /// Of reads.
    pub read: Option<Vec<u64>>,
    /// Of writes.
    pub write: Option<Vec<u64>>,
    /// Of flushes.
    pub flush: Option<Vec<u64>>,
}

static BLOCKSTATS: &[Field<bool>] = &[Field {
    name: "query-nodes",
    kind: Kind::Bool(put),
    need: Need::Default("off"),
    help: "statistics of nodes instead of exports",
}];

#[derive(Default)]
struct HistogramSet {
    id: String,
    all: Option<Vec<u64>>,
    boundaries: LatencyBoundaries,
    zone_append: bool,
}

static HISTOGRAM_SET: &[Field<HistogramSet>] = &[
    Field {
        name: "id",
        kind: Kind::Text { meta: "<id>", set: |set, id| put(&mut set.id, id) },
        need: Need::Required,
        help: "the export's name",
    },
    Field {
        name: "boundaries",
        kind: Kind::Nested {
            shape: list,
            read: |set, value, at| put(&mut set.all, Some(numbers(value, at)?)),
        },
        need: Need::Optional("none"),
        help: "boundaries of kinds that have none of their own, in nanoseconds, rising",
    },
    Field {
        name: "boundaries-read",
        kind: Kind::Nested {
            shape: list,
            read: |set, value, at| put(&mut set.boundaries.read, Some(numbers(value, at)?)),
        },
        need: Need::Optional("none"),
        help: "boundaries of reads",
    },
    Field {
        name: "boundaries-write",
        kind: Kind::Nested {
            shape: list,
            read: |set, value, at| put(&mut set.boundaries.write, Some(numbers(value, at)?)),
        },
        need: Need::Optional("none"),
        help: "boundaries of writes",
    },
    Field {
        name: "boundaries-zap",
        kind: Kind::Nested {
            shape: list,
            read: |set, value, at| {
                numbers(value, at)?;
                put(&mut set.zone_append, true)
            },
        },
        need: Need::Optional("none"),
        help: "boundaries of zone appends, which there are none of",
    },
    Field {
        name: "boundaries-flush",
        kind: Kind::Nested {
            shape: list,
            read: |set, value, at| put(&mut set.boundaries.flush, Some(numbers(value, at)?)),
        },
        need: Need::Optional("none"),
        help: "boundaries of flushes",
    },
];

fn list() -> Shape {
    Shape::List(Box::new(Shape::Int(0..=i64::MAX)), "")
}

fn numbers(value: Value, at: &Context) -> Result<Vec<u64>, OptionError> {
    let Value::List(list) = value else {
        return Err(table::wrong_type(at.whole(), "array"));
    };
    let number = |(place, value)| match value {
        Value::Integer(number) => Ok(number.cast_unsigned()),
        _ => {
            let name = at.whole();
            Err(OptionError::new(format!("Parameter '{name}[{place}]' expects uint64")))
        }
    };
    list.into_iter().enumerate().map(number).collect()
}

static BLOCK_STATS: &[Member] = &[
    Member::optional("device", Reply::Text, "always empty; of exports only"),
    Member::optional("qdev", Reply::Text, "the export's name"),
    Member::optional("node-name", Reply::Text, "the node, or the node that the export offers"),
    Member::new("stats", Reply::Object(DEVICE_STATS), "what was done"),
];

static DEVICE_STATS: &[Member] = &[
    Member::new("rd_bytes", Reply::Int, "bytes moved by reads"),
    Member::new("wr_bytes", Reply::Int, "bytes moved by writes, of zeroes too"),
    Member::new("unmap_bytes", Reply::Int, "bytes moved by discards"),
    Member::new("zone_append_bytes", Reply::Int, "always 0"),
    Member::new("rd_operations", Reply::Int, "reads carried out"),
    Member::new("wr_operations", Reply::Int, "writes, of zeroes too carried out"),
    Member::new("unmap_operations", Reply::Int, "discards carried out"),
    Member::new("flush_operations", Reply::Int, "flushes carried out"),
    Member::new("zone_append_operations", Reply::Int, "always 0"),
    Member::new("rd_total_time_ns", Reply::Int, "time that reads took, nanoseconds"),
    Member::new(
        "wr_total_time_ns",
        Reply::Int,
        "time that writes, of zeroes too took, nanoseconds",
    ),
    Member::new("unmap_total_time_ns", Reply::Int, "time that discards took, nanoseconds"),
    Member::new("flush_total_time_ns", Reply::Int, "time that flushes took, nanoseconds"),
    Member::new("zone_append_total_time_ns", Reply::Int, "always 0"),
    Member::new("rd_merged", Reply::Int, "always 0: merged requests are counted one by one"),
    Member::new("wr_merged", Reply::Int, "always 0: merged requests are counted one by one"),
    Member::new("unmap_merged", Reply::Int, "always 0: merged requests are counted one by one"),
    Member::new(
        "zone_append_merged",
        Reply::Int,
        "always 0: merged requests are counted one by one",
    ),
    Member::new("failed_rd_operations", Reply::Int, "reads that failed"),
    Member::new("failed_wr_operations", Reply::Int, "writes, of zeroes too that failed"),
    Member::new("failed_unmap_operations", Reply::Int, "discards that failed"),
    Member::new("failed_flush_operations", Reply::Int, "flushes that failed"),
    Member::new("failed_zone_append_operations", Reply::Int, "always 0"),
    Member::new("invalid_rd_operations", Reply::Int, "reads refused without an attempt"),
    Member::new(
        "invalid_wr_operations",
        Reply::Int,
        "writes, of zeroes too refused without an attempt",
    ),
    Member::new("invalid_unmap_operations", Reply::Int, "discards refused without an attempt"),
    Member::new("invalid_flush_operations", Reply::Int, "flushes refused without an attempt"),
    Member::new("invalid_zone_append_operations", Reply::Int, "always 0"),
    Member::new("wr_highest_offset", Reply::Int, "always 0"),
    Member::optional("idle_time_ns", Reply::Int, "time since the last answer, nanoseconds"),
    Member::new("account_invalid", Reply::Bool, "refused requests count for idle_time_ns"),
    Member::new("account_failed", Reply::Bool, "failed requests count for times and histograms"),
    Member::new("timed_stats", Reply::List(&Reply::Object(TIMED_STATS)), "always empty"),
    Member::optional(
        "rd_latency_histogram",
        Reply::Object(HISTOGRAM),
        "latencies of reads, while block-latency-histogram-set asks for them",
    ),
    Member::optional(
        "wr_latency_histogram",
        Reply::Object(HISTOGRAM),
        "latencies of writes, while block-latency-histogram-set asks for them",
    ),
    Member::optional(
        "flush_latency_histogram",
        Reply::Object(HISTOGRAM),
        "latencies of flushes, while block-latency-histogram-set asks for them",
    ),
];

static TIMED_STATS: &[Member] =
    &[Member::new("interval_length", Reply::Int, "what it is of, seconds")];

static HISTOGRAM: &[Member] = &[
    Member::new("boundaries", Reply::List(&Reply::Int), "nanoseconds, rising"),
    Member::new(
        "bins",
        Reply::List(&Reply::Int),
        "requests below each boundary that are in no bin before, and those beyond the last",
    ),
];

static EXPORT_STATS: &[Member] = &[
    Member::new("id", Reply::Text, "the export's name"),
    Member::new("type", Reply::Text, "its type"),
    Member::new("nodes", Reply::List(&Reply::Text), "the nodes that it offers"),
    Member::new("connected", Reply::Bool, "a client is connected"),
    Member::new("queues", Reply::List(&Reply::Object(QUEUE_STATS)), "its request queues"),
];

static QUEUE_STATS: &[Member] = &[
    Member::new("queue", Reply::Int, "its number; over NBD that of the thread"),
    Member::new("iothread", Reply::Text, "the I/O thread that serves it"),
    Member::new("in-flight", Reply::Int, "requests taken and not answered yet"),
    Member::new("batches", Reply::Int, "batches of answers"),
    Member::new("signals", Reply::Int, "signals sent to the guest"),
    Member::new("requests", Reply::List(&Reply::Object(REQUEST_STATS)), "one for each operation"),
];

static REQUEST_STATS: &[Member] = &[
    Member::new(
        "operation",
        Reply::Word(&["read", "write", "flush", "discard", "write-zeroes", "other"]),
        "what was asked for",
    ),
    Member::new("done", Reply::Int, "requests carried out"),
    Member::new("failed", Reply::Int, "requests that failed"),
    Member::new("invalid", Reply::Int, "requests refused without an attempt"),
    Member::new("bytes", Reply::Int, "bytes of those carried out"),
    Member::new("total-ns", Reply::Int, "time that they and the failed ones took, nanoseconds"),
    Member::new(
        "latencies",
        Reply::List(&Reply::Object(LATENCY)),
        "how many took how long, without those ranges that none fell into",
    ),
];

static LATENCY: &[Member] = &[
    Member::new("begin-ns", Reply::Int, "the shortest latency of the range, nanoseconds"),
    Member::optional("end-ns", Reply::Int, "where the range ends, not included; none: it does not"),
    Member::new("count", Reply::Int, "requests that took so long"),
];

static THREAD_STATS: &[Member] = &[
    Member::new("id", Reply::Text, "its name"),
    Member::new("thread-id", Reply::Int, "its number in the system"),
    Member::optional("cpu-ns", Reply::Int, "CPU time it has taken, nanoseconds"),
    Member::new("poll-max-ns", Reply::Int, "the longest that the poll window may be, nanoseconds"),
    Member::new("poll-window-ns", Reply::Int, "how long it polls before it sleeps, as it is now"),
    Member::new("polled-ns", Reply::Int, "time spent in busy polls, nanoseconds"),
    Member::new("polls-succeeded", Reply::Int, "busy polls that found something"),
    Member::new("polls-failed", Reply::Int, "busy polls that found nothing"),
    Member::new("iterations", Reply::Int, "iterations of its event loop"),
    Member::new("enters", Reply::Int, "calls of io_uring_enter, or of epoll_pwait2"),
    Member::new("aio-submits", Reply::Int, "calls of io_submit, of Linux AIO"),
    Member::new("sleeps", Reply::Int, "calls that could sleep"),
    Member::new("sleeps-called-off", Reply::Int, "sleeps that something came in between of"),
    Member::new("wakeups", Reply::Int, "times that another thread had to wake it"),
    Member::new("submitted", Reply::Int, "operations submitted to the kernel"),
    Member::new("completed", Reply::Int, "operations that the kernel has completed"),
];
