//! Threads for calls of librbd that block.
//!
//! A first thread is confined once, and starts a thread per call. A call that hangs, such as one to a monitor that is
//! gone, delays no other. The threads of the library are started by these threads, and inherit their confinement.

use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use event_loop::sync::lock;
use event_loop::{ThreadBirth, oneshot};

use crate::error::OpenError;

/// How long the end of the process waits for images to be closed.
const CLOSING: Duration = Duration::from_secs(5);

type Call = Box<dyn FnOnce() + Send>;

enum Message {
    Run(Call),
    End,
}

/// The threads. Dropping this waits for the calls that are under way, with a limit.
pub(super) struct Threads {
    jobs: Jobs,
    /// Disconnected once no thread is left.
    ended: Mutex<mpsc::Receiver<()>>,
}

/// A way to have calls made.
#[derive(Clone)]
pub(super) struct Jobs(mpsc::Sender<Message>);

impl Threads {
    /// Starts the first thread.
    pub(super) fn start(birth: &ThreadBirth) -> Result<Threads, OpenError> {
        let (jobs, calls) = mpsc::channel();
        let (alive, ended) = mpsc::channel();
        let birth = birth.clone();
        let first = move || {
            birth.call();
            while let Ok(Message::Run(call)) = calls.recv() {
                let alive = alive.clone();
                let job = move || {
                    call();
                    drop(alive);
                };
                if let Err(error) = thread::Builder::new().name("rbd-call".into()).spawn(job) {
                    log::error!("rbd: a thread cannot be started: {error}");
                }
            }
        };
        let started = thread::Builder::new().name("rbd".into()).spawn(first);
        started.map_err(|error| OpenError::new(format!("thread rbd: {error}")))?;
        Ok(Threads { jobs: Jobs(jobs), ended: Mutex::new(ended) })
    }

    /// Returns a way to have calls made. After the end of the threads, calls are dropped.
    pub(super) fn jobs(&self) -> Jobs {
        self.jobs.clone()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let _ = self.jobs.0.send(Message::End);
        if lock(&self.ended).recv_timeout(CLOSING) == Err(RecvTimeoutError::Timeout) {
            let seconds = CLOSING.as_secs();
            log::warn!(
                "rbd: images are not closed after {seconds} seconds; locks stay for a while"
            );
        }
    }
}

impl Jobs {
    /// Queues a call for a thread.
    pub(super) fn post(&self, call: impl FnOnce() + Send + 'static) {
        // Threads that have ended drop the call.
        let _ = self.0.send(Message::Run(Box::new(call)));
    }

    /// Queues a call for a thread, and returns the receiver of its result.
    pub(super) fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (done, result) = oneshot::channel();
        self.post(move || done.send(call()));
        result
    }
}
