//! The conditions of all measurements, passed from the parent to its children.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use bench::report::DEBUG;

/// The same for every contender of a row.
#[derive(Debug, Clone)]
pub(crate) struct Conditions {
    /// The CPU of the measured loop.
    pub(crate) cpu: usize,
    /// The CPU of the other side.
    pub(crate) other_cpu: usize,
    /// Duration of the measurement.
    pub(crate) run_time: Duration,
    /// A fully written file.
    pub(crate) file: PathBuf,
    /// A fully written block device in RAM.
    pub(crate) device: PathBuf,
}

impl Conditions {
    /// For the report.
    pub(crate) fn describe(&self, rounds: usize) -> String {
        format!(
            "Method: {rounds} round(s) of {:?} per contender and row, each in a fresh process; loop \
             on CPU {}, its counterpart on CPU {}{DEBUG}",
            self.run_time, self.cpu, self.other_cpu
        )
    }

    /// Encodes them as a child's arguments.
    pub(crate) fn to_args(&self) -> [OsString; 5] {
        [
            self.cpu.to_string().into(),
            self.other_cpu.to_string().into(),
            self.run_time.as_nanos().to_string().into(),
            self.file.clone().into(),
            self.device.clone().into(),
        ]
    }

    /// Decodes them from a child's arguments.
    pub(crate) fn from_args(mut args: impl Iterator<Item = OsString>) -> Result<Self> {
        let mut next = || args.next().context("--measure is for this program's own children");
        let text = |arg: OsString| arg.to_string_lossy().into_owned();
        Ok(Conditions {
            cpu: text(next()?).parse().context("CPU")?,
            other_cpu: text(next()?).parse().context("CPU")?,
            run_time: Duration::from_nanos(text(next()?).parse().context("run time")?),
            file: next()?.into(),
            device: next()?.into(),
        })
    }
}
