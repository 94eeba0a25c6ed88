//! The I/O threads of a daemon, by id.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc;

use control::{IothreadOptions, Value};
use event_loop::{
    Chosen, EventLoop, IoThreadConfig, LoopConfig, LoopHandle, PollParams, ThreadBirth, ThreadEnd,
    ThreadPoolConfig,
};
use nix::unistd::{Pid, gettid};
use sandbox::{Failed, Sandbox};

use super::DaemonError;
use super::host::{Host, HostThread};
use super::statistics::{ThreadStatistics, cpu_ns};

/// The thread of exports without `iothread`. Options cannot have this id.
const DEFAULT: &str = "io";

/// The I/O threads: those of `--object iothread` and, once an export needs it, the default thread.
pub(super) struct IoThreads {
    event_loop: EventLoop,
    host: Rc<dyn Host>,
    threads: Vec<Thread>,
    default: Option<Thread>,
    /// The loops of all threads, for the watchdog. Includes loops that have ended.
    alive: Rc<RefCell<Vec<LoopHandle>>>,
    sandbox: Option<Sandbox>,
    /// Called when a thread has failed.
    on_failure: Rc<dyn Fn(DaemonError)>,
}

/// An I/O thread that runs.
pub(super) struct Thread {
    pub(super) options: IothreadOptions,
    /// Its number in the system, gettid(2).
    pub(super) tid: Pid,
    thread: Box<dyn HostThread>,
}

impl Thread {
    /// The current limit of the thread's polling, nanoseconds.
    pub(super) fn poll_max_ns(&self) -> u64 {
        poll_params(&self.options).bound_ns(self.thread.handle().stats())
    }
}

impl IoThreads {
    pub(super) fn new(
        event_loop: &EventLoop,
        host: Rc<dyn Host>,
        sandbox: Option<Sandbox>,
        on_failure: impl Fn(DaemonError) + 'static,
    ) -> Self {
        let (event_loop, on_failure) = (event_loop.clone(), Rc::new(on_failure));
        let alive = Rc::default();
        let threads = Vec::new();
        IoThreads { event_loop, host, threads, default: None, sandbox, alive, on_failure }
    }

    /// Starts a thread with the options of `--object iothread`.
    pub(super) fn add(&mut self, options: &IothreadOptions) -> Result<(), DaemonError> {
        let thread = self.start(options)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Stops a thread without exports, and waits for its end.
    pub(super) fn remove(&mut self, id: &str) {
        self.threads.retain(|thread| thread.options.id != id);
    }

    /// The thread with that id, other than the default thread.
    pub(super) fn get(&self, id: &str) -> Option<&Thread> {
        self.threads.iter().find(|thread| thread.options.id == id)
    }

    /// All threads but the default thread.
    pub(super) fn named(&self) -> &[Thread] {
        &self.threads
    }

    /// Sets a property of a running thread.
    pub(super) fn set(&mut self, id: &str, name: &str, value: Value) -> Result<(), DaemonError> {
        let Some(thread) = self.threads.iter_mut().find(|thread| thread.options.id == id) else {
            return Err(DaemonError::new(format!("object '{id}' not found")));
        };
        let options = thread.options.with_property(name, value)?;
        let fixed = |options: &IothreadOptions| {
            (options.aio_max_batch, options.thread_pool_min, options.thread_pool_max)
        };
        if fixed(&options) != fixed(&thread.options) {
            let message = format!("Property 'iothread.{name}' cannot change while the thread runs");
            return Err(DaemonError::new(message));
        }
        let params = poll_params(&options);
        let set = move |event_loop: &EventLoop| event_loop.set_poll_params(params);
        thread.thread.handle().spawn(set).map_err(DaemonError::new)?;
        thread.options = options;
        Ok(())
    }

    /// The loops of the named threads, or of the default thread if `ids` is empty.
    pub(super) fn handles(&mut self, ids: &[String]) -> Result<Vec<LoopHandle>, DaemonError> {
        if ids.is_empty() {
            let default = match self.default.take() {
                Some(thread) => thread,
                None => {
                    self.start(&IothreadOptions { id: DEFAULT.into(), ..Default::default() })?
                }
            };
            return Ok(vec![self.default.insert(default).thread.handle().clone()]);
        }
        ids.iter()
            .map(|id| {
                let found = self.get(id).map(|thread| thread.thread.handle().clone());
                found.ok_or_else(|| DaemonError::new(format!("iothread \"{id}\" not found")))
            })
            .collect()
    }

    /// The loops of all threads, including threads that start later. The caller removes loops that have ended.
    pub(super) fn alive(&self) -> Rc<RefCell<Vec<LoopHandle>>> {
        self.alive.clone()
    }

    /// All loops.
    pub(super) fn all(&self) -> Vec<LoopHandle> {
        self.iter().map(|thread| thread.thread.handle().clone()).collect()
    }

    /// The statistics of each thread.
    pub(super) fn statistics(&self) -> Vec<ThreadStatistics> {
        let of = |thread: &Thread| ThreadStatistics {
            id: thread.options.id.clone(),
            tid: thread.tid,
            poll_max_ns: thread.poll_max_ns(),
            handle: thread.thread.handle().clone(),
            cpu_ns: cpu_ns(thread.tid),
        };
        self.iter().map(of).collect()
    }

    /// The kind of ring of each thread, by its id.
    pub(super) fn rings(&self) -> impl Iterator<Item = (&str, &Chosen)> {
        self.iter().map(|thread| (thread.options.id.as_str(), thread.thread.ring()))
    }

    fn iter(&self) -> impl Iterator<Item = &Thread> {
        self.threads.iter().chain(&self.default)
    }

    /// Starts a thread, and a task that waits for its end.
    fn start(&self, options: &IothreadOptions) -> Result<Thread, DaemonError> {
        let (born, birth) = mpsc::channel();
        let sandbox = self.sandbox.clone();
        let config = config(options, pool_birth(sandbox.as_ref()));
        let prepare = move || {
            // Once the thread has its ring, it needs no further privileges.
            let confined = sandbox.map_or(Ok(()), |sandbox| sandbox.io_thread());
            // `start` waits for this message.
            let _ = born.send(confined.map(|()| gettid()));
        };
        let started = self.host.start_io_thread(config, Box::new(prepare));
        let mut thread = started.map_err(DaemonError::with_advice)?;
        let tid = birth.recv().map_err(DaemonError::new)?.map_err(|error| {
            DaemonError::new(error).of(&format!("sandbox of I/O thread \"{}\"", options.id))
        })?;
        let (id, end, on_failure) = (options.id.clone(), thread.end(), self.on_failure.clone());
        self.event_loop.spawn(async move {
            match end.await {
                ThreadEnd::Stopped => {}
                end => on_failure(DaemonError::new(format!("I/O thread \"{id}\": {end}"))),
            }
        });
        self.alive.borrow_mut().push(thread.handle().clone());
        Ok(Thread { options: options.clone(), tid, thread })
    }
}

fn poll_params(options: &IothreadOptions) -> PollParams {
    let defaults = PollParams::of(options.poll_policy);
    PollParams {
        goal: options.poll_goal,
        max_ns: options.poll_max_ns.unwrap_or(defaults.max_ns),
        grow: small(options.poll_grow),
        shrink: small(options.poll_shrink),
        weight: options.poll_weight,
        ..defaults
    }
}

fn small(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// The first function of the threads of a loop's pool.
pub(super) fn pool_birth(sandbox: Option<&Sandbox>) -> ThreadBirth {
    birth(sandbox, Sandbox::pool_thread)
}

/// The first function of threads that connect to servers.
pub(super) fn helper_birth(sandbox: Option<&Sandbox>) -> ThreadBirth {
    birth(sandbox, Sandbox::helper_thread)
}

/// The first function of threads in which a foreign library does I/O.
pub(super) fn library_birth(sandbox: Option<&Sandbox>) -> ThreadBirth {
    birth(sandbox, Sandbox::library_thread)
}

fn birth(sandbox: Option<&Sandbox>, confine: fn(&Sandbox) -> Result<(), Failed>) -> ThreadBirth {
    let Some(sandbox) = sandbox.cloned() else { return ThreadBirth::default() };
    ThreadBirth::new(move || {
        if let Err(error) = confine(&sandbox) {
            // The thread must not run without its sandbox, and no caller waits for an error.
            log::error!("sandbox of a thread: {error}");
            std::process::abort();
        }
    })
}

fn config(options: &IothreadOptions, pool_birth: ThreadBirth) -> IoThreadConfig {
    let defaults = LoopConfig::default();
    IoThreadConfig {
        event_loop: LoopConfig {
            name: options.id.clone(),
            entries: match options.aio_max_batch {
                0 => defaults.entries,
                n => small(n).min(defaults.entries),
            },
            poll: poll_params(options),
            thread_pool: ThreadPoolConfig {
                min: options.thread_pool_min as usize,
                max: options.thread_pool_max as usize,
            },
            pool_birth,
            ..defaults
        },
        cpus: options.cpu_affinity.clone(),
        ..IoThreadConfig::default()
    }
}
