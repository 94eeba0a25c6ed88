//! `query-blockstats`.

use block::NodeRegistry;
use control::qmp::{Member, Reply, Returns};
use options::table::{Field, Row, put};
use serde_json::{Value as Json, json};
use stats::{Bins, Kind as Operation, KindNumbers, QueueNumbers};

use super::super::Command;
use crate::statistics::{ExportStatistics, Statistics};

pub(super) static COMMAND: Command<Arguments, Json> = Command {
    name: "query-blockstats",
    help: "return statistics of each export, or of each node",
    example: r#"{"query-nodes": true}"#,
    arguments: ARGUMENTS,
    returns: Returns::Data("one for each", Reply::List(&Reply::Object(BLOCK_STATS))),
    records: false,
    run: |daemon, Arguments { query_nodes }| {
        Box::pin(async move {
            let statistics = daemon.statistics();
            Ok(match query_nodes {
                true => of_nodes(&statistics, &daemon.nodes),
                false => of_exports(&statistics, &daemon.nodes),
            })
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    query_nodes: bool,
}

static ARGUMENTS: &[Field<Arguments>] =
    &[Row::default("query-nodes", "off", "statistics of nodes instead of exports")
        .bool(|to, on| put(&mut to.query_nodes, on))];

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
    Member::new(
        "wr_highest_offset",
        Reply::Int,
        "end of the highest write since opening, bytes; always 0 but for file, host_device and raw",
    ),
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

/// Statistics of exports, which are devices in QEMU.
fn of_exports(all: &Statistics, nodes: &NodeRegistry) -> Json {
    let of = |export: &ExportStatistics| {
        let mut stats = device_stats(&export.total(), all.now_ns);
        let node = export.nodes.first();
        stats["wr_highest_offset"] = node.map_or(0, |node| highest_write(nodes, node)).into();
        json!({"device": "", "qdev": export.id, "node-name": node, "stats": stats})
    };
    all.exports.iter().map(of).collect()
}

/// Statistics of nodes: the sum over the exports of each. A target with several logical units is left out: its requests
/// are not counted by unit.
fn of_nodes(all: &Statistics, nodes: &NodeRegistry) -> Json {
    let of = |name: &str| {
        let mut total = QueueNumbers::default();
        for export in all.exports.iter().filter(|export| export.nodes == [name]) {
            total.add(&export.total());
        }
        let mut stats = device_stats(&total, all.now_ns);
        stats["wr_highest_offset"] = highest_write(nodes, name).into();
        json!({"node-name": name, "stats": stats})
    };
    nodes.names().map(of).collect()
}

fn highest_write(nodes: &NodeRegistry, name: &str) -> u64 {
    nodes.node(name).map_or(0, |node| node.highest_write())
}

/// QEMU's `BlockDeviceStats`. Writes of zeroes count as writes there.
fn device_stats(all: &QueueNumbers, now_ns: u64) -> Json {
    let mut write = all.kind(Operation::Write).clone();
    write.add(all.kind(Operation::WriteZeroes));
    let none = KindNumbers::default();
    let (read, flush) = (all.kind(Operation::Read), all.kind(Operation::Flush));
    let kinds = [
        ("rd", read),
        ("wr", &write),
        ("unmap", all.kind(Operation::Discard)),
        ("flush", flush),
        ("zone_append", &none),
    ];
    let mut stats = json!({
        "account_invalid": true,
        "account_failed": true,
        "timed_stats": [],
    });
    for (name, numbers) in kinds {
        stats[format!("{name}_operations")] = numbers.done.into();
        stats[format!("{name}_total_time_ns")] = numbers.total_ns.into();
        stats[format!("failed_{name}_operations")] = numbers.failed.into();
        stats[format!("invalid_{name}_operations")] = numbers.invalid.into();
        if name != "flush" {
            stats[format!("{name}_bytes")] = numbers.bytes.into();
            stats[format!("{name}_merged")] = 0.into();
        }
    }
    if all.answered_at_ns > 0 {
        stats["idle_time_ns"] = now_ns.saturating_sub(all.answered_at_ns).into();
    }
    for (name, numbers) in [("rd", read), ("wr", &write), ("flush", flush)] {
        if let Some(Bins { boundaries, counts }) = &numbers.bins {
            let histogram = json!({"boundaries": boundaries, "bins": counts});
            stats[format!("{name}_latency_histogram")] = histogram;
        }
    }
    stats
}
