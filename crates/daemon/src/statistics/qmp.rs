//! Statistics as QMP tells them.

use control::qmp::{LatencyBoundaries, QmpError};
use event_loop::Latencies;
use serde_json::{Value as Json, json};
use stats::{Bins, Kind, KindNumbers, QueueNumbers};

use super::{ExportStatistics, QueueStatistics, Statistics, ThreadStatistics};

/// `query-blockstats` of exports: QEMU tells of devices, which these are.
pub(crate) fn of_exports(all: &Statistics) -> Json {
    let of = |export: &ExportStatistics| {
        let stats = device_stats(&export.total(), all.now_ns);
        let node = export.nodes.first();
        json!({"device": "", "qdev": export.id, "node-name": node, "stats": stats})
    };
    all.exports.iter().map(of).collect()
}

/// `query-blockstats` of nodes: what the exports of each have done. Of a target with several logical
/// units it is not known which of them a request was for.
pub(crate) fn of_nodes<'a>(all: &Statistics, nodes: impl Iterator<Item = &'a str>) -> Json {
    let of = |name: &'a str| {
        let mut total = QueueNumbers::default();
        for export in all.exports.iter().filter(|export| export.nodes == [name]) {
            total.add(&export.total());
        }
        json!({"node-name": name, "stats": device_stats(&total, all.now_ns)})
    };
    nodes.map(of).collect()
}

/// QEMU's `BlockDeviceStats`. Writes of zeroes count as writes there.
fn device_stats(all: &QueueNumbers, now_ns: u64) -> Json {
    let mut write = all.kind(Kind::Write).clone();
    write.add(all.kind(Kind::WriteZeroes));
    let none = KindNumbers::default();
    let (read, flush) = (all.kind(Kind::Read), all.kind(Kind::Flush));
    let kinds = [
        ("rd", read),
        ("wr", &write),
        ("unmap", all.kind(Kind::Discard)),
        ("flush", flush),
        ("zone_append", &none),
    ];
    let mut stats = json!({
        "wr_highest_offset": 0,
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

/// `x-query-export-stats`.
pub(crate) fn export(export: &ExportStatistics) -> Json {
    json!({
        "id": export.id,
        "type": export.kind,
        "nodes": export.nodes,
        "connected": export.connected,
        "queues": export.queues.iter().map(queue).collect::<Json>(),
    })
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

/// `x-query-iothread-stats`.
pub(crate) fn thread(thread: &ThreadStatistics) -> Json {
    let stats = thread.handle.stats();
    let mut told = json!({
        "id": thread.id,
        "thread-id": thread.tid.as_raw(),
        "poll-max-ns": thread.poll_max_ns,
        "poll-window-ns": stats.poll_window_ns.get(),
        "polled-ns": stats.polled_ns.get(),
        "polls-succeeded": stats.poll_hits.get(),
        "polls-failed": stats.poll_misses.get(),
        "iterations": stats.iterations.get(),
        "enters": stats.enters.get(),
        "aio-submits": stats.aio_submits.get(),
        "sleeps": stats.sleeps.get(),
        "sleeps-called-off": stats.sleeps_called_off.get(),
        "wakeups": stats.wakes.get(),
        "submitted": stats.submitted.get(),
        "completed": stats.completed.get(),
    });
    if let Some(cpu_ns) = thread.cpu_ns {
        told["cpu-ns"] = cpu_ns.into();
    }
    told
}

/// Boundaries that latencies are counted by, nanoseconds and rising; `None`: they are not.
pub(crate) type Boundaries = Option<Vec<u64>>;

/// The boundaries that `block-latency-histogram-set` asks for on the device `id`, by kind; of kinds
/// that are left out nothing changes.
///
/// # Errors
///
/// QEMU's words: boundaries rise, the first is above 0, and there is one.
pub(crate) fn boundaries(
    id: &str,
    asked: Option<LatencyBoundaries>,
) -> Result<Vec<(Kind, Boundaries)>, QmpError> {
    let kinds = [Kind::Read, Kind::Write, Kind::Flush];
    let Some(LatencyBoundaries { read, write, flush }) = asked else {
        return Ok(kinds.map(|kind| (kind, None)).to_vec());
    };
    let mut set = Vec::new();
    for (kind, list) in kinds.into_iter().zip([read, write, flush]) {
        let Some(list) = list else { continue };
        let rises = list.windows(2).all(|pair| pair.first() < pair.last());
        if !rises || list.first().is_none_or(|first| *first == 0) {
            let kind = kind.name();
            return Err(QmpError::generic(format!("Device '{id}' set {kind} boundaries fail")));
        }
        set.push((kind, Some(list)));
    }
    Ok(set)
}
