//! `ringmill probe`: what this machine offers, what ringmill would choose, and why.
//!
//! The probe runs the daemon's code for its decisions: the event loop tries its set-up flags, and the block layer
//! opens the file.

mod file;
mod kernel;
mod limits;
mod pinning;
mod ring;
mod sleep;

use std::fmt::{self, Write as _};
use std::path::Path;

use control::ProbeOptions;

use daemon::DaemonError;
use file::FileReport;
use kernel::Kernel;
use limits::Limits;
pub(crate) use limits::bytes;
use ring::RingReport;
use sleep::Sleep;

/// The results of all probes.
struct Report {
    kernel: Kernel,
    ring: RingReport,
    limits: Limits,
    sleep: Option<Sleep>,
    file: Option<FileReport>,
}

/// Runs all probes, and returns the report.
///
/// # Errors
///
/// The file cannot be opened. A missing feature of the kernel is no error.
pub(crate) fn run(options: &ProbeOptions) -> Result<String, DaemonError> {
    let kernel = Kernel::read(Path::new("/proc"));
    let ring = RingReport::take();
    let limits = Limits::read();
    let look = |path: &Path| FileReport::take(path).map_err(DaemonError::new);
    let file = options.file.as_deref().map(look).transpose()?;
    let report = Report { kernel, ring, limits, sleep: Sleep::take(), file };
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(text, "{report}");
    Ok(text)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Kernel")?;
        self.kernel.fmt(f)?;
        writeln!(f, "\nio_uring")?;
        self.ring.fmt(f)?;
        if let Some(why) = self.kernel.why_refused(&self.ring) {
            row(f, "refused by", &why)?;
        }
        writeln!(f, "\nLimits")?;
        self.limits.fmt(f)?;
        writeln!(f, "\nDisks of the host")?;
        let ublk = daemon::check_ublk();
        row(
            f,
            "ublk",
            &ublk.map_or_else(|error| error.to_string().replace('\n', ". "), |()| "yes".to_owned()),
        )?;
        if let Some(sleep) = &self.sleep {
            writeln!(f, "\nAn I/O thread's sleep")?;
            row(f, "measured", &sleep.cost())?;
        }
        if let Some(file) = &self.file {
            writeln!(f, "\nFile {}", file.path.display())?;
            file.fmt(f)?;
        }
        writeln!(f, "\nringmill would choose")?;
        row(f, "event loop", &self.ring.choice())?;
        row(f, "aio", &self.ring.aio())?;
        if let Some(sleep) = &self.sleep {
            row(f, "poll-max-ns", &sleep.choice())?;
        }
        row(
            f,
            "guest memory",
            "pinned only with --pin-memory of serve, or pin-memory=on of an export",
        )?;
        match &self.file {
            Some(file) => file.choice(f),
            None => Ok(()),
        }
    }
}

/// A line of the report.
fn row(f: &mut fmt::Formatter<'_>, name: &str, value: &str) -> fmt::Result {
    writeln!(f, "  {name:<26}{value}")
}
