//! The log: a line per event in QEMU's format, with a timestamp.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// The log file; unset for standard error.
pub(crate) static FILE: OnceLock<File> = OnceLock::new();

/// Put before each line of standard error: its priority, for a journal.
pub(crate) static PRIORITY: OnceLock<&'static str> = OnceLock::new();

/// Writes `TID@SECONDS.MICROSECONDS:event`.
///
/// May allocate and block: only users of the log pay for it.
pub fn write(event: fmt::Arguments<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let thread = nix::unistd::gettid();
    // One write per line, as threads share the file.
    let line = format!("{thread}@{}.{:06}:{event}\n", now.as_secs(), now.subsec_micros());
    // If the disk is full or standard error closed, the failure cannot be reported.
    let _ = match FILE.get() {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => {
            let line = [PRIORITY.get().copied().unwrap_or_default(), &line].concat();
            io::stderr().write_all(line.as_bytes())
        }
    };
}
