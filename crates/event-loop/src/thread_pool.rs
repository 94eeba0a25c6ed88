//! Threads for what would block the loop: `aio=threads`, and all file I/O where there is no
//! io_uring. Started on demand, retired when idle.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::blocking::BlockingOp;
use crate::sync::lock;

/// How many threads a loop's pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPoolConfig {
    /// Threads that are there from the loop's beginning to its end: QEMU's `thread-pool-min`. No
    /// more than `max`.
    pub min: usize,
    /// Most threads, at least 1: QEMU's `thread-pool-max`.
    pub max: usize,
}

impl Default for ThreadPoolConfig {
    fn default() -> Self {
        ThreadPoolConfig { min: 0, max: 64 }
    }
}

/// How long an idle thread beyond the minimum stays.
const IDLE: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(10) };

/// A job: an operation, and what to do with its result.
pub(crate) struct Job {
    pub(crate) op: BlockingOp,
    pub(crate) user_data: u64,
}

/// A pool of threads that carry out jobs in the order they were given, several at once.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    name: String,
    config: ThreadPoolConfig,
    done: Box<dyn Fn(u64, i32) + Send + Sync>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    /// Threads that have been started and do not run yet.
    starting: usize,
    /// Threads that have not retired.
    alive: usize,
    closing: bool,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool without threads yet. `done` gets each job's `user_data` and result, on a pool thread.
    pub(crate) fn new(
        name: &str,
        config: ThreadPoolConfig,
        done: impl Fn(u64, i32) + Send + Sync + 'static,
    ) -> Self {
        ThreadPool {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                name: format!("{name}-pool"),
                config: ThreadPoolConfig { max: config.max.max(1), ..config },
                done: Box::new(done),
            }),
        }
    }

    /// Starts the threads that stay.
    pub(crate) fn start_minimum(&self) -> io::Result<()> {
        let mut state = lock(&self.shared.state);
        while state.alive < self.shared.config.min.min(self.shared.config.max) {
            self.shared.start_thread(&mut state)?;
        }
        Ok(())
    }

    /// Takes jobs over, with one lock, and without a system call where all threads are busy. Fails,
    /// and leaves them, only when there is no thread at all and none can be started.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) -> io::Result<()> {
        let mut state = lock(&self.shared.state);
        if state.alive == 0 {
            self.shared.start_thread(&mut state)?;
        }
        let wake = state.idle.min(jobs.len());
        state.jobs.extend(jobs.drain(..));
        self.shared.start_one_if_short(&mut state, 0);
        drop(state);
        (0..wake).for_each(|_| self.shared.work.notify_one());
        Ok(())
    }
}

impl Shared {
    fn start_thread(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        state.threads.retain(|thread| !thread.is_finished());
        let shared = self.clone();
        let thread = std::thread::Builder::new();
        state.threads.push(thread.name(self.name.clone()).spawn(move || shared.work())?);
        state.starting += 1;
        state.alive += 1;
        Ok(())
    }

    /// Starts a thread if there are more jobs than threads that will take one: those idle or just
    /// starting, and `taking`, the caller. That thread starts the next: a burst of jobs does not hold
    /// up the loop with the starting of as many threads.
    fn start_one_if_short(self: &Arc<Self>, state: &mut State, taking: usize) {
        let is_short = state.jobs.len() > state.idle + state.starting + taking;
        if is_short && state.alive < self.config.max && !state.closing {
            // Where no more can be had, those that there are do the work.
            let _ = self.start_thread(state);
        }
    }

    fn work(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        state.starting -= 1;
        self.start_one_if_short(&mut state, 1);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                (self.done)(job.user_data, job.op.run());
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

    /// Waits for work: for ever if this thread is one of those that stay, else no longer than for
    /// [`IDLE`], and then the answer is true.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, stays: bool) -> (MutexGuard<'a, State>, bool) {
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
        let threads = {
            let mut state = lock(&self.shared.state);
            state.closing = true;
            std::mem::take(&mut state.threads)
        };
        self.shared.work.notify_all();
        for thread in threads {
            // A panic of a pool thread was reported by the panic hook.
            let _ = thread.join();
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
            assert!(started.elapsed() < Duration::from_secs(20), "LOST: {what}");
            std::thread::yield_now();
        }
    }

    fn jobs(count: u64) -> Vec<Job> {
        let job = |user_data| Job { op: BlockingOp::nothing(), user_data };
        (0..count).map(job).collect()
    }

    /// Each burst needs all the threads there may be; in between, those that stay, stay.
    #[test]
    fn threads_are_started_on_demand_and_retired_when_idle() {
        let (all, min) = (8, 2);
        let together = Arc::new(Barrier::new(all + 1));
        let there = together.clone();
        let config = ThreadPoolConfig { min, max: all };
        let pool = ThreadPool::new("test", config, move |_, _| {
            there.wait();
        });
        assert_eq!(alive(&pool), 0);
        pool.start_minimum().unwrap();
        assert_eq!(alive(&pool), min);
        for _ in 0..3 {
            let mut burst = jobs(all as u64);
            pool.submit(&mut burst).unwrap();
            assert!(burst.is_empty());
            // Nobody passes before eight threads have a job each.
            together.wait();
            assert_eq!(alive(&pool), all);
            until("the idle threads to retire", || alive(&pool) == min);
        }
    }

    #[test]
    fn there_are_never_more_threads_than_allowed_and_no_job_is_lost() {
        let done = Arc::new(Mutex::new(Vec::new()));
        let there = done.clone();
        let config = ThreadPoolConfig { min: 9, max: 3 };
        let pool = ThreadPool::new("test", config, move |n, _| lock(&there).push(n));
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
}
