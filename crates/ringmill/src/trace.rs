//! `--trace`: switches events on and opens the log.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use control::{TraceEvents, TraceOptions};

use daemon::DaemonError;

/// Switches on the events of the options. Called before any thread exists and, with `--daemonize`, in the
/// background process.
pub(crate) fn start(options: &TraceOptions) -> Result<(), DaemonError> {
    if let Some(path) = &options.file {
        let opened = File::create(numbered(path));
        let file = opened.map_err(|error| {
            DaemonError::new(format!("Error opening logfile {}: {}", path.display(), plain(&error)))
        })?;
        // Fails only if a file is already set, and this function is called once.
        let _ = trace::log_to(file);
    }
    if daemon::logger::is_journal() {
        trace::log_with_priority("<7>");
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

/// Switches on the events that match `pattern`. As in QSD, an unknown event is a warning, and a pattern without events
/// is none: lists made for QSD name events that ringmill lacks.
fn enable(pattern: &str, origin: &str) {
    let name = pattern.strip_prefix('-').unwrap_or(pattern);
    if trace::log_events(pattern) == 0 && !name.contains('*') {
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

/// The system's description of an error, without the number that Rust appends.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}
