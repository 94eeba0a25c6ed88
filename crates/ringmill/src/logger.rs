//! Log lines on standard error: one line each, the program's name in front, as QSD has them.

use std::io::Write;

use log::{Level, LevelFilter, Log, Metadata, Record};

struct Stderr {
    program: &'static str,
}

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Info
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = match record.level() {
                Level::Error => "error: ",
                Level::Warn => "warning: ",
                Level::Info | Level::Debug | Level::Trace => "",
            };
            // With standard error gone there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "{}: {level}{}", self.program, record.args());
        }
    }

    fn flush(&self) {}
}

/// Sends the log to standard error from here on.
pub(crate) fn start(program: &'static str) {
    // Fails only when there is a logger already, and then there is one.
    if log::set_boxed_logger(Box::new(Stderr { program })).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}
