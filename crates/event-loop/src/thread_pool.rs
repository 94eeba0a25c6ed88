//! Threads for what would block the loop: `aio=threads`, and all file I/O where there is no
//! io_uring. Started on demand, retired when idle.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::blocking::BlockingOp;
use crate::sync::lock;

/// How many threads a loop's pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPoolConfig {
    /// Threads that, once started, stay though they be idle: QEMU's `thread-pool-min`.
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
const IDLE: Duration = Duration::from_secs(10);

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
                config,
                done: Box::new(done),
            }),
        }
    }

    /// Queues a job. Fails only when there is no thread at all and none can be started.
    pub(crate) fn submit(&self, job: Job) -> Result<(), (Job, io::Error)> {
        let mut state = lock(&self.shared.state);
        if state.idle <= state.jobs.len() && state.alive < self.shared.config.max.max(1) {
            state.threads.retain(|thread| !thread.is_finished());
            let shared = self.shared.clone();
            let name = self.shared.name.clone();
            match std::thread::Builder::new().name(name).spawn(move || shared.work()) {
                Ok(thread) => {
                    state.threads.push(thread);
                    state.alive += 1;
                }
                Err(error) if state.alive == 0 => return Err((job, error)),
                Err(_) => {}
            }
        }
        state.jobs.push_back(job);
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }
}

impl Shared {
    fn work(&self) {
        let mut state = lock(&self.state);
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
            let (next, timeout) = self
                .work
                .wait_timeout(state, IDLE)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            state = next;
            state.idle -= 1;
            let surplus = state.alive > self.config.min;
            if timeout.timed_out() && state.jobs.is_empty() && surplus {
                state.alive -= 1;
                return;
            }
        }
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
