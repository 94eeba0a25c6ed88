//! What the daemon takes from the machine: threads, the time of day, and processes. The simulator has another one.

use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::process::ExitStatus;
use std::rc::Rc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, SystemTime};

use block::Threads;
use event_loop::{
    Chosen, EventLoop, IoThread, IoThreadConfig, LoopHandle, SpawnError, ThreadEnd, oneshot,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The machine that the daemon runs on.
///
/// Called by the control thread only. Requests do not pass through it.
pub trait Host: Debug {
    /// Starts a thread that runs a loop. `prepare` runs before the first iteration.
    ///
    /// # Errors
    ///
    /// The thread or its loop cannot be created.
    fn start_io_thread(
        &self,
        config: IoThreadConfig,
        prepare: Box<dyn FnOnce() + Send>,
    ) -> Result<Box<dyn HostThread>, SpawnError>;

    /// Starts a thread that does `work`, which may block, and ends.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    fn start_thread(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()>;

    /// Returns the threads that open and close nodes.
    fn threads(&self) -> Threads {
        Threads::default()
    }

    /// Returns the time of day, for events.
    fn time_of_day(&self) -> SystemTime;

    /// Returns the way to start the new program of an upgrade.
    ///
    /// `None`: the daemon's [`Spawner`](crate::spawner::Spawner) starts it.
    fn successor(&self) -> Option<Rc<dyn Successor>>;

    /// Blocks the control thread until a descriptor has one of these events.
    ///
    /// May return earlier.
    fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags);

    /// Calls `late` on another thread if the returned guard still exists after `time`.
    ///
    /// For the end of a daemon whose control thread blocks.
    fn unless_ended(&self, time: Duration, late: Box<dyn FnOnce() + Send>) -> Box<dyn Any>;

    /// Ends the process at once, and takes nothing down.
    ///
    /// `code`: the exit status, 0 to 255.
    fn exit(&self, code: i32) -> !;
}

/// Starts and ends the new program of an upgrade.
///
/// There is one new program at a time.
pub trait Successor {
    /// Starts the program with its end of the hand-over. Completes with its process ID.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    fn start<'a>(
        &'a self,
        control: &'a EventLoop,
        to: OwnedFd,
    ) -> Pin<Box<dyn Future<Output = io::Result<u32>> + 'a>>;

    /// Kills the program that was started last, if it still runs.
    ///
    /// # Errors
    ///
    /// It cannot be ended.
    fn end(&self) -> io::Result<()>;

    /// Returns the last line of errors of the program that was started last, once it has ended.
    ///
    /// `None`: it has written none, or to this process' standard error.
    fn last_error(&self) -> Option<String> {
        None
    }

    /// Waits for the end of the program that was started last.
    ///
    /// # Errors
    ///
    /// Its end cannot be waited for.
    fn ended<'a>(
        &'a self,
        control: &'a EventLoop,
    ) -> Pin<Box<dyn Future<Output = io::Result<ExitStatus>> + 'a>>;
}

/// A thread that runs a loop. Dropping it stops the loop and waits for its end.
pub trait HostThread {
    /// Returns the handle of the loop.
    fn handle(&self) -> &LoopHandle;

    /// Returns the ring that the loop uses, and why not a better one.
    fn ring(&self) -> &Chosen;

    /// Completes when the loop has ended. Only the first future ever completes.
    fn end(&mut self) -> Pin<Box<dyn Future<Output = ThreadEnd>>>;
}

/// Threads, clock and processes of the operating system.
#[derive(Debug, Default)]
pub struct OperatingSystem;

impl Host for OperatingSystem {
    fn start_io_thread(
        &self,
        config: IoThreadConfig,
        prepare: Box<dyn FnOnce() + Send>,
    ) -> Result<Box<dyn HostThread>, SpawnError> {
        Ok(Box::new(IoThread::spawn_with(config, move |_| prepare())?))
    }

    fn start_thread(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
    }

    fn time_of_day(&self) -> SystemTime {
        SystemTime::now()
    }

    fn successor(&self) -> Option<Rc<dyn Successor>> {
        None
    }

    fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags) {
        // An error of the descriptor shows in its next use.
        let _ = poll(&mut [PollFd::new(fd, events)], PollTimeout::NONE);
    }

    fn unless_ended(&self, time: Duration, late: Box<dyn FnOnce() + Send>) -> Box<dyn Any> {
        let (guard, ended) = mpsc::channel::<()>();
        let work = move || {
            if ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                late();
            }
        };
        if let Err(error) = self.start_thread("stop-timeout", Box::new(work)) {
            log::warn!("stop-timeout: no thread can be started: {error}");
        }
        Box::new(guard)
    }

    fn exit(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}

impl HostThread for IoThread {
    fn handle(&self) -> &LoopHandle {
        self.handle()
    }

    fn ring(&self) -> &Chosen {
        self.ring()
    }

    fn end(&mut self) -> Pin<Box<dyn Future<Output = ThreadEnd>>> {
        Box::pin(self.end())
    }
}

/// Does `work`, which waits for the disk, on a new thread called `name`, and returns its result.
///
/// # Errors
///
/// The thread cannot be started, or has ended without a result.
pub(super) async fn on_a_thread<T: Send + 'static>(
    host: &dyn Host,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, is_done) = oneshot::channel();
    host.start_thread(name, Box::new(move || done.send(work())))?;
    is_done.await.map_err(|_| io::Error::other("its thread has ended"))
}
