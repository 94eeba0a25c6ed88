//! Threads for operations that would block the loop: `aio=threads`, and all file I/O without io_uring.
//! Started on demand, retired when idle.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use crate::blocking::{Answer, BlockingOp};
use crate::lanes::{Call, Lane, Lanes};
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
    /// A call that may block, which hands over its result itself.
    Call(Call),
    /// A computation, which hands over its result itself.
    Compute(Lane, Call),
}

impl Job {
    /// Runs the job on a pool thread, which survives a panic: the hook reports it, and the operation fails.
    ///
    /// A call that panics drops the sender of its result.
    fn run(self, done: impl Fn(u64, i32, Answer)) {
        match self {
            Job::Op(op, user_data) => {
                let ended = catch_unwind(AssertUnwindSafe(|| op.run()));
                let (result, answer) = ended.unwrap_or((-libc::EIO, None));
                done(user_data, result, answer);
            }
            Job::Call(call) | Job::Compute(_, call) => drop(catch_unwind(AssertUnwindSafe(call))),
        }
    }

    /// Runs the job at its submission. A panic is the caller's.
    #[cfg(any(test, feature = "sim"))]
    fn run_at_once(self, done: impl Fn(u64, i32, Answer)) {
        match self {
            Job::Op(op, user_data) => {
                let (result, answer) = op.run();
                done(user_data, result, answer);
            }
            Job::Call(call) | Job::Compute(_, call) => call(),
        }
    }
}

/// How many CPUs this thread may run on.
fn cpus() -> usize {
    // 0 means the calling thread.
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return 1 };
    let is_set = |cpu: &usize| set.is_set(*cpu).unwrap_or(false);
    (0..CpuSet::count()).filter(is_set).count().max(1)
}

/// A pool of threads that carry out jobs in parallel.
///
/// Operations and calls begin in the order of submission. Computations begin [by lane](Lane), and no more of them run at
/// once than there are CPUs: more threads would only take the CPU from the loop. Where both wait, they take turns.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<PoolState>,
    work: Condvar,
    name: String,
    config: ThreadPoolConfig,
    birth: ThreadBirth,
    done: Box<dyn Fn(u64, i32, Answer) + Send + Sync>,
    /// Most computations at once.
    most_computing: usize,
}

#[derive(Default)]
struct PoolState {
    /// Operations and calls.
    jobs: VecDeque<Job>,
    computations: Lanes,
    /// Computations that run.
    computing: usize,
    /// The last job that was taken is a computation.
    computed_last: bool,
    idle: usize,
    /// Threads started that do not run yet.
    starting: usize,
    /// Threads that have not retired.
    alive: usize,
    closing: bool,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool without threads. A pool thread calls `done` with each operation's `user_data`, result and answer.
    pub(crate) fn new(
        name: &str,
        config: ThreadPoolConfig,
        birth: ThreadBirth,
        done: impl Fn(u64, i32, Answer) + Send + Sync + 'static,
    ) -> Self {
        ThreadPool {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                name: format!("{name}-pool"),
                config: ThreadPoolConfig { max: config.max.max(1), ..config },
                birth,
                done: Box::new(done),
                most_computing: cpus(),
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
            jobs.drain(..).for_each(|job| job.run_at_once(&self.shared.done));
            return Ok(());
        }
        let mut state = lock(&self.shared.state);
        let alone = state.alive == 0;
        let before = state.runnable(&self.shared);
        for job in jobs.drain(..) {
            match job {
                Job::Compute(lane, call) => state.computations.push(lane, call),
                other => state.jobs.push_back(other),
            }
        }
        let wake = state.idle.min(state.runnable(&self.shared) - before);
        let is_short = state.reserve_if_short(&self.shared);
        drop(state);
        (0..wake).for_each(|_| self.shared.work.notify_one());
        if is_short
            && let Err(error) = self.shared.start_reserved(&self.shared.birth)
            && alone
        {
            let mut state = lock(&self.shared.state);
            jobs.extend(state.jobs.drain(..));
            while let Some((lane, call)) = state.computations.pop() {
                jobs.push(Job::Compute(lane, call));
            }
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
    fn reserve_if_short(&mut self, shared: &Shared) -> bool {
        let is_short = self.runnable(shared) > self.idle + self.starting;
        let max = shared.config.max.min(ThreadPoolConfig::MOST);
        let may_start = is_short && self.alive < max && !self.closing;
        if may_start {
            self.reserve();
        }
        may_start
    }

    /// Number of jobs that may begin now.
    fn runnable(&self, shared: &Shared) -> usize {
        let free = shared.most_computing.saturating_sub(self.computing);
        self.jobs.len() + self.computations.len().min(free)
    }

    /// Takes the next job. A computation counts as running from now on.
    fn take(&mut self, shared: &Shared) -> Option<Job> {
        let may_compute = self.computing < shared.most_computing && self.computations.len() > 0;
        if may_compute && (self.jobs.is_empty() || !self.computed_last) {
            let (lane, call) = self.computations.pop()?;
            self.computing += 1;
            self.computed_last = true;
            return Some(Job::Compute(lane, call));
        }
        self.computed_last = false;
        self.jobs.pop_front()
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
        if state.reserve_if_short(self) {
            drop(state);
            let _ = self.start_reserved(&ThreadBirth::default());
            state = lock(&self.state);
        }
        state.starting -= 1;
        loop {
            if let Some(job) = state.take(self) {
                drop(state);
                let computes = matches!(job, Job::Compute(..));
                job.run(&self.done);
                state = lock(&self.state);
                state.computing -= usize::from(computes);
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
            let has_work = state.runnable(self) > 0;
            if timed_out && !has_work && surplus && !state.closing {
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
        let pool = ThreadPool::new("test", config, ThreadBirth::default(), move |_, _, _| {
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
        let pool = ThreadPool::new("test", config, ThreadBirth::default(), move |n, _, _| {
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
        let pool = ThreadPool::new("test", config, ThreadBirth::default(), |_, _, _| {});
        let error = pool.start_minimum().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("1025 threads"), "{error}");
        assert_eq!(alive(&pool), 0);
    }

    /// So many computations of one lane leave other jobs, and the loop, their CPU.
    #[test]
    fn no_more_computations_run_than_there_are_cpus_and_operations_go_on_beside_them() {
        let (done, answered) = std::sync::mpsc::channel();
        let done = Mutex::new(done);
        let pool = ThreadPool::new(
            "test",
            ThreadPoolConfig::default(),
            ThreadBirth::default(),
            move |n, _, _| lock(&done).send(n).unwrap(),
        );
        let most = pool.shared.most_computing;
        let begun = Arc::new((Mutex::new((0, 0)), Condvar::new()));
        let release = Arc::new(Barrier::new(most + 1));
        let lane = Lane::default();
        let computation = || {
            let (begun, release) = (begun.clone(), release.clone());
            let call = move || {
                let (running, changed) = &*begun;
                lock(running).0 += 1;
                changed.notify_all();
                release.wait();
                lock(running).1 += 1;
                changed.notify_all();
            };
            Job::Compute(lane.clone(), Box::new(call))
        };
        let wait = |what: &dyn Fn((usize, usize)) -> bool| {
            let (running, changed) = &*begun;
            drop(changed.wait_while(lock(running), |now| !what(*now)).unwrap());
        };
        pool.submit(&mut (0..3 * most).map(|_| computation()).collect()).unwrap();
        wait(&|(begun, _)| begun == most);
        pool.submit(&mut jobs(5)).unwrap();
        // Several threads may have them.
        let mut done: Vec<_> = answered.iter().take(5).collect();
        done.sort();
        assert_eq!(done, [0, 1, 2, 3, 4]);
        for round in 1..=3 {
            assert_eq!(lock(&begun.0).0, round * most);
            release.wait();
            wait(&|(begun, ended)| ended == round * most && begun == (round + 1).min(3) * most);
        }
    }

    /// Dropping a pool whose threads are starting each other joins all of them.
    #[test]
    fn dropping_a_pool_joins_threads_that_others_are_starting() {
        for _ in 0..100 {
            let shared;
            {
                let config = ThreadPoolConfig { min: 0, max: 16 };
                let pool = ThreadPool::new("test", config, ThreadBirth::default(), |_, _, _| {});
                pool.submit(&mut jobs(16)).unwrap();
                shared = Arc::downgrade(&pool.shared);
            }
            assert!(shared.upgrade().is_none(), "a thread is left that holds on to the pool");
        }
    }
}
