//! `ringmill top`: a live view of a daemon, by its monitor.

mod sample;
mod view;

use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant};

use control::{TopOptions, TopSort};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::Map;

use crate::ctl::client::{Client, ClientError};
use crate::daemon::DaemonError;
use sample::{Sample, View};

/// What of the keys fits into the first line.
const KEYS: &str = "q: quit  s: sort  +/-: interval";

/// Shows it until that is ended.
pub(crate) fn run(options: &TopOptions) -> Result<(), DaemonError> {
    let client = Client::connect(&options.socket).map_err(failed)?;
    let mut watch = Watch {
        client,
        options: options.clone(),
        last: (Instant::now(), Sample::default()),
        shown: 0,
    };
    watch.look()?;
    if options.batch || !io::stdout().is_terminal() {
        return watch.print();
    }
    let mut terminal = ratatui::try_init()
        .map_err(|error| DaemonError::new(format!("the terminal cannot be used: {error}")))?;
    let result = watch.show(&mut terminal);
    ratatui::restore();
    result
}

fn failed(error: ClientError) -> DaemonError {
    DaemonError::new(error.to_string())
}

struct Watch {
    client: Client,
    options: TopOptions,
    /// The look before.
    last: (Instant, Sample),
    shown: u64,
}

impl Watch {
    /// Looks, and gives what has been done since the last look.
    fn look(&mut self) -> Result<View, DaemonError> {
        let mut ask = |name| self.client.execute(name, Map::new()).map_err(failed);
        let exports = ask("x-query-export-stats")?;
        let threads = ask("x-query-iothread-stats")?;
        let (now, sample) = (Instant::now(), Sample::read(&exports, &threads));
        let (before, earlier) = &self.last;
        let seconds = (now - *before).as_secs_f64().max(1e-9);
        let view = sample.since(earlier, seconds, self.options.sort);
        self.last = (now, sample);
        Ok(view)
    }

    fn interval(&self) -> Duration {
        Duration::from_millis(self.options.interval_ms)
    }

    fn is_over(&self) -> bool {
        self.options.count.is_some_and(|count| self.shown >= count)
    }

    fn head(&self) -> String {
        let TopOptions { socket, interval_ms, sort, .. } = &self.options;
        format!("ringmill top {socket}, every {interval_ms} ms, sorted by {}", name(*sort))
    }

    /// Views one after the other.
    fn print(&mut self) -> Result<(), DaemonError> {
        while !self.is_over() {
            thread::sleep(self.interval());
            let view = self.look()?;
            let text = batch(&self.head(), &view);
            let mut out = io::stdout().lock();
            match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                // Who has gone away, as `head` does, has read enough.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(DaemonError::new(format!("writing failed: {error}"))),
                Ok(()) => self.shown += 1,
            }
        }
        Ok(())
    }

    /// One view, kept up to date.
    fn show(&mut self, terminal: &mut ratatui::DefaultTerminal) -> Result<(), DaemonError> {
        let failed = |error: io::Error| DaemonError::new(format!("the terminal: {error}"));
        let mut view = View::default();
        loop {
            let head = format!("{}   {KEYS}", self.head());
            terminal.draw(|frame| view::draw(frame, &head, &view)).map_err(failed)?;
            if self.is_over() {
                return Ok(());
            }
            let left = (self.last.0 + self.interval()).saturating_duration_since(Instant::now());
            if !event::poll(left).map_err(failed)? {
                view = self.look()?;
                self.shown += 1;
                continue;
            }
            let Event::Key(key) = event::read().map_err(failed)? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                    return Ok(());
                }
                KeyCode::Char('s') => self.options.sort = next(self.options.sort),
                KeyCode::Char('+') => {
                    self.options.interval_ms = (self.options.interval_ms * 2).min(60_000);
                }
                KeyCode::Char('-') => {
                    self.options.interval_ms = (self.options.interval_ms / 2).max(100);
                }
                _ => {}
            }
        }
    }
}

/// A view as lines of text.
fn batch(head: &str, view: &View) -> String {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(view::WIDTH, view::height(view)));
    let Ok(_) = terminal.draw(|frame| view::draw(frame, head, view));
    let buffer = terminal.backend().buffer();
    let width = usize::from(view::WIDTH);
    let line = |cells: &[ratatui::buffer::Cell]| {
        let line: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned() + "\n"
    };
    buffer.content().chunks(width).map(line).collect()
}

fn name(sort: TopSort) -> &'static str {
    match sort {
        TopSort::Order => "order",
        TopSort::Requests => "requests",
        TopSort::Bytes => "bytes",
        TopSort::Latency => "latency",
        TopSort::Depth => "depth",
    }
}

fn next(sort: TopSort) -> TopSort {
    match sort {
        TopSort::Order => TopSort::Requests,
        TopSort::Requests => TopSort::Bytes,
        TopSort::Bytes => TopSort::Latency,
        TopSort::Latency => TopSort::Depth,
        TopSort::Depth => TopSort::Order,
    }
}
