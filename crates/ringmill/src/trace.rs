//! `--trace`: switches events on and opens the log.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use control::{TraceEvents, TraceOptions};
use event_loop::trace;

use daemon::DaemonError;

/// Has the events logged that the options name. To be called before there are threads; where the
/// program goes to the background, there.
pub(crate) fn start(options: &TraceOptions) -> Result<(), DaemonError> {
    if let Some(path) = &options.file {
        let opened = File::create(numbered(path));
        let file = opened.map_err(|error| {
            DaemonError::new(format!("Error opening logfile {}: {}", path.display(), plain(&error)))
        })?;
        // There is none yet: this is called once.
        let _ = trace::log_to(file);
    }
    for events in &options.events {
        match events {
            TraceEvents::Pattern(pattern) => enable(pattern, "--trace"),
            TraceEvents::File(path) => enable_listed(path)?,
        }
    }
    Ok(())
}

fn enable_listed(path: &Path) -> Result<(), DaemonError> {
    let text = fs::read_to_string(path).map_err(|error| {
        DaemonError::new(format!("--trace events={0}: {1}", path.display(), plain(&error)))
    })?;
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if !line.is_empty() && !line.starts_with('#') {
            enable(line, &format!("{}:{number}", path.display()));
        }
    }
    Ok(())
}

/// QSD starts without an event that it does not know, and so do we: a list made for it has names of
/// things that are not here.
fn enable(pattern: &str, origin: &str) {
    if trace::log_events(pattern) == 0 {
        let name = pattern.strip_prefix('-').unwrap_or(pattern);
        log::warn!(
            "{origin}: trace event '{name}' does not exist; --trace help lists those that do"
        );
    }
}

/// The path with the process's id for `%d`.
fn numbered(path: &Path) -> std::path::PathBuf {
    match path.to_str() {
        Some(text) => text.replace("%d", &std::process::id().to_string()).into(),
        None => path.to_owned(),
    }
}

/// The system's own words, without the number that Rust puts behind them.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}
