//! Scheduling of a thread: its class and its priority.

#![allow(unsafe_code)]

use std::io;

/// A scheduling class of sched(7) with its parameter. CPU affinity is separate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// `SCHED_OTHER`, the default.
    Other {
        /// -20 (highest priority) to 19 (lowest), setpriority(2). A lower value than the creator's requires
        /// CAP_SYS_NICE, or room in `RLIMIT_NICE`.
        nice: i8,
    },
    /// `SCHED_BATCH`: as the default, but not favoured after a sleep.
    Batch {
        /// As above.
        nice: i8,
    },
    /// `SCHED_IDLE`: runs only if no other thread wants the CPU, or nearly so.
    Idle,
    /// `SCHED_FIFO`: preempts all threads of the classes above, and runs until it sleeps. A loop that
    /// busy-polls in this class takes the whole CPU meanwhile.
    Fifo {
        /// 1 to 99, higher first. Requires CAP_SYS_NICE, or room in `RLIMIT_RTPRIO`.
        priority: u8,
    },
    /// `SCHED_RR`: as `SCHED_FIFO`, in turns with others of the same priority.
    RoundRobin {
        /// As above.
        priority: u8,
    },
}

impl Scheduling {
    /// Applies the class to the calling thread and to threads that it starts later. Errors name the call.
    pub(crate) fn apply(self) -> Result<(), (&'static str, io::Error)> {
        let (policy, priority, nice) = match self {
            Scheduling::Other { nice } => (libc::SCHED_OTHER, 0, Some(nice)),
            Scheduling::Batch { nice } => (libc::SCHED_BATCH, 0, Some(nice)),
            Scheduling::Idle => (libc::SCHED_IDLE, 0, None),
            Scheduling::Fifo { priority } => (libc::SCHED_FIFO, priority, None),
            Scheduling::RoundRobin { priority } => (libc::SCHED_RR, priority, None),
        };
        let param = libc::sched_param { sched_priority: priority.into() };
        // SAFETY: sched_setscheduler(2) reads `param`, which lives across the call. 0 is the calling thread.
        // A raw system call, as one C library's function always fails and another's means the process.
        let result =
            unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const param) };
        if result != 0 {
            return Err(("sched_setscheduler", io::Error::last_os_error()));
        }
        let Some(nice) = nice else { return Ok(()) };
        // The system call would clamp the value.
        if !(-20..=19).contains(&nice) {
            return Err(("setpriority", io::Error::from_raw_os_error(libc::EINVAL)));
        }
        // SAFETY: setpriority(2) takes numbers; 0 is the calling thread, on Linux.
        match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice.into()) } {
            0 => Ok(()),
            _ => Err(("setpriority", io::Error::last_os_error())),
        }
    }
}
