//! The features of io_uring: set-up flags and operations.

use std::fmt;

use event_loop::{Chosen, EventLoop, LoopConfig, RingChoice, RingFlags, TaskRun};
use io_uring::{IoUring, Probe, opcode};
use nix::errno::Errno;

use super::row;
use daemon::errno::words;

/// The operations that the event loop uses.
const OPERATIONS: &[(&str, u8)] = &[
    ("READ", opcode::Read::CODE),
    ("WRITE", opcode::Write::CODE),
    ("READV", opcode::Readv::CODE),
    ("WRITEV", opcode::Writev::CODE),
    ("READ_FIXED", opcode::ReadFixed::CODE),
    ("WRITE_FIXED", opcode::WriteFixed::CODE),
    ("FSYNC", opcode::Fsync::CODE),
    ("FALLOCATE", opcode::Fallocate::CODE),
    ("POLL_ADD", opcode::PollAdd::CODE),
    ("POLL_REMOVE", opcode::PollRemove::CODE),
    ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
];

/// The result of the probe.
pub(super) struct RingReport {
    /// The loop's choice among its engines, or the error.
    chosen: Result<Chosen, String>,
    /// Each set-up flag on its own, with the result.
    flags: Vec<(&'static str, Result<(), String>)>,
    /// Which of [`OPERATIONS`] exist, and the number of all operations; or the error.
    operations: Result<(Vec<bool>, usize), String>,
}

impl RingReport {
    /// Creates loops, and a ring, on this thread, one after the other.
    pub(super) fn take() -> Self {
        Self {
            chosen: create(RingChoice::default()),
            flags: single_flags()
                .into_iter()
                .map(|(name, flags)| (name, create(RingChoice::Exactly(flags)).map(drop)))
                .collect(),
            operations: operations(),
        }
    }

    /// Whether the loop would run on io_uring.
    fn usable(&self) -> bool {
        self.chosen.as_ref().is_ok_and(|chosen| chosen.flags.is_some())
    }

    /// The errno with which any use of io_uring was refused.
    pub(super) fn refused_altogether(&self) -> Option<Errno> {
        let chosen = self.chosen.as_ref().ok()?;
        match (chosen.flags, chosen.refused.last()) {
            (None, Some((_, errno))) => Some(Errno::from_raw(*errno)),
            _ => None,
        }
    }

    /// The engine that the loop would use, and the reason.
    pub(super) fn choice(&self) -> String {
        match &self.chosen {
            Ok(chosen) => chosen.to_string(),
            Err(error) => format!("none: {error}"),
        }
    }

    /// What would carry out reads and writes, and the reason.
    pub(super) fn aio(&self) -> String {
        let why = match &self.operations {
            _ if !self.usable() => "threads (there is no io_uring)",
            Ok((there, _)) if there.iter().all(|there| *there) => "io_uring",
            Ok(_) => "io_uring, and threads for what the kernel's lacks",
            Err(_) => "io_uring (which operations there are is unknown)",
        };
        why.to_owned()
    }

    #[cfg(test)]
    pub(super) fn refusing(errno: Errno) -> Self {
        let refused = vec![(RingFlags::BEST, errno as i32)];
        Self {
            chosen: Ok(Chosen { flags: None, refused }),
            flags: Vec::new(),
            operations: Err(errno.desc().to_owned()),
        }
    }
}

/// Each flag with the flags that it requires.
fn single_flags() -> [(&'static str, RingFlags); 8] {
    let plain = RingFlags::PLAIN;
    [
        ("no flags", plain),
        ("SINGLE_ISSUER", RingFlags { single_issuer: true, ..plain }),
        ("COOP_TASKRUN", RingFlags { task_run: TaskRun::Coop, ..plain }),
        // Requires a ring with a single issuer.
        ("DEFER_TASKRUN", RingFlags { single_issuer: true, task_run: TaskRun::Defer, ..plain }),
        ("NO_SQARRAY", RingFlags { no_sqarray: true, ..plain }),
        ("SUBMIT_ALL", RingFlags { submit_all: true, ..plain }),
        ("NO_IOWAIT", RingFlags { no_iowait: true, ..plain }),
        ("RESTRICTIONS", RingFlags { restricted: true, ..plain }),
    ]
}

/// Creates a loop as the daemon would.
fn create(ring: RingChoice) -> Result<Chosen, String> {
    let config = LoopConfig { name: "probe".to_owned(), ring, ..LoopConfig::default() };
    match EventLoop::new(config) {
        Ok(event_loop) => Ok(event_loop.ring().clone()),
        Err(error) => Err(words(&error.error)),
    }
}

/// `IORING_REGISTER_PROBE`.
fn operations() -> Result<(Vec<bool>, usize), String> {
    let ring = IoUring::new(1).map_err(|error| words(&error))?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| words(&error))?;
    let there = OPERATIONS.iter().map(|(_, code)| probe.is_supported(*code)).collect();
    let all = (0..=u8::MAX).filter(|code| probe.is_supported(*code)).count();
    Ok((there, all))
}

impl fmt::Display for RingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, result) in &self.flags {
            let value = match result {
                Ok(()) => "yes".to_owned(),
                Err(why) => format!("no: {why}"),
            };
            row(f, &format!("set-up, {name}"), &value)?;
        }
        match &self.operations {
            Ok((there, all)) => {
                let pick = |wanted: bool| {
                    let named = OPERATIONS.iter().zip(there).filter(|(_, there)| **there == wanted);
                    named.map(|((name, _), _)| *name).collect::<Vec<_>>().join(" ")
                };
                row(f, "operations", &format!("{all}, of which ringmill uses {}", pick(true)))?;
                let lacking = pick(false);
                if !lacking.is_empty() {
                    row(f, "operations that lack", &lacking)?;
                }
                Ok(())
            }
            Err(why) => row(f, "operations", &format!("unknown: {why}")),
        }
    }
}
