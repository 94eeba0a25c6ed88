//! Drawing of views: a table of exports above a table of I/O threads. Both can be scrolled.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row, Table};

use super::columns::{self, Column, Fitted, numbers, shortened, words};
use super::sample::{Turns, View, Work};

const EXPORTS: &[Column] = &[
    words("TYPE", 15, 9),
    words("STATE", 7, 0),
    numbers("REQ/S", 8, 0),
    numbers("MIB/S", 8, 1),
    numbers("P50 US", 8, 4),
    numbers("P99 US", 8, 2),
    numbers("P99.9 US", 8, 7),
    numbers("DEPTH", 6, 5),
    numbers("NOW", 5, 6),
    numbers("BATCH", 6, 8),
    numbers("ERR/S", 6, 3),
];
const THREADS: &[Column] = &[
    numbers("CPU %", 7, 0),
    numbers("POLLED %", 9, 2),
    numbers("WINDOW US", 9, 4),
    numbers("POLL OK %", 9, 6),
    numbers("WAKE-UPS/S", 10, 3),
    numbers("ITER/S", 9, 5),
    numbers("ENTERS/S", 9, 7),
];

/// The visible part of a view on a terminal that is too small.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) exports: Part,
    pub(crate) threads: Part,
    /// The keys scroll the threads instead of the exports.
    pub(crate) on_threads: bool,
    /// Whether queues are shown; `None`: if there is room.
    pub(crate) queues: Option<bool>,
    /// Whether the last drawing had queues.
    shows_queues: bool,
}

/// The visible rows of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Part {
    first: usize,
    /// All rows, and visible rows, of the last drawing.
    rows: usize,
    shown: usize,
}

impl Part {
    /// Scrolls by `rows`; negative: up.
    pub(crate) fn scroll(&mut self, rows: isize) {
        self.first = self.first.saturating_add_signed(rows).min(self.last_first());
    }

    /// Scrolls by one row less than the visible ones.
    pub(crate) fn scroll_page(&mut self, down: bool) {
        let page = self.shown.saturating_sub(1).max(1).cast_signed();
        self.scroll(if down { page } else { -page });
    }

    pub(crate) fn scroll_home(&mut self) {
        self.first = 0;
    }

    pub(crate) fn scroll_end(&mut self) {
        self.first = self.last_first();
    }

    fn last_first(&self) -> usize {
        self.rows.saturating_sub(self.shown)
    }

    /// Returns the heading of names, with the range of visible rows if rows are hidden.
    fn heading(&self, name: &str) -> String {
        match self.shown < self.rows {
            true => format!("{name} {}-{}/{}", self.first + 1, self.first + self.shown, self.rows),
            false => name.to_owned(),
        }
    }

    fn set(&mut self, rows: usize, area: Rect) {
        self.rows = rows;
        // One line is the heading's.
        self.shown = rows.min(usize::from(area.height.saturating_sub(1)));
        self.scroll(0);
    }
}

impl Window {
    /// Returns the part that the keys scroll.
    pub(crate) fn part(&mut self) -> &mut Part {
        if self.on_threads { &mut self.threads } else { &mut self.exports }
    }

    /// Shows or hides the queues of exports.
    pub(crate) fn toggle_queues(&mut self) {
        self.queues = Some(!self.queues.unwrap_or(self.shows_queues));
    }

    /// Returns a window with all queues, for output as text.
    pub(crate) fn whole() -> Self {
        Window { queues: Some(true), ..Window::default() }
    }
}

fn small(rows: usize) -> u16 {
    u16::try_from(rows).unwrap_or(u16::MAX)
}

/// Returns the number of rows for exports and, if shown, their queues.
fn export_rows(view: &View, with_queues: bool) -> usize {
    let queues = |export: &Work| if with_queues { export.queues.len() } else { 0 };
    view.exports.iter().map(|export| 1 + queues(export)).sum()
}

/// Returns the width and height of a whole view, in characters and lines, without the line of keys.
pub(crate) fn size(view: &View) -> (u16, u16) {
    let exports = columns::full_width(EXPORTS, longest_export(view, true));
    let threads = columns::full_width(THREADS, longest_thread(view));
    // Head, two headings, a line between the tables.
    let height = export_rows(view, true) + view.threads.len() + 4;
    (exports.max(threads), small(height))
}

fn longest_export(view: &View, with_queues: bool) -> u16 {
    let queues = |export: &Work| match with_queues {
        true => export.queues.iter().map(|queue| queue.name.chars().count() + 2).max().unwrap_or(0),
        false => 0,
    };
    let names = view.exports.iter().map(|export| export.name.chars().count().max(queues(export)));
    small(names.max().unwrap_or(0)).clamp(LEAST_NAME, MOST_NAME)
}

fn longest_thread(view: &View) -> u16 {
    let names = view.threads.iter().map(|thread| thread.id.chars().count());
    small(names.max().unwrap_or(0)).clamp(LEAST_NAME, MOST_NAME)
}

/// Least width of names: the heading may have a range of rows.
const LEAST_NAME: u16 = 20;
const MOST_NAME: u16 = 400;

/// Draws a view: `head` first, and `keys` last unless empty. Updates `window` to the rows that fit.
pub(crate) fn draw(
    frame: &mut Frame<'_>,
    head: impl FnOnce(u16) -> String,
    keys: &str,
    view: &View,
    window: &mut Window,
) {
    let area = frame.area();
    let keys_height = u16::from(!keys.is_empty() && area.height > 3);
    let room = area.height.saturating_sub(1 + keys_height);
    let threads = small(view.threads.len()).saturating_add(1);
    let needed = |with_queues| small(export_rows(view, with_queues)).saturating_add(1);
    let fits = |exports: u16| exports.saturating_add(threads).saturating_add(1) <= room;
    let with_queues = window.queues.unwrap_or_else(|| fits(needed(true)));
    window.shows_queues = with_queues;
    let exports = needed(with_queues);
    let (exports, gap, threads) = if fits(exports) {
        (exports, 1, threads)
    } else {
        // Threads get up to a third of the lines, and lines that exports do not need.
        let kept = threads.min((room / 3).max(2));
        let exports = exports.min(room.saturating_sub(kept));
        (exports, 0, threads.min(room.saturating_sub(exports)))
    };
    let [head_area, export_area, _, thread_area, _, keys_area] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(exports),
        Constraint::Length(gap),
        Constraint::Length(threads),
        Constraint::Min(0),
        Constraint::Length(keys_height),
    ])
    .areas(area);
    frame.render_widget(Line::from(head(area.width)), head_area);
    frame.render_widget(Line::from(shortened(keys, area.width)), keys_area);

    let fitted = columns::fit(EXPORTS, longest_export(view, with_queues), area.width);
    let rows = view.exports.iter().flat_map(|export| {
        let own = (export, export.name.clone(), export.connected);
        let queues = export.queues.iter().filter(move |_| with_queues);
        let queues = queues.map(|queue| (queue, format!("  {}", queue.name), true));
        std::iter::once(own).chain(queues)
    });
    window.exports.set(export_rows(view, with_queues), export_area);
    let name = window.exports.heading("EXPORT");
    let rows = rows.skip(window.exports.first).take(window.exports.shown);
    let rows = rows.map(|(work, name, in_use)| {
        let dim = if in_use { Modifier::empty() } else { Modifier::DIM };
        row(name, cells_of_work(work), &fitted).style(Style::new().add_modifier(dim))
    });
    render(frame, export_area, &fitted, name, !window.on_threads, rows);

    let fitted = columns::fit(THREADS, longest_thread(view), area.width);
    window.threads.set(view.threads.len(), thread_area);
    let name = window.threads.heading("I/O THREAD");
    let rows = view.threads.iter().skip(window.threads.first).take(window.threads.shown);
    let rows = rows.map(|turns| row(turns.id.clone(), cells_of_turns(turns), &fitted));
    render(frame, thread_area, &fitted, name, window.on_threads, rows);
}

/// Draws a table. The table that the keys scroll has a bold heading.
fn render<'a>(
    frame: &mut Frame<'_>,
    area: Rect,
    fitted: &Fitted<'_>,
    name: String,
    is_scrolled: bool,
    rows: impl Iterator<Item = Row<'a>>,
) {
    let all = fitted.all;
    let widths = fitted.columns.iter().map(|&index| all[index].width);
    let widths = std::iter::once(fitted.name).chain(widths).map(Constraint::Length);
    let headings = all.iter().map(|column| column.heading.to_owned()).collect();
    let bold = if is_scrolled { Modifier::BOLD } else { Modifier::empty() };
    let style = Style::new().add_modifier(Modifier::REVERSED | bold);
    let heading = row(name, headings, fitted).style(style);
    frame.render_widget(Table::new(rows, widths).header(heading), area);
}

/// Returns a row with the cells of the columns that fit.
fn row(name: String, cells: Vec<String>, fitted: &Fitted<'_>) -> Row<'static> {
    let cell = |index: &usize| {
        let text = Text::from(cells.get(*index).cloned().unwrap_or_default());
        Cell::from(if fitted.all[*index].words { text } else { text.right_aligned() })
    };
    let name = Cell::from(shortened(&name, fitted.name));
    Row::new(std::iter::once(name).chain(fitted.columns.iter().map(cell)))
}

/// Returns the cells for the columns of [`EXPORTS`].
fn cells_of_work(work: &Work) -> Vec<String> {
    let micros = |ns: Option<f64>| ns.map_or("-".to_owned(), |ns| short(ns / 1e3));
    let [p50, p99, p999] = work.percentiles.map(micros);
    vec![
        work.kind.clone(),
        work.state.to_owned(),
        short(work.requests),
        short(work.bytes / f64::from(1 << 20)),
        p50,
        p99,
        p999,
        short(work.depth),
        work.in_flight.to_string(),
        work.batch.map_or("-".to_owned(), short),
        short(work.errors),
    ]
}

/// Returns the cells for the columns of [`THREADS`].
fn cells_of_turns(turns: &Turns) -> Vec<String> {
    let percent = |part: f64| format!("{:.1}", part * 100.0);
    vec![
        percent(turns.cpu),
        percent(turns.polled),
        short(turns.window_ns as f64 / 1e3),
        turns.success.map_or("-".to_owned(), percent),
        short(turns.wakeups),
        short(turns.iterations),
        short(turns.enters),
    ]
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

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::batch;
    use super::super::sample::Sample;
    use super::*;

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
            {"id": "full", "type": "nbd", "connected": false, "io-status": "nospace", "queues": []},
        ]);
        let threads = json!([{"id": "io0", "cpu-ns": 250_000_000, "poll-window-ns": 32768,
                              "polls-succeeded": 1, "polls-failed": 1, "wakeups": 12}]);
        let sample = Sample::read(&exports, &threads);
        let view = sample.since(&Sample::default(), 1.0, TopSort::Order);
        let text = batch(|_| "a daemon".to_owned(), &view);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["a", "daemon"]);
        let disk = ["disk", "vhost-user-blk", "ok", "2000", "8.00", "3.07", "4.08", "4.09", "4.00"];
        assert_eq!(lines[2], [disk.as_slice(), &["1", "2.01", "6.00"]].concat());
        let queue = ["1", "on", "io1", "1000", "4.00", "3.07", "4.08", "4.09", "2.00"];
        assert_eq!(lines[4], [queue.as_slice(), &["1", "2.01", "3.00"]].concat());
        assert_eq!(
            lines[5],
            ["idle", "nbd", "unused", "0", "0", "-", "-", "-", "0", "0", "-", "0"]
        );
        assert_eq!(lines[6][..3], ["full", "nbd", "nospace"]);
        assert_eq!(lines[7], [""; 0]);
        assert_eq!(lines[9], ["io0", "25.0", "0.0", "32.8", "50.0", "12.0", "0", "0"]);
        assert_eq!(lines.len(), 10, "{text}");
    }

    /// Returns a view of exports with long names, and threads.
    fn many(exports: usize, threads: usize) -> View {
        let export = |n: usize| {
            let queue = |q: u64| json!({"queue": q, "iothread": "io0", "requests": []});
            json!({"id": format!("production-database-volume-{n:02}"), "type": "vhost-user-blk",
                   "connected": true, "queues": [queue(0), queue(1)]})
        };
        let exports: Vec<_> = (1..=exports).map(export).collect();
        let threads: Vec<_> = (1..=threads).map(|n| json!({"id": format!("io{n:02}")})).collect();
        Sample::read(&json!(exports), &json!(threads)).since(
            &Sample::default(),
            1.0,
            TopSort::Order,
        )
    }

    fn screen(width: u16, height: u16, view: &View, window: &mut Window) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        let drawn = terminal.draw(|frame| draw(frame, |_| "head".into(), "keys", view, window));
        drawn.expect("it is drawn");
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(usize::from(width.max(1)));
        let line = |line: &[ratatui::buffer::Cell]| {
            line.iter().map(ratatui::buffer::Cell::symbol).collect::<String>().trim_end().to_owned()
        };
        lines.map(line).collect()
    }

    fn ends_of_names(lines: &[String]) -> Vec<&str> {
        let name = |line: &&String| line.starts_with("production");
        let end = |line: &str| -> Option<usize> { line.find(' ').map(|end| end - 2) };
        lines.iter().filter(name).filter_map(|line| line.get(end(line)?..end(line)? + 2)).collect()
    }

    #[test]
    fn what_does_not_fit_is_scrolled_to() {
        let view = many(30, 3);
        let mut window = Window::default();
        let lines = screen(80, 24, &view, &mut window);
        assert_eq!((lines[0].as_str(), lines[23].as_str()), ("head", "keys"));
        assert!(lines[1].starts_with("EXPORT 1-17/30 "), "{lines:#?}");
        assert!(lines[1].contains("REQ/S") && lines[1].contains("P99 US"), "{lines:#?}");
        // Visible names differ, and queues are hidden for want of room.
        let names: Vec<String> = (1..=17).map(|n| format!("{n:02}")).collect();
        assert_eq!(ends_of_names(&lines), names, "{lines:#?}");
        assert!(lines[19].starts_with("I/O THREAD "), "{lines:#?}");
        assert!(lines[22].starts_with("io03 "), "{lines:#?}");
        window.part().scroll_page(true);
        assert_eq!(ends_of_names(&screen(80, 24, &view, &mut window))[0], "14");
        window.part().scroll(1000);
        let lines = screen(80, 24, &view, &mut window);
        assert!(lines[1].starts_with("EXPORT 14-30/30 "), "{lines:#?}");
        // A larger terminal shows all rows, with queues.
        let lines = screen(120, 100, &view, &mut window);
        assert!(lines[1].starts_with("EXPORT   ") && lines[1].contains("BATCH"), "{lines:#?}");
        assert!(lines[4].starts_with("  1 on io0"), "{lines:#?}");
        // More threads than fit their third of the lines.
        let view = many(30, 30);
        window.on_threads = true;
        window.part().scroll_end();
        screen(80, 24, &view, &mut window);
        window.part().scroll_end();
        let lines = screen(80, 24, &view, &mut window);
        assert!(lines[16].starts_with("I/O THREAD 25-30/30 "), "{lines:#?}");
        assert!(lines[22].starts_with("io30 "), "{lines:#?}");
        window.part().scroll_home();
        window.queues = Some(true);
        let lines = screen(80, 24, &view, &mut window);
        assert!(
            lines[1].starts_with("EXPORT 1-14/90 ") && lines[17].starts_with("io01 "),
            "{lines:#?}"
        );
    }

    #[test]
    fn any_size_of_terminal_is_drawn_on() {
        for (exports, threads) in [(0, 0), (1, 1), (30, 3), (3, 30)] {
            let view = many(exports, threads);
            let mut window = Window::default();
            for height in [0, 1, 2, 3, 4, 5, 7, 24, 50] {
                for width in [0, 1, 2, 20, 79, 132] {
                    screen(width, height, &view, &mut window);
                    window.part().scroll_page(height % 2 == 0);
                }
            }
        }
    }
}
