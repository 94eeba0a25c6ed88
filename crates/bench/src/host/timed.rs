//! Programs that are measured from their start to their end.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeVal;

use super::affinity;

/// What a program has taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    /// Time from start to end.
    pub(crate) seconds: f64,
    /// CPU time, user and system.
    pub(crate) cpu: f64,
    /// Most resident memory at once, in MiB. At least that of this program, which starts the other one.
    pub(crate) peak: f64,
}

/// Runs a program to its end, on `cpu` if one is given. Fails if the program does.
pub(crate) fn run(command: &[OsString], cpu: Option<usize>) -> Result<Cost> {
    // Linux has the peak of all children together: hence a process for each.
    let this = std::env::current_exe().context("finding this program's own path")?;
    let mut child = Command::new(this);
    child.arg("timed").args(command).stdin(Stdio::null());
    let output = affinity::while_bound_to(cpu, || child.output().context("starting this program"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", errors.trim());
    let text = String::from_utf8_lossy(&output.stdout);
    let figures: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [seconds, cpu, peak] = figures[..] else { anyhow::bail!("no figures: {text} {errors}") };
    Ok(Cost { seconds, cpu, peak })
}

/// The process in between: runs the program and prints what it has taken.
pub(crate) fn child(command: &[OsString]) -> Result<()> {
    let (program, arguments) = command.split_first().context("no program to start")?;
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::null());
    let begin = Instant::now();
    let status = command.status().with_context(|| format!("starting {}", program.display()))?;
    let seconds = begin.elapsed().as_secs_f64();
    ensure!(status.success(), "{command:?}: {status}");
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("getrusage")?;
    println!("{seconds} {} {}", cpu_seconds(&usage), usage.max_rss() as f64 / 1024.0);
    Ok(())
}

/// CPU seconds of all children that have ended.
pub(crate) fn children_cpu() -> Result<f64> {
    Ok(cpu_seconds(&getrusage(UsageWho::RUSAGE_CHILDREN).context("getrusage")?))
}

fn cpu_seconds(usage: &Usage) -> f64 {
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}
