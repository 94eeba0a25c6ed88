//! `x-query-iothread-stats`.

use control::qmp::{Member, Reply, Returns};
use serde_json::{Value as Json, json};

use super::super::Command;
use crate::statistics::ThreadStatistics;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "x-query-iothread-stats",
    help: "return statistics of each I/O thread",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each thread", Reply::List(&Reply::Object(THREAD_STATS))),
    records: false,
    run: |daemon, ()| {
        Box::pin(async { Ok(daemon.threads.statistics().iter().map(thread).collect()) })
    },
};

static THREAD_STATS: &[Member] = &[
    Member::new("id", Reply::Text, "its name"),
    Member::new("thread-id", Reply::Int, "its number in the system"),
    Member::optional("cpu-ns", Reply::Int, "CPU time it has taken, nanoseconds"),
    Member::new("poll-max-ns", Reply::Int, "the longest that the poll window may be, nanoseconds"),
    Member::new("poll-window-ns", Reply::Int, "how long it polls before it sleeps, as it is now"),
    Member::new("polled-ns", Reply::Int, "time spent in busy polls, nanoseconds"),
    Member::new("polls-succeeded", Reply::Int, "busy polls that found something"),
    Member::new("polls-failed", Reply::Int, "busy polls that found nothing"),
    Member::new("iterations", Reply::Int, "iterations of its event loop"),
    Member::new("enters", Reply::Int, "calls of io_uring_enter, or of epoll_pwait2"),
    Member::new("aio-submits", Reply::Int, "calls of io_submit, of Linux AIO"),
    Member::new("sleeps", Reply::Int, "calls that could sleep"),
    Member::new("sleeps-called-off", Reply::Int, "sleeps that something came in between of"),
    Member::new("wakeups", Reply::Int, "times that another thread had to wake it"),
    Member::new("submitted", Reply::Int, "operations submitted to the kernel"),
    Member::new("completed", Reply::Int, "operations that the kernel has completed"),
];

fn thread(thread: &ThreadStatistics) -> Json {
    let stats = thread.handle.stats();
    let mut told = json!({
        "id": thread.id,
        "thread-id": thread.tid.as_raw(),
        "poll-max-ns": thread.poll_max_ns,
        "poll-window-ns": stats.poll_window_ns.get(),
        "polled-ns": stats.polled_ns.get(),
        "polls-succeeded": stats.poll_hits.get(),
        "polls-failed": stats.poll_misses.get(),
        "iterations": stats.iterations.get(),
        "enters": stats.enters.get(),
        "aio-submits": stats.aio_submits.get(),
        "sleeps": stats.sleeps.get(),
        "sleeps-called-off": stats.sleeps_called_off.get(),
        "wakeups": stats.wakes.get(),
        "submitted": stats.submitted.get(),
        "completed": stats.completed.get(),
    });
    if let Some(cpu_ns) = thread.cpu_ns {
        told["cpu-ns"] = cpu_ns.into();
    }
    told
}
