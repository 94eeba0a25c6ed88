//! Counting the system calls of a process from outside, with `perf stat`.
//!
//! perf counts in the kernel and hardly slows the process down. `strace -c` is more widely available, but slows each call
//! down so much that the server finds its next request before it sleeps: it counts 1.0 calls per request where
//! qemu-storage-daemon makes 3.0 (null node, depth 1). Nothing is timed while perf runs.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

use super::process;

/// The event for each system call.
const EVENT: &str = "raw_syscalls:sys_enter";

/// Time limit for perf to attach or detach.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether system calls can be counted here: perf is installed and permitted.
pub(crate) fn can_count() -> bool {
    let status = Command::new("perf")
        .args(["stat", "-e", EVENT, "--", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// perf, attached to a process tree and counting.
pub(crate) struct Counter {
    perf: Child,
    output: PathBuf,
    control: Control,
}

/// perf's control pipes.
struct Control {
    commands: File,
    answers: File,
    paths: [PathBuf; 2],
}

impl Counter {
    /// Attaches to `root` and its descendants. Counting has begun when this returns. perf's output and control pipes are
    /// in `directory`.
    pub(crate) fn attach(root: Pid, directory: &Path) -> Result<Self> {
        let pids: Vec<String> = process::tree(root).iter().map(Pid::to_string).collect();
        let output = directory.join(format!("syscalls-{root}.txt"));
        let control = Control::new(directory, root)?;
        let [commands, answers] = control.paths.each_ref().map(|path| path.display());
        let perf = Command::new("perf")
            // -D -1: count only after a command.
            .args(["stat", "-x,", "-e", EVENT, "-D", "-1", "-p", &pids.join(",")])
            .args(["--control", &format!("fifo:{commands},{answers}"), "-o"])
            .arg(&output)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting perf to count system calls")?;
        let mut counter = Self { perf, output, control };
        counter.control.ask("enable\n")?;
        Ok(counter)
    }

    /// Detaches; returns the number of system calls made since [`Self::attach`].
    pub(crate) fn detach(mut self) -> Result<u64> {
        self.control.ask("disable\n")?;
        kill(Pid::from_raw(self.perf.id() as i32), Signal::SIGINT).context("stopping perf")?;
        self.perf.wait().context("waiting for perf")?;
        let text = fs::read_to_string(&self.output)
            .with_context(|| format!("reading {}", self.output.display()))?;
        parse(&text).with_context(|| format!("no count in what perf printed: {text:?}"))
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // Still running only after an error.
        if let Ok(None) = self.perf.try_wait() {
            let _ = self.perf.kill();
            let _ = self.perf.wait();
        }
        let _ = fs::remove_file(&self.output);
        for path in &self.control.paths {
            let _ = fs::remove_file(path);
        }
    }
}

impl Control {
    fn new(directory: &Path, root: Pid) -> Result<Self> {
        let paths = ["ctl", "ack"].map(|kind| directory.join(format!("syscalls-{root}.{kind}")));
        let open = |path: &PathBuf| -> Result<File> {
            let _ = fs::remove_file(path);
            mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
            // For reading and writing, as opening for one of them would wait for the other end.
            Ok(OpenOptions::new().read(true).write(true).open(path)?)
        };
        let context = || format!("making perf's control pipes in {}", directory.display());
        let commands = open(&paths[0]).with_context(context)?;
        let answers = open(&paths[1]).with_context(context)?;
        Ok(Self { commands, answers, paths })
    }

    /// Sends a command and waits until perf has carried it out.
    fn ask(&mut self, command: &str) -> Result<()> {
        self.commands.write_all(command.as_bytes()).context("writing to perf's control pipe")?;
        let mut fds = [PollFd::new(self.answers.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(PATIENCE).context("perf's patience")?;
        let ready = poll(&mut fds, timeout).context("waiting for perf")?;
        ensure!(ready > 0, "perf has not carried out {:?} within {PATIENCE:?}", command.trim());
        // "ack\n", and a NUL from some versions.
        let read = self.answers.read(&mut [0; 16]).context("reading from perf's control pipe")?;
        ensure!(read > 0, "perf has closed its control pipe");
        Ok(())
    }
}

fn parse(text: &str) -> Option<u64> {
    text.lines().find(|line| line.contains(EVENT))?.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perfs_output_is_read() {
        let text = "# started on Sat Nov 21\n\n1167,,raw_syscalls:sys_enter,10844282,100.00,,\n";
        assert_eq!(parse(text), Some(1167));
        assert_eq!(parse("<not counted>,,raw_syscalls:sys_enter,0,0.00,,"), None);
    }
}
