//! Statistics of the daemon: a snapshot of counters that the I/O threads write all the time.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use block::policy::IoStatus;
use event_loop::LoopHandle;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::unistd::{Pid, SysconfVar, sysconf};
use stats::QueueNumbers;

/// The statistics of the whole daemon.
#[derive(Debug, Clone)]
pub(super) struct Statistics {
    pub(super) process: ProcessStatistics,
    pub(super) exports: Vec<ExportStatistics>,
    pub(super) threads: Vec<ThreadStatistics>,
    pub(super) throttle_groups: Vec<ThrottleStatistics>,
    pub(super) jobs: Vec<JobStatistics>,
    /// Loop time, which all loops share.
    pub(super) now_ns: u64,
}

/// The resources of the process. `None`: unknown to the system.
#[derive(Debug, Clone)]
pub(super) struct ProcessStatistics {
    pub(super) cpu_ns: Option<u64>,
    pub(super) resident_bytes: Option<u64>,
    pub(super) open_fds: Option<usize>,
    /// Seconds since the epoch.
    pub(super) started_at: Option<f64>,
}

/// The statistics of an export.
#[derive(Debug, Clone)]
pub(super) struct ExportStatistics {
    pub(super) id: String,
    pub(super) kind: &'static str,
    /// The exported nodes, at least one.
    pub(super) nodes: Vec<String>,
    pub(super) connected: bool,
    pub(super) io_status: IoStatus,
    pub(super) queues: Vec<QueueStatistics>,
}

/// The statistics of a queue or, over NBD, of all connections on a thread.
#[derive(Debug, Clone)]
pub(super) struct QueueStatistics {
    /// The index of the queue in the device; over NBD, the index of the thread in the export.
    pub(super) number: usize,
    /// The thread that serves it.
    pub(super) iothread: String,
    pub(super) numbers: QueueNumbers,
}

/// The statistics of an I/O thread.
#[derive(Debug, Clone)]
pub(super) struct ThreadStatistics {
    pub(super) id: String,
    pub(super) tid: Pid,
    pub(super) poll_max_ns: u64,
    /// Has the counters of its loop.
    pub(super) handle: LoopHandle,
    /// CPU time in nanoseconds; `None`: unknown to the kernel.
    pub(super) cpu_ns: Option<u64>,
}

/// The statistics of a throttle group.
#[derive(Debug, Clone)]
pub(super) struct ThrottleStatistics {
    pub(super) id: String,
    /// Number of requests that the group has delayed.
    pub(super) held: u64,
}

/// The statistics of a job that copies.
#[derive(Debug, Clone)]
pub(super) struct JobStatistics {
    pub(super) id: String,
    pub(super) kind: &'static str,
    pub(super) done_bytes: u64,
    pub(super) total_bytes: u64,
}

impl ExportStatistics {
    /// All queues together.
    pub(super) fn total(&self) -> QueueNumbers {
        let mut total = QueueNumbers::default();
        self.queues.iter().for_each(|queue| total.add(&queue.numbers));
        total
    }
}

impl ProcessStatistics {
    /// The current values.
    pub(super) fn now() -> Self {
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok();
        let cpu = usage.map(|usage| usage.user_time() + usage.system_time());
        ProcessStatistics {
            cpu_ns: cpu.and_then(|cpu| u64::try_from(cpu.num_nanoseconds()).ok()),
            resident_bytes: resident_bytes(),
            // The list contains the descriptor of the folder being read.
            open_fds: fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count().saturating_sub(1)),
            started_at: started_at(),
        }
    }
}

/// proc(5), `statm`.
fn resident_bytes() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split_whitespace().nth(1)?.parse().ok()?;
    let page = u64::try_from(sysconf(SysconfVar::PAGE_SIZE).ok()??).ok()?;
    Some(pages * page)
}

/// proc(5), `stat`: ticks since boot, which is `uptime` seconds ago.
fn started_at() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The program's name may contain spaces and brackets.
    let ticks: f64 = stat.rsplit_once(") ")?.1.split_whitespace().nth(19)?.parse().ok()?;
    let per_second = sysconf(SysconfVar::CLK_TCK).ok()?? as f64;
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    Some(now - uptime + ticks / per_second)
}

/// CPU time of a thread of this process, nanoseconds: proc(5), `schedstat`.
pub(super) fn cpu_ns(tid: Pid) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}
