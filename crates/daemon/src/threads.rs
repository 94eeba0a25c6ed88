//! The I/O threads of a daemon, by id.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc;

use control::{IothreadOptions, Value};
use event_loop::{
    Chosen, EventLoop, IoThread, IoThreadConfig, LoopConfig, LoopHandle, PollParams, ThreadBirth,
    ThreadEnd, ThreadPoolConfig,
};
use nix::unistd::{Pid, gettid};
use sandbox::{Failed, Sandbox};

use super::DaemonError;
use super::statistics::{ThreadStatistics, cpu_ns};

/// The thread of exports that name none. Not an id that an option can have.
const DEFAULT: &str = "io";

/// The I/O threads: those that were asked for and, once an export needs it, the default one.
pub(super) struct IoThreads {
    event_loop: EventLoop,
    threads: Vec<Thread>,
    default: Option<Thread>,
    /// The loops of all, for who asks whether they still turn; those that have ended, too.
    alive: Rc<RefCell<Vec<LoopHandle>>>,
    sandbox: Option<Sandbox>,
    /// Called when a thread has ended that nobody stopped.
    on_failure: Rc<dyn Fn(DaemonError)>,
}

/// An I/O thread that runs.
pub(super) struct Thread {
    pub(super) options: IothreadOptions,
    /// Its number in the system, gettid(2).
    pub(super) tid: Pid,
    thread: IoThread,
}

impl Thread {
    /// The longest that the thread polls, as it is now, nanoseconds.
    pub(super) fn poll_max_ns(&self) -> u64 {
        poll_params(&self.options).bound_ns(self.thread.handle().stats())
    }
}

impl IoThreads {
    pub(super) fn new(
        event_loop: &EventLoop,
        sandbox: Option<Sandbox>,
        on_failure: impl Fn(DaemonError) + 'static,
    ) -> Self {
        let (event_loop, on_failure) = (event_loop.clone(), Rc::new(on_failure));
        let alive = Rc::default();
        IoThreads { event_loop, threads: Vec::new(), default: None, sandbox, alive, on_failure }
    }

    /// Starts a thread as `--object iothread` asks for it.
    pub(super) fn add(&mut self, options: &IothreadOptions) -> Result<(), DaemonError> {
        let thread = self.start(options)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Stops a thread, which serves nobody, and waits for its end.
    pub(super) fn remove(&mut self, id: &str) {
        self.threads.retain(|thread| thread.options.id != id);
    }

    /// The thread of that name, if it was asked for.
    pub(super) fn get(&self, id: &str) -> Option<&Thread> {
        self.threads.iter().find(|thread| thread.options.id == id)
    }

    /// The threads that were asked for.
    pub(super) fn named(&self) -> &[Thread] {
        &self.threads
    }

    /// Sets a property of a thread that runs.
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

    /// The loops of the threads named, or of the default one when none is.
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

    /// The loops of all threads, of those that are started later as well. Whoever finds that one has
    /// ended takes it out.
    pub(super) fn alive(&self) -> Rc<RefCell<Vec<LoopHandle>>> {
        self.alive.clone()
    }

    /// All loops.
    pub(super) fn all(&self) -> Vec<LoopHandle> {
        self.iter().map(|thread| thread.thread.handle().clone()).collect()
    }

    /// What each has done.
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

    /// What each runs on.
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
        let mut thread = IoThread::spawn_with(config, move |_| {
            // It has its ring: from here on it needs nothing new.
            let confined = sandbox.map_or(Ok(()), |sandbox| sandbox.io_thread());
            // Whoever started it waits.
            let _ = born.send(confined.map(|()| gettid()));
        })
        .map_err(DaemonError::with_advice)?;
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

/// What the threads of a loop's pool do first.
pub(super) fn pool_birth(sandbox: Option<&Sandbox>) -> ThreadBirth {
    birth(sandbox, Sandbox::pool_thread)
}

/// What a thread does first that connects to others.
pub(super) fn helper_birth(sandbox: Option<&Sandbox>) -> ThreadBirth {
    birth(sandbox, Sandbox::helper_thread)
}

/// What a thread does first in which a foreign library does its own I/O.
pub(super) fn library_birth(sandbox: Option<&Sandbox>) -> ThreadBirth {
    birth(sandbox, Sandbox::library_thread)
}

fn birth(sandbox: Option<&Sandbox>, confine: fn(&Sandbox) -> Result<(), Failed>) -> ThreadBirth {
    let Some(sandbox) = sandbox.cloned() else { return ThreadBirth::default() };
    ThreadBirth::new(move || {
        if let Err(error) = confine(&sandbox) {
            // Nobody waits for it, and without its sandbox it must not run.
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
