//! I/O threads: a named thread that runs a loop (contract E4).

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::prctl::set_timerslack;
use nix::unistd::Pid;

use crate::event_loop::{EventLoop, LoopConfig};
use crate::handle::LoopHandle;
use crate::oneshot;
use crate::ring::setup::{Chosen, SetupError};
use crate::scheduling::Scheduling;

/// How to start an I/O thread.
#[derive(Debug, Clone, Default)]
pub struct IoThreadConfig {
    /// The loop; its name is the thread's.
    pub event_loop: LoopConfig,
    /// CPUs the thread may run on; empty means as its creator. The threads of its loop's pool take
    /// after it in this, and in their scheduling.
    pub cpus: Vec<usize>,
    /// How the thread is scheduled; `None` means as its creator.
    pub scheduling: Option<Scheduling>,
}

/// A thread that runs an event loop. Dropping it stops and joins it (but on that very thread, where
/// it only stops).
pub struct IoThread {
    handle: LoopHandle,
    ring: Chosen,
    thread: Option<JoinHandle<io::Result<()>>>,
    /// Until it has been asked for.
    end: Option<oneshot::Receiver<ThreadEnd>>,
}

/// Why an I/O thread's loop turns no more.
#[derive(Debug)]
pub enum ThreadEnd {
    /// It was stopped.
    Stopped,
    /// It failed: what it served hangs from here on.
    Failed {
        /// The system call, or the operation on the ring, that failed.
        call: &'static str,
        /// Why.
        error: io::Error,
    },
    /// One of its callbacks panicked.
    Panicked,
}

impl fmt::Display for ThreadEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ThreadEnd::Stopped => f.write_str("stopped"),
            ThreadEnd::Failed { call, error } => write!(f, "{call} failed: {error}"),
            ThreadEnd::Panicked => f.write_str("panicked"),
        }
    }
}

/// An I/O thread could not be started. No thread is left behind.
#[derive(Debug)]
pub enum SpawnError {
    /// The thread itself, by clone(2).
    Thread(io::Error),
    /// Its CPU affinity, by sched_setaffinity(2).
    Affinity(io::Error),
    /// Its scheduling.
    Scheduling {
        /// The system call that failed.
        call: &'static str,
        /// Why.
        error: io::Error,
    },
    /// Its loop.
    Loop(SetupError),
}

impl fmt::Display for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpawnError::Thread(error) => write!(f, "clone failed: {error}"),
            SpawnError::Affinity(error) => {
                write!(f, "sched_setaffinity failed: {error}")?;
                match error.kind() {
                    io::ErrorKind::InvalidInput => {
                        f.write_str(": this process may run on none of the CPUs named")
                    }
                    _ => Ok(()),
                }
            }
            SpawnError::Scheduling { call, error } => write!(f, "{call} failed: {error}"),
            SpawnError::Loop(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SpawnError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SpawnError::Thread(error) | SpawnError::Affinity(error) => Some(error),
            SpawnError::Scheduling { error, .. } => Some(error),
            SpawnError::Loop(error) => Some(error),
        }
    }
}

impl IoThread {
    /// Starts a thread and waits until its loop stands.
    ///
    /// # Errors
    ///
    /// The loop is created on the thread itself, as io_uring's SINGLE_ISSUER wants it; failure
    /// comes back here, with the name of the call and the errno, and the thread is gone.
    pub fn spawn(config: IoThreadConfig) -> Result<IoThread, SpawnError> {
        Self::spawn_with(config, |_| {})
    }

    /// The same; `prepare` is called on the thread, before the loop turns for the first time.
    ///
    /// # Errors
    ///
    /// As [`spawn`](Self::spawn).
    pub fn spawn_with(
        config: IoThreadConfig,
        prepare: impl FnOnce(&EventLoop) + Send + 'static,
    ) -> Result<IoThread, SpawnError> {
        let (born, birth) = mpsc::sync_channel(1);
        let (ended, end) = oneshot::channel();
        // A NUL cannot be in a name; the kernel cuts it to 15 bytes.
        let name = config.event_loop.name.replace('\0', "");
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                let event_loop = match Self::create(config) {
                    Ok(event_loop) => event_loop,
                    Err(error) => {
                        let _ = born.send(Err(error));
                        return Ok(());
                    }
                };
                prepare(&event_loop);
                if born.send(Ok((event_loop.handle(), event_loop.ring().clone()))).is_err() {
                    return Ok(());
                }
                drop(born);
                let result = event_loop.turn_until_stopped();
                // Now, not after the shutting down, which may wait for a disk.
                ended.send(match &result {
                    Ok(()) => ThreadEnd::Stopped,
                    Err(error) => {
                        ThreadEnd::Failed { call: event_loop.failed_call(), error: copy(error) }
                    }
                });
                let shut_down = event_loop.shut_down();
                result.and(shut_down)
            })
            .map_err(SpawnError::Thread)?;
        let died = || SpawnError::Thread(io::Error::other("the thread died at its birth"));
        match birth.recv().unwrap_or_else(|_| Err(died())) {
            Ok((handle, ring)) => {
                Ok(IoThread { handle, ring, thread: Some(thread), end: Some(end) })
            }
            Err(error) => {
                let _ = thread.join();
                Err(error)
            }
        }
    }

    fn create(config: IoThreadConfig) -> Result<EventLoop, SpawnError> {
        if !config.cpus.is_empty() {
            let mut set = CpuSet::new();
            for cpu in config.cpus {
                set.set(cpu).map_err(|errno| SpawnError::Affinity(errno.into()))?;
            }
            sched_setaffinity(Pid::from_raw(0), &set)
                .map_err(|errno| SpawnError::Affinity(errno.into()))?;
        }
        if let Some(scheduling) = config.scheduling {
            let failed = |(call, error)| SpawnError::Scheduling { call, error };
            scheduling.apply().map_err(failed)?;
        }
        // Where that is refused, timers are late by what the kernel adds, as everywhere.
        let _ = set_timerslack(1);
        EventLoop::new(config.event_loop).map_err(SpawnError::Loop)
    }

    /// The way into its loop.
    pub fn handle(&self) -> &LoopHandle {
        &self.handle
    }

    /// What its loop runs on, and why not on more.
    pub fn ring(&self) -> &Chosen {
        &self.ring
    }

    /// Completes when the loop turns no more: stopped, or failed and then before anything that it
    /// holds is let go of. To be asked for once: what it gives the second time never completes.
    /// Where nobody asks, a failure shows only when the thread is [stopped](Self::stop).
    pub fn end(&mut self) -> impl Future<Output = ThreadEnd> + 'static + use<> {
        let end = self.end.take();
        async move {
            match end {
                Some(end) => end.await.unwrap_or(ThreadEnd::Panicked),
                None => std::future::pending().await,
            }
        }
    }

    /// Stops the loop and joins the thread.
    ///
    /// # Errors
    ///
    /// What the loop ended with.
    pub fn stop(mut self) -> io::Result<()> {
        self.join()
    }

    fn join(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.handle.stop();
        if thread.thread().id() == std::thread::current().id() {
            // Dropped by its own loop: it cannot wait for itself, and ends after this iteration.
            return Ok(());
        }
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the I/O thread panicked")))
    }
}

/// The same error for somebody else.
fn copy(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            log::error!("I/O thread {}: {error}", self.handle.name());
        }
    }
}
