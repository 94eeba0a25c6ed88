//! The log: a line per event, as QEMU writes them with the time in front.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where the log goes; without one, to standard error.
pub(super) static FILE: OnceLock<File> = OnceLock::new();

/// Writes `TID@SECONDS.MICROSECONDS:event`. May allocate and wait: it was asked for.
pub(super) fn write(event: fmt::Arguments<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let thread = nix::unistd::gettid();
    // One write per line: threads share the file.
    let line = format!("{thread}@{}.{:06}:{event}\n", now.as_secs(), now.subsec_micros());
    // With the disk full, or standard error gone, there is nobody left to tell.
    let _ = match FILE.get() {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => io::stderr().write_all(line.as_bytes()),
    };
}
