//! Log lines, and the status line of `serve`: all that a daemon writes to standard error.
//!
//! One writer serialises the log, the status line and the error that ends the program. Similar lines are
//! limited in rate: a hostile client must not fill the log. Lines over the limit are counted.

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

/// The writer of standard error.
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
        // If standard error is closed, the line is lost.
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

/// Installs the logger, which writes to standard error.
pub fn start(program: &'static str, options: LogOptions) {
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
            // By default lines have no time, as QSD's. A level or a format, which QSD lacks, adds the time.
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
    // Fails only if a logger is already installed.
    if log::set_logger(Box::leak(Box::new(logger))).is_ok() {
        log::set_max_level(logger.level);
    }
    if let Some(wrong) = wrong {
        log::warn!("{LOG_VARIABLE}: {wrong}");
    }
}

/// Writes the error that ends the program.
///
/// The first line is `program: message`, unless options ask for another form.
pub fn fatal(program: &'static str, error: &str) {
    match STDERR.get() {
        Some(stderr) => stderr.write(Level::Error, error),
        None => {
            let style = Style { is_journal: is_journal(), ..Style::default() };
            let line = Line { program, level: Level::Error, text: error, time: SystemTime::now() };
            let _ = std::io::stderr().write_all(line.in_style(style).as_bytes());
        }
    }
}

/// Replaces the status line below the log. Last parts are left out if the terminal is too narrow.
pub(crate) fn show_status(parts: &[String]) {
    if let Some(stderr) = STDERR.get() {
        let mut status = lock(&stderr.status);
        let _ = std::io::stderr().write_all(&status.show(parts));
    }
}

/// Removes the status line for good.
pub fn end_status() {
    if let Some(stderr) = STDERR.get() {
        let mut status = lock(&stderr.status);
        let _ = std::io::stderr().write_all(&status.end());
    }
}

/// Logs the counts of suppressed lines. Called at the end.
pub fn end() {
    end_status();
    log::logger().flush();
}

/// Returns whether standard error is a stream of systemd's journal: systemd.exec(5), `$JOURNAL_STREAM`.
pub fn is_journal() -> bool {
    let Ok(stat) = fstat(std::io::stderr().as_fd()) else { return false };
    env::var("JOURNAL_STREAM").is_ok_and(|id| id == format!("{}:{}", stat.st_dev, stat.st_ino))
}
