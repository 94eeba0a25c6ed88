//! `ringmill top`: a live view of a daemon, by its monitor.

mod columns;
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
use columns::shortened;
use daemon::DaemonError;
use sample::{Sample, View};
use view::Window;

/// The line of keys, at the end of a view.
const KEYS: &str = "q quit  s sort  +/- interval  u queues  arrows PgUp PgDn Home End  Tab threads";

/// Time that output without a terminal waits for a daemon that has closed the connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between attempts to connect again. No event announces a socket.
const TRY_AGAIN: Duration = Duration::from_millis(100);

/// Runs `ringmill top` to its end.
pub(crate) fn run(options: &TopOptions) -> Result<(), DaemonError> {
    let client = Client::connect(&options.socket).map_err(failed)?;
    let mut watch = Watch {
        client: Some(client),
        options: options.clone(),
        last: (Instant::now(), Sample::default()),
        lost: None,
        shown: 0,
    };
    watch.last = watch.sample().map_err(refused)?;
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

/// A command that the daemon refuses: `top` needs commands that only ringmill has.
fn refused(error: ClientError) -> DaemonError {
    let lacks_command = matches!(error, ClientError::Refused(_));
    let error = failed(error);
    match lacks_command {
        true => error.with_hint(
            "'top' is for ringmill's daemons. 'ringmill ctl' also controls qemu-storage-daemon.",
        ),
        false => error,
    }
}

struct Watch {
    /// `None`: the daemon has closed the connection, as at an upgrade.
    client: Option<Client>,
    options: TopOptions,
    /// The previous sample and its time.
    last: (Instant, Sample),
    /// Since when there has been no connection, and why.
    lost: Option<(Instant, ClientError)>,
    shown: u64,
}

impl Watch {
    /// Takes a sample. Connects first if there is no connection.
    fn sample(&mut self) -> Result<(Instant, Sample), ClientError> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(Client::connect(&self.options.socket)?),
        };
        let exports = client.execute("x-query-export-stats", Map::new())?;
        let threads = client.execute("x-query-iothread-stats", Map::new())?;
        Ok((Instant::now(), Sample::read(&exports, &threads)))
    }

    /// Takes a sample. Returns the difference to the previous one, or `None` while there is no connection. The first
    /// sample of a new connection has none either: another process may count from zero.
    fn look(&mut self) -> Result<Option<View>, DaemonError> {
        let taken = match self.sample() {
            Ok(taken) => taken,
            // A refused command, or a peer that is no monitor, does not get better.
            Err(error @ (ClientError::Refused(_) | ClientError::NotQmp(_))) => {
                return Err(refused(error));
            }
            Err(error) => {
                self.client = None;
                let since = self.lost.take().map_or_else(Instant::now, |(since, _)| since);
                self.lost = Some((since, error));
                return Ok(None);
            }
        };
        let (before, earlier) = std::mem::replace(&mut self.last, taken);
        if self.lost.take().is_some() {
            return Ok(None);
        }
        let (now, sample) = &self.last;
        let seconds = (*now - before).as_secs_f64().max(1e-9);
        Ok(Some(sample.since(&earlier, seconds, self.options.sort)))
    }

    /// Time until the next sample.
    fn left(&self) -> Duration {
        match self.lost {
            Some(_) => TRY_AGAIN,
            None => (self.last.0 + self.interval()).saturating_duration_since(Instant::now()),
        }
    }

    fn interval(&self) -> Duration {
        Duration::from_millis(self.options.interval_ms)
    }

    fn is_over(&self) -> bool {
        self.options.count.is_some_and(|count| self.shown >= count)
    }

    /// Returns the first line. The socket's name is shortened to fit `width` characters, as far as possible.
    fn head(&self, width: u16) -> String {
        let TopOptions { socket, interval_ms, sort, .. } = &self.options;
        let rest = match &self.lost {
            Some((_, why)) => format!(": no connection: {}", reason(why)),
            None => format!(", every {interval_ms} ms, sorted by {}", name(*sort)),
        };
        let program = "ringmill top ";
        let taken = u16::try_from(program.len() + rest.len()).unwrap_or(u16::MAX);
        let socket = shortened(&socket.to_string(), width.saturating_sub(taken));
        format!("{program}{socket}{rest}")
    }

    /// Prints views one after the other.
    fn print(&mut self) -> Result<(), DaemonError> {
        while !self.is_over() {
            thread::sleep(self.left());
            let Some(view) = self.look()? else {
                match self.lost.take_if(|(since, _)| since.elapsed() > PATIENCE) {
                    Some((_, why)) => return Err(failed(why)),
                    None => continue,
                }
            };
            let text = batch(|width| self.head(width), &view);
            let mut out = io::stdout().lock();
            match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                // A reader such as `head` closes the pipe when it has enough.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(DaemonError::new(format!("writing failed: {error}"))),
                Ok(()) => self.shown += 1,
            }
        }
        Ok(())
    }

    /// Shows one view and updates it.
    fn show(&mut self, terminal: &mut ratatui::DefaultTerminal) -> Result<(), DaemonError> {
        let failed = |error: io::Error| DaemonError::new(format!("the terminal: {error}"));
        // The first view shows no load: rates need a second sample.
        let mut view = self.last.1.since(&self.last.1, 1.0, self.options.sort);
        let mut window = Window::default();
        loop {
            let draw = |frame: &mut ratatui::Frame<'_>| {
                view::draw(frame, |width| self.head(width), KEYS, &view, &mut window);
            };
            terminal.draw(draw).map_err(failed)?;
            if self.is_over() {
                return Ok(());
            }
            if !event::poll(self.left()).map_err(failed)? {
                // Without a connection the last view stays, below the reason.
                if let Some(seen) = self.look()? {
                    view = seen;
                    self.shown += 1;
                }
                continue;
            }
            // A resize of the terminal is an event, too: the next iteration draws the view again.
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
                KeyCode::Up => window.part().scroll(-1),
                KeyCode::Down => window.part().scroll(1),
                KeyCode::PageUp => window.part().scroll_page(false),
                KeyCode::PageDown => window.part().scroll_page(true),
                KeyCode::Home => window.part().scroll_home(),
                KeyCode::End => window.part().scroll_end(),
                KeyCode::Tab => window.on_threads = !window.on_threads,
                KeyCode::Char('u') => window.toggle_queues(),
                _ => {}
            }
        }
    }
}

/// Returns why there is no connection, without the socket's name.
fn reason(error: &ClientError) -> String {
    match error {
        ClientError::Connect(_, error) | ClientError::Socket(error) => error.to_string(),
        other => other.to_string(),
    }
}

/// Returns the whole view as lines of text.
fn batch(head: impl Fn(u16) -> String, view: &View) -> String {
    let (width, height) = view::size(view);
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let mut window = Window::whole();
    let Ok(_) = terminal.draw(|frame| view::draw(frame, &head, "", view, &mut window));
    let buffer = terminal.backend().buffer();
    let line = |cells: &[ratatui::buffer::Cell]| {
        let line: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned() + "\n"
    };
    buffer.content().chunks(usize::from(width)).map(line).collect()
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
