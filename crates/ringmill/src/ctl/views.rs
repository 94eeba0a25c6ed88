//! Formats answers for people.

use control::command_list;
use serde_json::{Map, Value as Json, json};

use super::table::{Cell, Table, printable};

/// A column: its heading, where its value lies in an item, and how it is written.
struct Column {
    heading: &'static str,
    path: &'static str,
    unit: Unit,
}

/// How a value is written.
#[derive(Clone, Copy)]
enum Unit {
    Plain,
    /// A number of bytes.
    Bytes,
    /// A number of nanoseconds.
    Nanoseconds,
}

const fn column(heading: &'static str, path: &'static str) -> Column {
    Column { heading, path, unit: Unit::Plain }
}

const fn bytes(heading: &'static str, path: &'static str) -> Column {
    Column { heading, path, unit: Unit::Bytes }
}

const fn time(heading: &'static str, path: &'static str) -> Column {
    Column { heading, path, unit: Unit::Nanoseconds }
}

/// The columns for the answer of each command.
static VIEWS: &[(&str, &[Column])] = &[
    (
        "query-named-block-nodes",
        &[
            column("node", "node-name"),
            column("driver", "drv"),
            bytes("size", "image.virtual-size"),
            bytes("used", "image.actual-size"),
            column("read-only", "ro"),
            column("active", "active"),
            column("direct", "cache.direct"),
            column("image", "file"),
        ],
    ),
    (
        "query-block-exports",
        &[
            column("export", "id"),
            column("type", "type"),
            column("node", "node-name"),
            column("luns", "luns"),
            column("device", "device"),
            column("io-status", "io-status"),
            column("ending", "shutting-down"),
        ],
    ),
    (
        "query-iothreads",
        &[
            column("thread", "id"),
            column("tid", "thread-id"),
            time("poll-max", "poll-max-ns"),
            column("grow", "poll-grow"),
            column("shrink", "poll-shrink"),
            column("weight", "poll-weight"),
            column("batch", "aio-max-batch"),
        ],
    ),
    (
        "query-jobs",
        &[
            column("job", "id"),
            column("type", "type"),
            column("status", "status"),
            bytes("done", "current-progress"),
            bytes("of", "total-progress"),
            column("error", "error"),
        ],
    ),
    (
        "query-block-jobs",
        &[
            column("job", "device"),
            column("type", "type"),
            column("status", "status"),
            bytes("done", "offset"),
            bytes("of", "len"),
            bytes("per-second", "speed"),
            column("paused", "paused"),
            column("ready", "ready"),
            column("io-status", "io-status"),
            column("error", "error"),
        ],
    ),
    (
        "query-blockstats",
        &[
            column("node", "node-name"),
            column("device", "device"),
            column("qdev", "qdev"),
            column("reads", "stats.rd_operations"),
            bytes("read", "stats.rd_bytes"),
            time("read-time", "stats.rd_total_time_ns"),
            column("writes", "stats.wr_operations"),
            bytes("written", "stats.wr_bytes"),
            time("write-time", "stats.wr_total_time_ns"),
            column("flushes", "stats.flush_operations"),
            column("read-errors", "stats.failed_rd_operations"),
            column("write-errors", "stats.failed_wr_operations"),
        ],
    ),
    ("qom-list", &[column("name", "name"), column("type", "type")]),
    (
        // One row per queue: see `queues`.
        "x-query-export-stats",
        &[
            column("export", "id"),
            column("connected", "connected"),
            column("queue", "queue"),
            column("thread", "iothread"),
            column("in-flight", "in-flight"),
            column("reads", "read.done"),
            bytes("read", "read.bytes"),
            column("writes", "write.done"),
            bytes("written", "write.bytes"),
            column("flushes", "flush.done"),
            column("discards", "discard.done"),
            column("zeroes", "write-zeroes.done"),
            column("failed", "failed"),
            column("invalid", "invalid"),
        ],
    ),
    (
        "x-query-iothread-stats",
        &[
            column("thread", "id"),
            column("tid", "thread-id"),
            time("cpu", "cpu-ns"),
            time("polled", "polled-ns"),
            time("window", "poll-window-ns"),
            column("iterations", "iterations"),
            column("enters", "enters"),
            column("sleeps", "sleeps"),
            column("wakeups", "wakeups"),
            column("submitted", "submitted"),
            column("completed", "completed"),
        ],
    ),
];

/// Returns one item per queue from the answer of `x-query-export-stats`. An item has its export's members, the
/// counters of each operation under the operation's name, and the sums of errors. An export without queues has
/// one item.
fn queues(exports: &[Json]) -> Vec<Json> {
    let of_export = |export: &Json| -> Vec<Json> {
        let own = json!({"id": export["id"], "connected": export["connected"]});
        let queues = export["queues"].as_array().map_or(&[][..], Vec::as_slice);
        let with_export = |queue: &Json| {
            let mut item = own.clone();
            for name in ["queue", "iothread", "in-flight"] {
                item[name] = queue[name].clone();
            }
            let (mut failed, mut invalid) = (0u64, 0u64);
            for counters in queue["requests"].as_array().into_iter().flatten() {
                failed = failed.saturating_add(counters["failed"].as_u64().unwrap_or(0));
                invalid = invalid.saturating_add(counters["invalid"].as_u64().unwrap_or(0));
                if let Some(operation) = counters["operation"].as_str() {
                    item[operation] = counters.clone();
                }
            }
            item["failed"] = failed.into();
            item["invalid"] = invalid.into();
            item
        };
        if queues.is_empty() { vec![own] } else { queues.iter().map(with_export).collect() }
    };
    exports.iter().flat_map(of_export).collect()
}

/// Returns the answer of a command as text; empty for an empty answer.
pub(super) fn show(command: &str, answer: &Json) -> String {
    let view = VIEWS.iter().find(|(name, _)| *name == command);
    match (answer, view) {
        (Json::Array(commands), _) if command == "query-commands" => {
            let names = commands.iter().filter_map(|command| command["name"].as_str());
            let mut names: Vec<String> = names.map(printable).collect();
            names.sort_unstable();
            command_list(names.iter().map(String::as_str)) + "\n"
        }
        // Types do not fit a table.
        (answer, _) if command == "query-qmp-schema" => format!("{answer:#}\n"),
        (Json::Array(items), Some((_, columns))) if command == "x-query-export-stats" => {
            known(columns, &queues(items)).render()
        }
        // An empty list is shown as a heading without rows.
        (Json::Array(items), Some((_, columns))) => known(columns, items).render(),
        (answer, _) => show_any(answer),
    }
}

/// Shows an answer that has no table in [`VIEWS`].
fn show_any(answer: &Json) -> String {
    match answer {
        Json::Null => String::new(),
        Json::Array(items) if items.iter().any(Json::is_object) => any(items).render(),
        Json::Array(items) => items.iter().map(|item| line(&Cell::of(item))).collect(),
        Json::Object(members) => {
            let mut table = Table::plain();
            for (name, value) in flat(members) {
                table.row(vec![Cell::text(name), Cell::text(plain(&value))]);
            }
            table.render()
        }
        other => line(&Cell::of(other)),
    }
}

fn line(cell: &Cell) -> String {
    let mut table = Table::plain();
    table.row(vec![cell.clone()]);
    table.render()
}

fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Bool(on) => (if *on { "yes" } else { "no" }).to_owned(),
        other => other.to_string(),
    }
}

/// Returns a table of known columns. Columns without values are left out, unless `items` is empty.
fn known(columns: &[Column], items: &[Json]) -> Table {
    let at = |item: &Json, path: &str| -> Json {
        path.split('.').fold(item.clone(), |value, name| value[name].clone())
    };
    let said: Vec<&Column> = columns
        .iter()
        .filter(|column| {
            items.is_empty() || items.iter().any(|item| !at(item, column.path).is_null())
        })
        .collect();
    let headings: Vec<&str> = said.iter().map(|column| column.heading).collect();
    let mut table = Table::new(&headings);
    for item in items {
        let cell = |column: &&Column| match (column.unit, at(item, column.path)) {
            (Unit::Bytes, Json::Number(number)) => Cell::number(sized(&number, 1024, BYTES)),
            (Unit::Nanoseconds, Json::Number(number)) => Cell::number(sized(&number, 1000, TIME)),
            (_, value) => Cell::of(&value),
        };
        table.row(said.iter().map(cell).collect());
    }
    table
}

const BYTES: &[&str] = &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const TIME: &[&str] = &["ns", "us", "ms", "s"];

/// A number in the largest unit that does not exceed it. Inexact values have one decimal.
fn sized(number: &serde_json::Number, step: u64, units: &[&str]) -> String {
    let Some(whole) = number.as_u64() else { return number.to_string() };
    let (mut unit, mut size) = (0, 1u64);
    while unit + 1 < units.len() && whole / size >= step {
        size *= step;
        unit += 1;
    }
    let name = units.get(unit).copied().unwrap_or_default();
    match whole % size {
        0 => format!("{} {name}", whole / size),
        rest => format!("{}.{} {name}", whole / size, u128::from(rest) * 10 / u128::from(size)),
    }
}

/// Returns a table of all scalars of the items, for an answer without known columns.
fn any(items: &[Json]) -> Table {
    let rows: Vec<Vec<(String, Json)>> =
        items.iter().map(|item| item.as_object().map(flat).unwrap_or_default()).collect();
    let mut headings: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flatten() {
        if !headings.contains(&name.as_str()) {
            headings.push(name);
        }
    }
    let mut table = Table::new(&headings);
    for row in &rows {
        let of = |heading: &&str| {
            let found = row.iter().find(|(name, _)| name == heading);
            found.map_or_else(|| Cell::text("-"), |(_, value)| Cell::of(value))
        };
        table.row(headings.iter().map(of).collect());
    }
    table
}

/// Flattens nested objects: their members get dotted names.
fn flat(members: &Map<String, Json>) -> Vec<(String, Json)> {
    let mut all = Vec::new();
    for (name, value) in members {
        match value {
            Json::Object(below) if !below.is_empty() => {
                all.extend(
                    flat(below)
                        .into_iter()
                        .map(|(below, value)| (format!("{name}.{below}"), value)),
                );
            }
            other => all.push((name.clone(), other.clone())),
        }
    }
    all
}

/// An event in one line: time, name and data.
pub(super) fn event(event: &Json) -> String {
    let seconds = event["timestamp"]["seconds"].as_i64().unwrap_or(0);
    let microseconds = event["timestamp"]["microseconds"].as_i64().unwrap_or(0);
    let name = plain(&event["event"]);
    let mut text = format!("{seconds}.{microseconds:06} {name}");
    if let Some(data) = event["data"].as_object() {
        for (name, value) in flat(data) {
            text.push_str(&format!(" {name}={}", plain(&value)));
        }
    }
    printable(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_have_units() {
        let number = |n: u64| serde_json::Number::from(n);
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(sized(&number(bytes), 1024, BYTES), text);
        }
        assert_eq!(sized(&number(32_768), 1000, TIME), "32.7 us");
        assert_eq!(sized(&number(3_600_000_000_000), 1000, TIME), "3600 s");
    }

    #[test]
    fn answers_of_any_shape_are_shown() {
        assert_eq!(show("quit", &json!({})), "");
        assert_eq!(show("qom-get", &json!(32768)), "32768\n");
        let version = json!({"qemu": {"major": 11, "minor": 1}, "package": "x"});
        assert_eq!(
            show("query-version", &version),
            "qemu.major  11\nqemu.minor  1\npackage     x\n"
        );
        let list = json!([{"a": 1, "b": {"c": "x"}}, {"a": 22, "d": null}]);
        assert_eq!(show("any", &list), " A  B.C  D\n 1  x    -\n22  -    -\n");
        let nbd = json!({"id": "e0", "type": "nbd", "node-name": "n", "shutting-down": false});
        let expected = "EXPORT  TYPE  NODE  ENDING\ne0      nbd   n     no\n";
        assert_eq!(show("query-block-exports", &json!([nbd])), expected);
        let scsi = json!({
            "id": "e1", "type": "vhost-user-scsi", "node-name": "a", "luns": ["a", "b"],
            "io-status": "nospace", "shutting-down": false,
        });
        let expected = "EXPORT  TYPE             NODE  LUNS  IO-STATUS  ENDING\n\
                        e0      nbd              n     -     -          no\n\
                        e1      vhost-user-scsi  a     a,b   nospace    no\n";
        assert_eq!(show("query-block-exports", &json!([nbd, scsi])), expected);
        let ublk = json!({"id": "e2", "type": "ublk", "node-name": "n", "device": "/dev/ublkb0"});
        let expected = "EXPORT  TYPE  NODE  DEVICE\ne2      ublk  n     /dev/ublkb0\n";
        assert_eq!(show("query-block-exports", &json!([ublk])), expected);
        // An empty list is shown as a heading if the columns are known.
        let heading = "EXPORT  TYPE  NODE  LUNS  DEVICE  IO-STATUS  ENDING\n";
        assert_eq!(show("query-block-exports", &json!([])), heading);
        assert_eq!(show("query-of-another-daemon", &json!([])), "");
    }

    #[test]
    fn statistics_have_a_row_for_each_queue() {
        let counters = |operation, done| {
            json!({"operation": operation, "done": done, "failed": 2, "invalid": 1,
                   "bytes": done * 1024, "total-ns": 5, "latencies": []})
        };
        let queue = |n| {
            json!({"queue": n, "iothread": "io", "in-flight": n, "batches": 1, "signals": 1,
                   "requests": [counters("read", 4), counters("write", 3)]})
        };
        let exports = json!([
            {"id": "e0", "type": "nbd", "nodes": ["n"], "connected": true,
             "queues": [queue(0), queue(1)]},
            {"id": "e1", "type": "nbd", "nodes": ["n"], "connected": false, "queues": []},
        ]);
        let table = show("x-query-export-stats", &exports);
        let rows: Vec<Vec<&str>> =
            table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0][..4], ["EXPORT", "CONNECTED", "QUEUE", "THREAD"], "{table}");
        let second = ["e0", "yes", "1", "io", "1", "4", "4", "KiB", "3", "3", "KiB", "4", "2"];
        assert_eq!(rows[2], second, "{table}");
        assert_eq!(rows[3][..3], ["e1", "no", "-"], "{table}");
    }

    #[test]
    fn events_are_lines() {
        let deleted = json!({
            "timestamp": {"seconds": 5, "microseconds": 7},
            "event": "BLOCK_EXPORT_DELETED",
            "data": {"id": "e\n0"},
        });
        assert_eq!(event(&deleted), "5.000007 BLOCK_EXPORT_DELETED id=e\\n0");
    }
}
