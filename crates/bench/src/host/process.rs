//! CPU time and context switches of a process and all its descendants.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// The usage of a process tree at a moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    /// When this was read.
    pub(crate) at: Instant,
    /// User and system time of all threads, ended ones included.
    pub(crate) cpu: Duration,
    /// Context switches, voluntary and not, of the threads that live now.
    pub(crate) switches: u64,
}

impl Usage {
    /// Reads the usage of the tree with root `root`.
    pub(crate) fn read(root: Pid) -> Result<Self> {
        let mut usage = Self { at: Instant::now(), cpu: Duration::ZERO, switches: 0 };
        for pid in tree(root) {
            // The process's CPU clock has nanoseconds, /proc/PID/stat has ticks. The clock includes ended threads,
            // which /proc/PID/task/*/schedstat does not.
            let clock = clock_getcpuclockid(pid)
                .with_context(|| format!("reading the CPU time of process {pid}"))?;
            let cpu = clock_gettime(clock)
                .with_context(|| format!("reading the CPU time of process {pid}"))?;
            usage.cpu += Duration::from(cpu);
            usage.switches += threads(pid).map(|thread| switches(pid, thread)).sum::<u64>();
        }
        Ok(usage)
    }
}

/// The process and its descendants, those that can be read.
pub(crate) fn tree(root: Pid) -> Vec<Pid> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        next += 1;
        for thread in threads(pid) {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children"));
            let children = children.unwrap_or_default();
            found.extend(
                children.split_whitespace().filter_map(|c| c.parse().ok()).map(Pid::from_raw),
            );
        }
    }
    found
}

/// The threads of a process.
pub(crate) fn threads(pid: Pid) -> impl Iterator<Item = i32> {
    fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn switches(pid: Pid, thread: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status"));
    status
        .unwrap_or_default()
        .lines()
        .filter(|line| line.contains("ctxt_switches"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_shows_and_still_counts_when_it_has_ended() {
        let me = Pid::this();
        let before = Usage::read(me).unwrap();
        let busy = std::thread::spawn(|| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(50) {
                std::hint::spin_loop();
            }
            // The CPU time of this thread, which on a loaded machine is less than 50 ms.
            clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap()
        });
        let used = Duration::from(busy.join().unwrap());
        let after = Usage::read(me).unwrap();
        assert!(after.cpu - before.cpu >= used);
    }

    #[test]
    fn the_tree_holds_grandchildren() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 30 & echo; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // The line comes after the shell has started its own child.
        let mut line = String::new();
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(child.stdout.take().unwrap()),
            &mut line,
        )
        .unwrap();
        let pids = tree(Pid::from_raw(child.id() as i32));
        for &pid in pids.iter().rev() {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
        child.wait().unwrap();
        assert_eq!(pids.len(), 2, "{pids:?}");
    }
}
