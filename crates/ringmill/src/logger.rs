//! Log lines, and the status line of `serve`: all that a daemon writes to standard error.
//!
//! One writer has the log, the status line and the error that ends the program, so that none runs into
//! another. Similar lines have a rate: a stranger who misbehaves endlessly must not fill the log. What goes
//! beyond the rate is counted.

mod line;
mod rate;
mod status;

use std::env;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::{Mutex, OnceLock};
use std::time::{Instant, SystemTime};

use control::{LOG_VARIABLE, LogFormat, LogLevel, LogOptions};
use event_loop::sync::lock;
use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::fs::fstat;

use line::{Line, Style};
use rate::{LeftOut, Rate};
use status::StatusLine;

/// Where everything goes.
struct Stderr {
    program: &'static str,
    style: Style,
    level: LevelFilter,
    begun: Instant,
    rate: Mutex<Rate>,
    status: Mutex<StatusLine>,
}

static STDERR: OnceLock<Stderr> = OnceLock::new();

impl Stderr {
    fn write(&self, level: Level, text: &str) {
        let line = Line { program: self.program, level, text, time: SystemTime::now() };
        let line = line.in_style(self.style);
        let mut status = lock(&self.status);
        // With standard error gone there is nobody left to tell.
        let _ = std::io::stderr().write_all(&status.around(&line));
    }

    fn tell(&self, left_out: &[LeftOut]) {
        for left_out in left_out {
            self.write(left_out.level, &left_out.to_string());
        }
    }
}

impl Log for &'static Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= self.level
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = record.args().to_string();
        let place = (record.file_static().unwrap_or_default(), record.line().unwrap_or_default());
        let mut rate = lock(&self.rate);
        let now = self.begun.elapsed();
        self.tell(&rate.ended(now));
        if rate.admits(place, record.level(), &text, now) {
            self.write(record.level(), &text);
        }
    }

    fn flush(&self) {
        self.tell(&lock(&self.rate).all());
    }
}

/// Sends the log to standard error from here on.
pub(crate) fn start(program: &'static str, options: LogOptions) {
    let variable = env::var(LOG_VARIABLE).ok().filter(|value| !value.is_empty());
    let (level, wrong) = match (options.level, variable.as_deref().map(LogLevel::of)) {
        (Some(level), _) | (None, Some(Ok(level))) => (Some(level), None),
        (None, Some(Err(wrong))) => (None, Some(wrong)),
        (None, None) => (None, None),
    };
    let logger = STDERR.get_or_init(|| Stderr {
        program,
        style: Style {
            is_journal: is_journal(),
            // QSD's lines have no time. Those who ask for more than QSD has are given it.
            has_time: level.is_some() || options.format.is_some(),
            is_json: options.format == Some(LogFormat::Json),
        },
        level: match level.unwrap_or(LogLevel::Warn) {
            LogLevel::Error => LevelFilter::Error,
            LogLevel::Warn => LevelFilter::Warn,
            LogLevel::Info => LevelFilter::Info,
            LogLevel::Debug => LevelFilter::Debug,
        },
        begun: Instant::now(),
        rate: Mutex::default(),
        status: Mutex::new(StatusLine::new()),
    });
    // Fails only when there is a logger already, and then there is one.
    if log::set_logger(Box::leak(Box::new(logger))).is_ok() {
        log::set_max_level(logger.level);
    }
    if let Some(wrong) = wrong {
        log::warn!("{LOG_VARIABLE}: {wrong}");
    }
}

/// Tells the error that ends the program, whose first line is `program: message` where nothing else was asked
/// for.
pub(crate) fn fatal(program: &'static str, error: &str) {
    match STDERR.get() {
        Some(stderr) => stderr.write(Level::Error, error),
        None => {
            let style = Style { is_journal: is_journal(), ..Style::default() };
            let line = Line { program, level: Level::Error, text: error, time: SystemTime::now() };
            let _ = std::io::stderr().write_all(line.in_style(style).as_bytes());
        }
    }
}

/// Shows what goes on below the log, in the place of what was shown there before.
/// Where the terminal is too narrow for all parts, the last ones are left out.
pub(crate) fn show_status(parts: &[String]) {
    if let Some(stderr) = STDERR.get() {
        let mut status = lock(&stderr.status);
        let _ = std::io::stderr().write_all(&status.show(parts));
    }
}

/// Removes the status line for good.
pub(crate) fn end_status() {
    if let Some(stderr) = STDERR.get() {
        let mut status = lock(&stderr.status);
        let _ = std::io::stderr().write_all(&status.end());
    }
}

/// Tells of the lines that were left out and not told of yet. To be called at the end.
pub(crate) fn end() {
    end_status();
    log::logger().flush();
}

/// Whether standard error is a stream of systemd's journal: systemd.exec(5), `$JOURNAL_STREAM`.
fn is_journal() -> bool {
    let Ok(stat) = fstat(std::io::stderr().as_fd()) else { return false };
    env::var("JOURNAL_STREAM").is_ok_and(|id| id == format!("{}:{}", stat.st_dev, stat.st_ino))
}
