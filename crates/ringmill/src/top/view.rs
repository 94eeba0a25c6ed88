//! How a view looks: two tables.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row, Table};

use super::sample::{Turns, View, Work};

/// Columns that all of it takes.
pub(crate) const WIDTH: u16 = 112;

const EXPORTS: [&str; 11] = [
    "EXPORT", "TYPE", "REQ/S", "MIB/S", "P50 US", "P99 US", "P99.9 US", "DEPTH", "NOW", "BATCH",
    "ERR/S",
];
const THREADS: [&str; 8] = [
    "I/O THREAD",
    "CPU %",
    "POLLED %",
    "WINDOW US",
    "POLL OK %",
    "WAKE-UPS/S",
    "ITER/S",
    "ENTERS/S",
];

/// Lines that a view takes.
pub(crate) fn height(view: &View) -> u16 {
    let exports: usize = view.exports.iter().map(|export| 1 + export.queues.len()).sum();
    // Head, two headings, a line between the tables.
    u16::try_from(exports + view.threads.len() + 4).unwrap_or(u16::MAX)
}

/// Draws it. `head` is the first line.
pub(crate) fn draw(frame: &mut Frame<'_>, head: &str, view: &View) {
    let exports: usize = view.exports.iter().map(|export| 1 + export.queues.len()).sum();
    let [head_area, export_area, _, thread_area] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(u16::try_from(exports + 1).unwrap_or(u16::MAX)),
        Constraint::Length(1),
        Constraint::Min(view.threads.len() as u16 + 1),
    ])
    .areas(frame.area());
    frame.render_widget(Line::from(head), head_area);
    let rows = view.exports.iter().flat_map(|export| {
        let own = work(export, export.name.clone(), export.connected);
        let queues =
            export.queues.iter().map(|queue| work(queue, format!("  {}", queue.name), true));
        std::iter::once(own).chain(queues)
    });
    let widths = [20, 15, 9, 9, 9, 9, 9, 7, 5, 6, 6].map(Constraint::Length);
    frame.render_widget(Table::new(rows, widths).header(heading(&EXPORTS, 2)), export_area);
    let widths = [20, 7, 9, 10, 10, 11, 10, 10].map(Constraint::Length);
    let rows = view.threads.iter().map(turns);
    frame.render_widget(Table::new(rows, widths).header(heading(&THREADS, 1)), thread_area);
}

/// The first `left` columns are words.
fn heading(names: &[&'static str], left: usize) -> Row<'static> {
    let cell = |(place, name): (usize, &&'static str)| match place < left {
        true => Cell::from(*name),
        false => right((*name).to_owned()),
    };
    let cells = names.iter().enumerate().map(cell);
    Row::new(cells.collect::<Vec<_>>()).style(Style::new().add_modifier(Modifier::REVERSED))
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).right_aligned())
}

/// Of an export that nobody uses, in a lower voice.
fn work(work: &Work, name: String, in_use: bool) -> Row<'static> {
    let micros = |ns: Option<f64>| ns.map_or("-".to_owned(), |ns| short(ns / 1e3));
    let [p50, p99, p999] = work.percentiles.map(micros);
    let mut cells = vec![Cell::from(name), Cell::from(work.kind.clone())];
    let numbers = [
        short(work.requests),
        short(work.bytes / f64::from(1 << 20)),
        p50,
        p99,
        p999,
        short(work.depth),
        work.in_flight.to_string(),
        work.batch.map_or("-".to_owned(), short),
        short(work.errors),
    ];
    cells.extend(numbers.map(right));
    let dim = if in_use { Modifier::empty() } else { Modifier::DIM };
    Row::new(cells).style(Style::new().add_modifier(dim))
}

fn turns(turns: &Turns) -> Row<'static> {
    let percent = |part: f64| format!("{:.1}", part * 100.0);
    let mut cells = vec![Cell::from(turns.id.clone())];
    let numbers = [
        percent(turns.cpu),
        percent(turns.polled),
        short(turns.window_ns as f64 / 1e3),
        turns.success.map_or("-".to_owned(), percent),
        short(turns.wakeups),
        short(turns.iterations),
        short(turns.enters),
    ];
    cells.extend(numbers.map(right));
    Row::new(cells)
}

/// A number of three digits or more.
fn short(number: f64) -> String {
    match number {
        0.0 => "0".to_owned(),
        n if n < 10.0 => format!("{n:.2}"),
        n if n < 100.0 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use control::TopSort;
    use serde_json::json;

    use super::super::batch;
    use super::super::sample::Sample;

    #[test]
    fn a_view_is_drawn_with_its_queues_and_threads() {
        let queue = |n: u64| {
            json!({"queue": n, "iothread": format!("io{n}"), "in-flight": n, "batches": 500,
                   "requests": [{"operation": "write", "done": 1000, "failed": 0, "invalid": 3,
                                 "bytes": 4_194_304, "total-ns": 2_000_000_000u64,
                                 "latencies": [{"begin-ns": 2048, "end-ns": 4096, "count": 1003}]}]})
        };
        let exports = json!([
            {"id": "disk", "type": "vhost-user-blk", "connected": true, "queues": [queue(0), queue(1)]},
            {"id": "idle", "type": "nbd", "connected": false, "queues": []},
        ]);
        let threads = json!([{"id": "io0", "cpu-ns": 250_000_000, "poll-window-ns": 32768,
                              "polls-succeeded": 1, "polls-failed": 1, "wakeups": 12}]);
        let sample = Sample::read(&exports, &threads);
        let view = sample.since(&Sample::default(), 1.0, TopSort::Order);
        let text = batch("a daemon", &view);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["a", "daemon"]);
        let disk = ["disk", "vhost-user-blk", "2000", "8.00", "3.07", "4.08", "4.09", "4.00"];
        assert_eq!(lines[2], [disk.as_slice(), &["1", "2.01", "6.00"]].concat());
        let queue = ["1", "on", "io1", "1000", "4.00", "3.07", "4.08", "4.09", "2.00"];
        assert_eq!(lines[4], [queue.as_slice(), &["1", "2.01", "3.00"]].concat());
        assert_eq!(lines[5], ["idle", "nbd", "0", "0", "-", "-", "-", "0", "0", "-", "0"]);
        assert_eq!(lines[6], [""; 0]);
        assert_eq!(lines[8], ["io0", "25.0", "0.0", "32.8", "50.0", "12.0", "0", "0"]);
        assert_eq!(lines.len(), 9, "{text}");
    }
}
