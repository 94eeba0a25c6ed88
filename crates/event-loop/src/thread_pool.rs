//! Threads for operations that would block the loop: `aio=threads`, and all file I/O without io_uring.
//! Started on demand, retired when idle.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::blocking::BlockingOp;
use crate::sync::lock;

/// How many threads a loop's pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPoolConfig {
    /// Number of threads kept from the loop's creation to its end: QEMU's `thread-pool-min`. Limited by
    /// `max`. More than [`MOST`](Self::MOST) are refused.
    pub min: usize,
    /// Maximum number of threads, at least 1: QEMU's `thread-pool-max`. Larger values mean
    /// [`MOST`](Self::MOST).
    pub max: usize,
}

impl ThreadPoolConfig {
    /// Maximum threads of a loop's pool.
    ///
    /// Each takes four of the process's memory maps (`vm.max_map_count`, 65530 by default). A thread of the
    /// standard library that cannot map its stack guard aborts the process.
    pub const MOST: usize = 1024;
}

impl Default for ThreadPoolConfig {
    fn default() -> Self {
        ThreadPoolConfig { min: 0, max: 64 }
    }
}

/// What a thread does first, such as dropping privileges.
///
/// Threads that a pool thread starts inherit the result and skip this.
#[derive(Clone, Default)]
pub struct ThreadBirth(Option<Arc<dyn Fn() + Send + Sync>>);

impl ThreadBirth {
    /// Calls `on_thread` on each thread.
    pub fn new(on_thread: impl Fn() + Send + Sync + 'static) -> Self {
        ThreadBirth(Some(Arc::new(on_thread)))
    }

    /// Runs the call, on the thread.
    pub fn call(&self) {
        if let Some(on_thread) = &self.0 {
            on_thread();
        }
    }
}

impl fmt::Debug for ThreadBirth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "ThreadBirth(_)" } else { "ThreadBirth" })
    }
}

#[cfg(any(test, feature = "sim"))]
thread_local! {
    static WITHOUT_THREADS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Makes pools of this thread's loops carry out each job at its submission.
///
/// Without threads, for a simulation.
#[cfg(any(test, feature = "sim"))]
pub fn without_threads() {
    WITHOUT_THREADS.set(true);
}

/// Starts a thread that does `work`, which may block, and ends.
///
/// In a simulation without threads, it has ended when this returns.
///
/// # Errors
///
/// As of pthread_create(3).
pub fn start_thread(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<std::thread::JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work)?;
    #[cfg(any(test, feature = "sim"))]
    while WITHOUT_THREADS.get() && !thread.is_finished() {
        std::thread::yield_now();
    }
    Ok(thread)
}

/// How long an idle thread beyond the minimum is kept.
const IDLE: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(10) };

/// A job for a pool thread.
pub(crate) enum Job {
    /// An operation, and the `user_data` of its result.
    Op(BlockingOp, u64),
    /// A computation, which hands over its result itself.
    Call(Box<dyn FnOnce() + Send>),
}

impl Job {
    fn run(self, done: impl Fn(u64, i32)) {
        match self {
            Job::Op(op, user_data) => done(user_data, op.run()),
            Job::Call(call) => call(),
        }
    }
}

/// A pool of threads that carry out jobs in parallel, begun in the order of submission.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<PoolState>,
    work: Condvar,
    name: String,
    config: ThreadPoolConfig,
    birth: ThreadBirth,
    done: Box<dyn Fn(u64, i32) + Send + Sync>,
}

#[derive(Default)]
struct PoolState {
    jobs: VecDeque<Job>,
    idle: usize,
    /// Threads started that do not run yet.
    starting: usize,
    /// Threads that have not retired.
    alive: usize,
    closing: bool,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool without threads. A pool thread calls `done` with each operation's `user_data` and result.
    pub(crate) fn new(
        name: &str,
        config: ThreadPoolConfig,
        birth: ThreadBirth,
        done: impl Fn(u64, i32) + Send + Sync + 'static,
    ) -> Self {
        ThreadPool {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                name: format!("{name}-pool"),
                config: ThreadPoolConfig { max: config.max.max(1), ..config },
                birth,
                done: Box::new(done),
            }),
        }
    }

    /// Starts the permanent threads. The error names the thread that could not be started.
    pub(crate) fn start_minimum(&self) -> io::Result<()> {
        let ThreadPoolConfig { min, max } = self.shared.config;
        let failed = |kind, why: String| Err(io::Error::new(kind, why));
        let wanted = min.min(max);
        if wanted > ThreadPoolConfig::MOST {
            let most = ThreadPoolConfig::MOST;
            let why = format!("{wanted} threads were asked for; a pool has {most} at most");
            return failed(io::ErrorKind::InvalidInput, why);
        }
        for number in 1..=wanted {
            lock(&self.shared.state).reserve();
            if let Err(error) = self.shared.start_reserved(&self.shared.birth) {
                let why = format!("{error}, for thread {number} of the {wanted} of the pool");
                return failed(error.kind(), why);
            }
        }
        Ok(())
    }

    /// Takes jobs with one lock, and without a system call if all threads are busy. Fails, and leaves the
    /// jobs, only if the pool has no thread and none can be started.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) -> io::Result<()> {
        #[cfg(any(test, feature = "sim"))]
        if WITHOUT_THREADS.get() {
            jobs.drain(..).for_each(|job| job.run(&self.shared.done));
            return Ok(());
        }
        let mut state = lock(&self.shared.state);
        let alone = state.alive == 0;
        let wake = state.idle.min(jobs.len());
        state.jobs.extend(jobs.drain(..));
        let is_short = state.reserve_if_short(&self.shared.config);
        drop(state);
        (0..wake).for_each(|_| self.shared.work.notify_one());
        if is_short
            && let Err(error) = self.shared.start_reserved(&self.shared.birth)
            && alone
        {
            jobs.extend(lock(&self.shared.state).jobs.drain(..));
            return Err(error);
        }
        // If no more threads can be started, the existing ones do the work.
        Ok(())
    }
}

impl PoolState {
    /// Counts a thread that the caller starts after it has released the lock. clone(2) takes long, and the
    /// loop must not wait for another thread's call.
    fn reserve(&mut self) {
        self.starting += 1;
        self.alive += 1;
    }

    /// Reserves a thread if jobs outnumber the threads that are idle or starting. Each new thread starts the
    /// next one, so a burst of jobs costs the loop one start.
    fn reserve_if_short(&mut self, config: &ThreadPoolConfig) -> bool {
        let is_short = self.jobs.len() > self.idle + self.starting;
        let max = config.max.min(ThreadPoolConfig::MOST);
        let may_start = is_short && self.alive < max && !self.closing;
        if may_start {
            self.reserve();
        }
        may_start
    }
}

impl Shared {
    /// Starts a [reserved](PoolState::reserve) thread, without the lock held. `birth` runs first on it.
    fn start_reserved(self: &Arc<Self>, birth: &ThreadBirth) -> io::Result<()> {
        let (shared, birth) = (self.clone(), birth.clone());
        let builder = std::thread::Builder::new().name(self.name.clone());
        let started = builder.spawn(move || {
            birth.call();
            shared.work();
        });
        let mut state = lock(&self.state);
        match started {
            Ok(thread) => {
                state.threads.retain(|thread| !thread.is_finished());
                state.threads.push(thread);
                Ok(())
            }
            Err(error) => {
                state.starting -= 1;
                state.alive -= 1;
                Err(error)
            }
        }
    }

    fn work(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        // This thread still counts as starting, as it will take a job.
        if state.reserve_if_short(&self.config) {
            drop(state);
            let _ = self.start_reserved(&ThreadBirth::default());
            state = lock(&self.state);
        }
        state.starting -= 1;
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job.run(&self.done);
                state = lock(&self.state);
                continue;
            }
            if state.closing {
                return;
            }
            state.idle += 1;
            let stays = state.alive <= self.config.min;
            let timed_out;
            (state, timed_out) = self.wait(state, stays);
            state.idle -= 1;
            let surplus = state.alive > self.config.min;
            if timed_out && state.jobs.is_empty() && surplus && !state.closing {
                state.alive -= 1;
                return;
            }
        }
    }

    /// Waits for work. A permanent thread waits for ever. Other threads wait at most [`IDLE`], and then
    /// return true.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, PoolState>,
        stays: bool,
    ) -> (MutexGuard<'a, PoolState>, bool) {
        if stays {
            let state = self.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            return (state, false);
        }
        let waited = self.work.wait_timeout(state, IDLE);
        let (state, timeout) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        (state, timeout.timed_out())
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.work.notify_all();
        loop {
            let threads = std::mem::take(&mut lock(&self.shared.state).threads);
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                // It may have started another thread, which is in the list by now. The panic hook has reported
                // a panic.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::time::Instant;

    fn alive(pool: &ThreadPool) -> usize {
        lock(&pool.shared.state).alive
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < Duration::from_secs(60), "LOST: {what}");
            std::thread::yield_now();
        }
    }

    fn jobs(count: u64) -> Vec<Job> {
        let job = |user_data| Job::Op(BlockingOp::nothing(), user_data);
        (0..count).map(job).collect()
    }

    /// Each burst needs the maximum of threads. The permanent ones remain in between.
    #[test]
    fn threads_are_started_on_demand_and_retired_when_idle() {
        let (all, min) = (8, 2);
        let together = Arc::new(Barrier::new(all + 1));
        let there = together.clone();
        let config = ThreadPoolConfig { min, max: all };
        let pool = ThreadPool::new("test", config, ThreadBirth::default(), move |_, _| {
            there.wait();
        });
        assert_eq!(alive(&pool), 0);
        pool.start_minimum().unwrap();
        assert_eq!(alive(&pool), min);
        for _ in 0..3 {
            let mut burst = jobs(all as u64);
            pool.submit(&mut burst).unwrap();
            assert!(burst.is_empty());
            // Passed once eight threads have a job each; by now they may be retiring.
            together.wait();
            assert!(alive(&pool) <= all);
            until("the idle threads to retire", || alive(&pool) == min);
        }
    }

    #[test]
    fn there_are_never_more_threads_than_allowed_and_no_job_is_lost() {
        let done = Arc::new(Mutex::new(Vec::new()));
        let there = done.clone();
        let config = ThreadPoolConfig { min: 9, max: 3 };
        let pool = ThreadPool::new("test", config, ThreadBirth::default(), move |n, _| {
            lock(&there).push(n)
        });
        pool.start_minimum().unwrap();
        for _ in 0..100 {
            pool.submit(&mut jobs(20)).unwrap();
            assert!(alive(&pool) <= 3);
        }
        until("the jobs", || lock(&done).len() == 2000);
        drop(pool);
        let mut done = lock(&done).clone();
        done.sort_unstable();
        assert!(done.chunks(100).enumerate().all(|(n, same)| same == [n as u64; 100]));
    }

    #[test]
    fn more_threads_than_a_process_can_have_are_refused() {
        let config = ThreadPoolConfig { min: ThreadPoolConfig::MOST + 1, max: usize::MAX };
        let pool = ThreadPool::new("test", config, ThreadBirth::default(), |_, _| {});
        let error = pool.start_minimum().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("1025 threads"), "{error}");
        assert_eq!(alive(&pool), 0);
    }

    /// Dropping a pool whose threads are starting each other joins all of them.
    #[test]
    fn dropping_a_pool_joins_threads_that_others_are_starting() {
        for _ in 0..100 {
            let shared;
            {
                let config = ThreadPoolConfig { min: 0, max: 16 };
                let pool = ThreadPool::new("test", config, ThreadBirth::default(), |_, _| {});
                pool.submit(&mut jobs(16)).unwrap();
                shared = Arc::downgrade(&pool.shared);
            }
            assert!(shared.upgrade().is_none(), "a thread is left that holds on to the pool");
        }
    }
}
