//! Which ring a loop gets: the ladder of set-up flags (set-up contract).
//!
//! The best set is tried first. `EINVAL` (a kernel that does not know a flag) steps down, to a plain
//! ring in the end; `ENOSYS`, `EPERM` and `EACCES` (old kernel, sysctl, seccomp) step down to epoll.
//! Where restrictions cannot be registered, for whatever reason, the ring goes without.

use std::fmt;
use std::io;

use crate::ring::Ring;
use crate::ring::epoll::EpollRing;
use crate::ring::uring::UringRing;

/// When completions' task work runs: io_uring_setup(2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TaskRun {
    /// At any interrupt of the thread: the kernel's default.
    Interrupt,
    /// `IORING_SETUP_COOP_TASKRUN`: at the thread's next system call.
    #[default]
    Coop,
    /// `IORING_SETUP_DEFER_TASKRUN`: when the thread asks the ring for completions, and no more than 20
    /// of them at a time (Linux 6.18).
    Defer,
}

/// Set-up of an io_uring. Each part may be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingFlags {
    /// `IORING_SETUP_SINGLE_ISSUER`.
    pub single_issuer: bool,
    /// `IORING_SETUP_COOP_TASKRUN` or `_DEFER_TASKRUN`, with `_TASKRUN_FLAG`.
    pub task_run: TaskRun,
    /// `IORING_SETUP_NO_SQARRAY`.
    pub no_sqarray: bool,
    /// `IORING_SETUP_SUBMIT_ALL`.
    pub submit_all: bool,
    /// `IORING_ENTER_NO_IOWAIT`: an idle loop does not look like one that waits for a disk.
    pub no_iowait: bool,
    /// `IORING_SETUP_R_DISABLED`, then `IORING_REGISTER_RESTRICTIONS`: the ring takes the operations
    /// that a loop uses and no others.
    pub restricted: bool,
}

impl RingFlags {
    /// No flag at all.
    pub const PLAIN: RingFlags = RingFlags {
        single_issuer: false,
        task_run: TaskRun::Interrupt,
        no_sqarray: false,
        submit_all: false,
        no_iowait: false,
        restricted: false,
    };

    /// All flags that have been measured to help.
    pub const BEST: RingFlags = RingFlags {
        single_issuer: true,
        task_run: TaskRun::Coop,
        no_sqarray: true,
        submit_all: true,
        no_iowait: true,
        restricted: true,
    };

    /// The same with DEFER_TASKRUN.
    ///
    /// Not for a loop inside a foreign one: no descriptor shows deferred completions.
    pub const DEFERRING: RingFlags = RingFlags { task_run: TaskRun::Defer, ..RingFlags::BEST };

    /// The next lower rung, dropping what came last to the kernel: NO_IOWAIT (6.15), NO_SQARRAY (6.6),
    /// then SINGLE_ISSUER and DEFER_TASKRUN (6.0, 6.1), COOP_TASKRUN (5.19), SUBMIT_ALL (5.18),
    /// restrictions (5.10).
    fn step_down(self) -> Option<RingFlags> {
        let mut next = self;
        if self.no_iowait {
            next.no_iowait = false;
        } else if self.no_sqarray {
            next.no_sqarray = false;
        } else if self.task_run == TaskRun::Defer {
            next.task_run = TaskRun::Coop;
        } else if self.single_issuer {
            next.single_issuer = false;
        } else if self.task_run == TaskRun::Coop {
            next.task_run = TaskRun::Interrupt;
        } else if self.submit_all {
            next.submit_all = false;
        } else if self.restricted {
            next.restricted = false;
        } else {
            return None;
        }
        Some(next)
    }
}

impl fmt::Display for RingFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.single_issuer, "SINGLE_ISSUER"),
            (self.task_run == TaskRun::Coop, "COOP_TASKRUN"),
            (self.task_run == TaskRun::Defer, "DEFER_TASKRUN"),
            (self.task_run != TaskRun::Interrupt, "TASKRUN_FLAG"),
            (self.no_sqarray, "NO_SQARRAY"),
            (self.submit_all, "SUBMIT_ALL"),
            (self.no_iowait, "NO_IOWAIT"),
            (self.restricted, "RESTRICTIONS"),
        ];
        let mut any = false;
        for (_, name) in names.iter().filter(|(set, _)| *set) {
            write!(f, "{}{name}", if any { " " } else { "" })?;
            any = true;
        }
        if any { Ok(()) } else { f.write_str("no flags") }
    }
}

/// Where on the ladder to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingChoice {
    /// io_uring with these flags or fewer, else epoll.
    Ladder(RingFlags),
    /// io_uring with exactly these flags, or an error: for measuring.
    Exactly(RingFlags),
    /// epoll and the thread pool.
    Epoll,
}

impl Default for RingChoice {
    fn default() -> Self {
        RingChoice::Ladder(RingFlags::BEST)
    }
}

/// The ring that a loop uses, and why not a better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// The flags in force; `None` means epoll.
    pub flags: Option<RingFlags>,
    /// Each rung that was refused, best first, with the errno it was refused with.
    pub refused: Vec<(RingFlags, i32)>,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.flags {
            Some(flags) => write!(f, "io_uring with {flags}")?,
            None => f.write_str("epoll and a thread pool")?,
        }
        if let Some((flags, errno)) = self.refused.last() {
            let why = io::Error::from_raw_os_error(*errno);
            write!(f, " (io_uring with {flags} was refused: {why})")?;
        }
        Ok(())
    }
}

/// A loop could not be created.
#[derive(Debug)]
pub struct SetupError {
    /// The system call that failed.
    pub call: &'static str,
    /// Why.
    pub error: io::Error,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event loop: {} failed: {}", self.call, self.error)
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Why a ring could not be created with certain flags.
#[derive(Debug)]
pub(crate) enum Refused {
    /// io_uring_setup(2) failed.
    Ring(io::Error),
    /// Registering the restrictions, or enabling the ring thereafter, did.
    Restrictions(io::Error),
    /// The first io_uring_enter(2) did.
    Entry(io::Error),
}

impl From<Refused> for SetupError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Ring(error) => SetupError { call: "io_uring_setup", error },
            Refused::Restrictions(error) => SetupError { call: "io_uring_register", error },
            Refused::Entry(error) => SetupError { call: "io_uring_enter", error },
        }
    }
}

/// Creates the ring: must be called on the thread that will use it. 0 `completions`: as many as befit
/// the entries. `workers`: most threads of either kind that the kernel has for what blocks.
pub(crate) fn set_up(
    choice: RingChoice,
    entries: u32,
    completions: u32,
    workers: u32,
) -> Result<(Box<dyn Ring>, Chosen), SetupError> {
    climb_down(choice, |flags| Ok(Box::new(UringRing::new(flags, entries, completions, workers)?)))
}

/// The ladder itself, over any way to create a ring.
fn climb_down(
    choice: RingChoice,
    mut create: impl FnMut(RingFlags) -> Result<Box<dyn Ring>, Refused>,
) -> Result<(Box<dyn Ring>, Chosen), SetupError> {
    let mut refused = Vec::new();
    let mut rung = match choice {
        RingChoice::Ladder(flags) | RingChoice::Exactly(flags) => Some(flags),
        RingChoice::Epoll => None,
    };
    while let Some(flags) = rung {
        let why = match create(flags) {
            Ok(ring) => return Ok((ring, Chosen { flags: Some(flags), refused })),
            Err(why) => why,
        };
        let (Refused::Ring(error) | Refused::Restrictions(error) | Refused::Entry(error)) = &why;
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        refused.push((flags, errno));
        rung = match (&why, errno) {
            _ if matches!(choice, RingChoice::Exactly(_)) => return Err(why.into()),
            (Refused::Restrictions(_), _) => Some(RingFlags { restricted: false, ..flags }),
            (_, libc::EINVAL) => flags.step_down(),
            (_, libc::ENOSYS | libc::EPERM | libc::EACCES) => None,
            _ => return Err(why.into()),
        };
    }
    let ring = EpollRing::new().map_err(|error| SetupError { call: "epoll_create1", error })?;
    Ok((Box::new(ring), Chosen { flags: None, refused }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusing(errno: i32, accept: impl Fn(RingFlags) -> bool) -> Result<Chosen, SetupError> {
        climb_down(RingChoice::Ladder(RingFlags::DEFERRING), |flags| {
            if accept(flags) {
                Ok(Box::new(EpollRing::new().unwrap()))
            } else {
                Err(Refused::Ring(io::Error::from_raw_os_error(errno)))
            }
        })
        .map(|(_, chosen)| chosen)
    }

    #[test]
    fn set_up_ladder_steps_down_on_einval_to_a_plain_ring() {
        let coop = refusing(libc::EINVAL, |f| f.task_run != TaskRun::Defer).unwrap();
        assert_eq!(coop.flags.unwrap().task_run, TaskRun::Coop);
        let plain = refusing(libc::EINVAL, |f| f == RingFlags::PLAIN).unwrap();
        assert_eq!(plain.flags, Some(RingFlags::PLAIN));
        assert!(plain.refused.len() >= 4, "{:?}", plain.refused);
    }

    #[test]
    fn set_up_ladder_ends_in_epoll_where_io_uring_is_denied() {
        for errno in [libc::ENOSYS, libc::EPERM, libc::EACCES] {
            let chosen = refusing(errno, |_| false).unwrap();
            assert_eq!((chosen.flags, chosen.refused.len()), (None, 1));
            assert!(chosen.to_string().contains("epoll"), "{chosen}");
        }
    }

    #[test]
    fn set_up_other_errors_are_reported_not_hidden() {
        let error = refusing(libc::ENOMEM, |_| false).unwrap_err();
        assert_eq!(error.error.raw_os_error(), Some(libc::ENOMEM));
        assert!(error.to_string().contains("io_uring_setup"), "{error}");
    }
}
