//! Binding threads to CPUs.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

const THIS_THREAD: Pid = Pid::from_raw(0);

/// Binds the calling thread to one CPU. Children and threads it starts inherit that.
pub fn bind_this_thread(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).with_context(|| format!("CPU {cpu} does not exist"))?;
    sched_setaffinity(THIS_THREAD, &set).with_context(|| format!("binding a thread to CPU {cpu}"))
}

/// The CPUs this thread may run on.
pub fn allowed() -> Result<Vec<usize>> {
    let set = sched_getaffinity(THIS_THREAD).context("sched_getaffinity")?;
    Ok((0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect())
}

/// Runs `work` with the calling thread bound to `cpu`, if one is given, then lets it run where it could before.
pub fn while_bound_to<T>(
    cpu: impl Into<Option<usize>>,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let Some(cpu) = cpu.into() else { return work() };
    let before = sched_getaffinity(THIS_THREAD).context("sched_getaffinity")?;
    bind_this_thread(cpu)?;
    let result = work();
    sched_setaffinity(THIS_THREAD, &before).context("restoring the CPU affinity")?;
    result
}

/// Lets the calling thread run on all CPUs.
pub fn unbind_this_thread() {
    let mut set = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        // `cpu` is less than the set's size.
        let _ = set.set(cpu);
    }
    // If refused, the thread stays bound.
    let _ = sched_setaffinity(THIS_THREAD, &set);
}
