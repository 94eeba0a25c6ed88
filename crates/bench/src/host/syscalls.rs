//! Counting the system calls of a process from outside.
//!
//! `perf stat` counts in the kernel and hardly slows the process down. Where it is missing or not
//! allowed, `strace -c` counts; it slows each call down a lot, so that a server finds more requests
//! per wake-up and gets by with fewer calls per request. Neither runs while anything is timed.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

use super::process;

/// How long the tool may take to attach or to detach.
const PATIENCE: Duration = Duration::from_secs(10);

/// A tool that counts system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    /// `perf stat -e raw_syscalls:sys_enter`.
    Perf,
    /// `strace -f -c`.
    Strace,
}

impl Tool {
    /// The best tool that works here.
    pub(crate) fn find() -> Option<Self> {
        let works = |program: &str, args: &[&str]| {
            let status = Command::new(program)
                .args(args)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            status.is_ok_and(|status| status.success())
        };
        if works("perf", &["stat", "-e", "raw_syscalls:sys_enter", "--", "true"]) {
            Some(Self::Perf)
        } else if works("strace", &["-f", "-c", "-o", "/dev/null", "--", "true"]) {
            Some(Self::Strace)
        } else {
            None
        }
    }

    /// What the tool is called in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Perf => "perf stat",
            Self::Strace => {
                "strace -c, which slows the server down and so makes its batches larger"
            }
        }
    }
}

/// A tool that is attached to a process tree and counts.
pub(crate) struct Counter {
    child: Child,
    output: PathBuf,
    tool: Tool,
    control: Option<Control>,
}

/// perf's control pipes.
struct Control {
    commands: File,
    answers: File,
    paths: [PathBuf; 2],
}

impl Counter {
    /// Attaches to `root` and its descendants; counting has begun when this returns. `directory`
    /// takes the tool's files.
    pub(crate) fn attach(tool: Tool, root: Pid, directory: &Path) -> Result<Self> {
        let pids = process::tree(root);
        let output = directory.join(format!("syscalls-{root}.txt"));
        let list = pids.iter().map(Pid::to_string).collect::<Vec<_>>().join(",");
        let mut command = match tool {
            Tool::Perf => Command::new("perf"),
            Tool::Strace => Command::new("strace"),
        };
        let control = match tool {
            Tool::Perf => {
                let control = Control::new(directory, root)?;
                let [commands, answers] = control.paths.each_ref().map(|path| path.display());
                command
                    .args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", &list, "-D", "-1"])
                    .args(["--control", &format!("fifo:{commands},{answers}"), "-o"])
                    .arg(&output);
                Some(control)
            }
            Tool::Strace => {
                command.args(["-f", "-c", "-U", "calls,name", "-o"]).arg(&output);
                for pid in &pids {
                    command.args(["-p", &pid.to_string()]);
                }
                None
            }
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {tool:?} to count system calls"))?;
        let mut counter = Self { child, output, tool, control };
        match &mut counter.control {
            Some(control) => control.ask("enable\n")?,
            None => counter.wait_until_traced(&pids)?,
        }
        Ok(counter)
    }

    /// strace says nothing when it has attached, but the kernel does.
    fn wait_until_traced(&mut self, pids: &[Pid]) -> Result<()> {
        let start = Instant::now();
        while !pids.iter().all(|&pid| process::threads(pid).all(|thread| is_traced(pid, thread))) {
            if let Some(status) = self.child.try_wait()? {
                bail!("strace could not attach ({status}); is ptrace allowed here?");
            }
            ensure!(start.elapsed() < PATIENCE, "strace has not attached within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Detaches; returns the number of system calls made since [`Self::attach`].
    pub(crate) fn detach(mut self) -> Result<u64> {
        if let Some(control) = &mut self.control {
            control.ask("disable\n")?;
        }
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGINT)
            .context("stopping the counter")?;
        self.child.wait().context("waiting for the counter")?;
        let text = fs::read_to_string(&self.output)
            .with_context(|| format!("reading {}", self.output.display()))?;
        let count = match self.tool {
            Tool::Perf => parse_perf(&text),
            Tool::Strace => parse_strace(&text),
        };
        count.with_context(|| format!("no count in what {:?} printed: {text:?}", self.tool))
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // Only on errors is it still there. A tracer that is killed leaves the traced running.
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let _ = fs::remove_file(&self.output);
        for path in self.control.iter().flat_map(|control| &control.paths) {
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
            // For reading and writing, since opening for one of them waits for the other end.
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
        let timeout = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::NONE);
        let ready = poll(&mut fds, timeout).context("waiting for perf")?;
        ensure!(ready > 0, "perf has not carried out {:?} within {PATIENCE:?}", command.trim());
        // "ack\n", and a NUL from some versions.
        self.answers.read(&mut [0; 16]).context("reading from perf's control pipe")?;
        Ok(())
    }
}

fn is_traced(pid: Pid, thread: i32) -> bool {
    // A thread that has ended meanwhile need not be waited for.
    fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).map_or(true, |status| {
        status
            .lines()
            .filter_map(|line| line.strip_prefix("TracerPid:"))
            .any(|tracer| tracer.trim() != "0")
    })
}

fn parse_perf(text: &str) -> Option<u64> {
    text.lines().find(|line| line.contains("sys_enter"))?.split(',').next()?.parse().ok()
}

fn parse_strace(text: &str) -> Option<u64> {
    // A process that has made no call at all gets no table.
    if text.trim().is_empty() {
        return Some(0);
    }
    let total = text.lines().rev().find(|line| line.trim_end().ends_with("total"))?;
    total.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_output_is_read() {
        let perf = "# started on Sat Nov 21\n\n1167,,raw_syscalls:sys_enter,10844282,100.00,,\n";
        assert_eq!(parse_perf(perf), Some(1167));
        assert_eq!(parse_perf("<not counted>,,raw_syscalls:sys_enter,0,0.00,,"), None);
        let strace =
            "    calls syscall\n------ ----\n     19 read\n  2182 write\n--- ---\n  2201 total\n";
        assert_eq!(parse_strace(strace), Some(2201));
        assert_eq!(parse_strace("garbage"), None);
    }
}
