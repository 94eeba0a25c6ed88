//! I/O threads: a named thread that runs a loop (creation contract).

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
    /// The loop, whose name is also the thread's.
    pub event_loop: LoopConfig,
    /// Numbers of the CPUs on which the thread may run, from 0 to 1023; empty for those of its creator. The
    /// threads of the loop's pool inherit CPUs and scheduling.
    pub cpus: Vec<usize>,
    /// Scheduling of the thread; `None` for that of its creator.
    pub scheduling: Option<Scheduling>,
}

/// A thread that runs an event loop.
///
/// Dropping it stops and joins the thread. Dropped on that very thread, it only stops.
#[derive(Debug)]
pub struct IoThread {
    handle: LoopHandle,
    ring: Chosen,
    thread: Option<JoinHandle<io::Result<()>>>,
    /// `None` once it was taken.
    end: Option<oneshot::Receiver<ThreadEnd>>,
}

/// Why an I/O thread's loop has ended.
#[derive(Debug)]
pub enum ThreadEnd {
    /// It was stopped.
    Stopped,
    /// The loop failed. What it served gets no answers any more.
    Failed {
        /// The system call, or the operation on the ring, that failed.
        call: &'static str,
        /// The error of that call.
        error: io::Error,
    },
    /// A callback of the loop panicked.
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

/// Why an I/O thread could not be started. No thread is left behind.
#[derive(Debug)]
pub enum SpawnError {
    /// Creating the thread failed, clone(2).
    Thread(io::Error),
    /// Setting its CPU affinity failed, sched_setaffinity(2).
    Affinity(io::Error),
    /// Setting its scheduling failed.
    Scheduling {
        /// The system call that failed.
        call: &'static str,
        /// The error of that call.
        error: io::Error,
    },
    /// Creating its loop failed.
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
    /// Starts a thread and waits until its loop is created.
    ///
    /// # Errors
    ///
    /// Names the system call and the errno. The loop is created on the thread itself, as SINGLE_ISSUER
    /// requires. If that fails, the error is returned here and the thread has ended.
    pub fn spawn(config: IoThreadConfig) -> Result<IoThread, SpawnError> {
        Self::spawn_with(config, |_| {})
    }

    /// Starts a thread, and calls `prepare` on it before the first iteration.
    ///
    /// Otherwise like [`spawn`](Self::spawn).
    ///
    /// # Errors
    ///
    /// Those of [`spawn`](Self::spawn).
    pub fn spawn_with(
        config: IoThreadConfig,
        prepare: impl FnOnce(&EventLoop) + Send + 'static,
    ) -> Result<IoThread, SpawnError> {
        let (born, birth) = mpsc::sync_channel(1);
        let (ended, end) = oneshot::channel();
        // Thread names cannot contain NUL; the kernel cuts them to 15 bytes.
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
                // Sent before the loop shuts down, which may wait for a disk.
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
        // If refused, timers are late by the kernel's default slack.
        let _ = set_timerslack(1);
        EventLoop::new(config.event_loop).map_err(SpawnError::Loop)
    }

    /// Returns the handle of its loop.
    pub fn handle(&self) -> &LoopHandle {
        &self.handle
    }

    /// Returns the ring that its loop uses, and why not a better one.
    pub fn ring(&self) -> &Chosen {
        &self.ring
    }

    /// Completes when the loop has been stopped or has failed.
    ///
    /// A failed loop still holds its memory. Only the first future ever completes. Without a call of this, a
    /// failure shows only when the thread is [stopped](Self::stop).
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
    /// The error that ended the loop.
    pub fn stop(mut self) -> io::Result<()> {
        self.join()
    }

    fn join(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.handle.stop();
        if thread.thread().id() == std::thread::current().id() {
            // Dropped on its own loop's thread, which cannot join itself: it ends after this iteration.
            return Ok(());
        }
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the I/O thread panicked")))
    }
}

/// A copy of an error, as `io::Error` is not `Clone`.
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
