//! Log lines on standard error: one line each, the program's name in front, as QSD has them.
//!
//! A stranger who misbehaves endlessly must not fill the log: similar lines have a rate, and what goes beyond
//! is counted.

mod rate;

use std::io::Write;
use std::sync::Mutex;
use std::time::Instant;

use event_loop::sync::lock;
use log::{Level, LevelFilter, Log, Metadata, Record};

use rate::{LeftOut, Rate};

struct Stderr {
    program: &'static str,
    begun: Instant,
    rate: Mutex<Rate>,
}

impl Stderr {
    fn write(&self, level: Level, text: &str) {
        let level = match level {
            Level::Error => "error: ",
            Level::Warn => "warning: ",
            Level::Info | Level::Debug | Level::Trace => "",
        };
        // With standard error gone there is nobody left to tell.
        let _ = writeln!(std::io::stderr(), "{}: {level}{text}", self.program);
    }

    fn tell(&self, left_out: &[LeftOut]) {
        for left_out in left_out {
            self.write(Level::Warn, &left_out.to_string());
        }
    }
}

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Info
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
        if rate.admits(place, &text, now) {
            self.write(record.level(), &text);
        }
    }

    fn flush(&self) {
        self.tell(&lock(&self.rate).all());
    }
}

/// Sends the log to standard error from here on.
pub(crate) fn start(program: &'static str) {
    let logger = Stderr { program, begun: Instant::now(), rate: Mutex::default() };
    // Fails only when there is a logger already, and then there is one.
    if log::set_boxed_logger(Box::new(logger)).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Tells of the lines that were left out and not told of yet. To be called at the end.
pub(crate) fn end() {
    log::logger().flush();
}
