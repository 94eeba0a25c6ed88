//! Other traffic: periodic events that keep a loop awake.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use event_loop::{Handler, LoopHandle, Progress, Trigger};
use nix::poll::PollFlags;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::unistd::Pid;

use crate::machine::on_loop;

/// An eventfd that a loop watches and a thread writes to periodically. Dropping it ends the thread. The loop continues to
/// watch the eventfd.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Traffic {
    /// Causes events on the loop with the period `every`, from one of `cpus`; empty for those of the caller.
    ///
    /// # Errors
    ///
    /// An eventfd, thread or CPU is unavailable, or the loop has ended.
    pub fn start(handle: &LoopHandle, every: Duration, cpus: &[usize]) -> Result<Traffic> {
        struct Nothing;
        impl Handler for Nothing {
            fn ready(&self, _events: u32) -> Progress {
                Progress::Done
            }
        }
        let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let fd: Arc<OwnedFd> = Arc::new(fd.context("eventfd")?.into());
        let watched = fd.clone();
        on_loop(handle, move |event_loop| {
            let events = PollFlags::POLLIN.bits().cast_unsigned().into();
            event_loop.add_handler(watched, events, Trigger::Edge, Rc::new(Nothing));
        })?;
        let mut set = CpuSet::new();
        for &cpu in cpus {
            set.set(cpu).with_context(|| format!("CPU {cpu} does not exist"))?;
        }
        let bound = !cpus.is_empty();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        let thread = std::thread::Builder::new().name("traffic".into()).spawn(move || {
            if bound {
                // If binding is denied here, it fails for the loop's thread too, which reports it.
                let _ = sched_setaffinity(Pid::from_raw(0), &set);
            }
            while !stopping.load(Ordering::Relaxed) {
                std::thread::sleep(every);
                // A full counter is an event too, but is never reached.
                let _ = nix::unistd::write(&fd, &1u64.to_ne_bytes());
            }
        });
        Ok(Traffic { stop, thread: Some(thread.context("starting a thread")?) })
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
