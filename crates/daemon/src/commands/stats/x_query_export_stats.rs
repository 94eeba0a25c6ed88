//! `x-query-export-stats`.

use block::policy::IoStatus;
use control::qmp::{Member, Reply, Returns};
use event_loop::Latencies;
use serde_json::{Value as Json, json};
use stats::{Kind, KindNumbers};

use super::super::Command;
use crate::statistics::{ExportStatistics, QueueStatistics};

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "x-query-export-stats",
    help: "return statistics of each queue of each export",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each export", Reply::List(&Reply::Object(EXPORT_STATS))),
    records: false,
    run: |daemon, ()| {
        Box::pin(async {
            Ok(daemon.exports.statistics(&daemon.inventory).iter().map(export).collect())
        })
    },
};

static EXPORT_STATS: &[Member] = &[
    Member::new("id", Reply::Text, "the export's name"),
    Member::new("type", Reply::Text, "its type"),
    Member::new("nodes", Reply::List(&Reply::Text), "the nodes that it offers"),
    Member::new("connected", Reply::Bool, "a client is connected"),
    Member::new(
        "io-status",
        Reply::Word(&["ok", "failed", "nospace"]),
        "whether an error has stopped the export, and which",
    ),
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

fn export(export: &ExportStatistics) -> Json {
    json!({
        "id": export.id,
        "type": export.kind,
        "nodes": export.nodes,
        "connected": export.connected,
        "io-status": io_status(export.io_status),
        "queues": export.queues.iter().map(queue).collect::<Json>(),
    })
}

fn io_status(status: IoStatus) -> &'static str {
    match status {
        IoStatus::Ok => "ok",
        IoStatus::Failed => "failed",
        IoStatus::NoSpace => "nospace",
    }
}

fn queue(queue: &QueueStatistics) -> Json {
    let QueueStatistics { number, iothread, numbers } = queue;
    json!({
        "queue": number,
        "iothread": iothread,
        "in-flight": numbers.in_flight(),
        "batches": numbers.batches,
        "signals": numbers.signals,
        "requests": Kind::ALL.map(|kind| requests(kind, numbers.kind(kind))),
    })
}

fn requests(kind: Kind, numbers: &KindNumbers) -> Json {
    json!({
        "operation": kind.name(),
        "done": numbers.done,
        "failed": numbers.failed,
        "invalid": numbers.invalid,
        "bytes": numbers.bytes,
        "total-ns": numbers.total_ns,
        "latencies": latencies(&numbers.latencies),
    })
}

fn latencies(latencies: &Latencies) -> Json {
    let range = |(begin, end, count): (u64, u64, u64)| match end {
        u64::MAX => json!({"begin-ns": begin, "count": count}),
        _ => json!({"begin-ns": begin, "end-ns": end, "count": count}),
    };
    latencies.buckets().map(range).collect()
}
