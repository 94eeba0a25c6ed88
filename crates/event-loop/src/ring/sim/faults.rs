//! Faults of a simulation: their kinds, their chances, and scripts that decide them.

use super::random::Random;
use crate::ring::{RingFile, RingOp};

/// How a simulated ring behaves.
///
/// Chances are in percent, 0 to 100, per operation or per call.
#[derive(Debug, Clone)]
pub struct Faults {
    /// Duration of an operation, nanoseconds: minimum and maximum.
    pub latency_ns: (u64, u64),
    /// Chance in percent that an operation takes a hundred times as long.
    pub late: u8,
    /// Chance in percent that a read or write of more than one byte is short, by at least a byte.
    pub short: u8,
    /// Chance in percent that an operation fails, without an effect.
    pub fail: u8,
    /// Errnos of failures, picked at random. Empty means `EIO`.
    pub errnos: Vec<i32>,
    /// Size of the submission queue, in operations.
    pub entries: usize,
    /// Chance in percent that the submission queue reports to be full before it is.
    pub full: u8,
    /// Size of the completion queue, in completions. Further completions come with the next call.
    pub completions: usize,
    /// Chance that a call returns early, without completions, having submitted only some operations, as after
    /// a signal or without memory for requests.
    pub early_return: u8,
    /// Chance, per call, that a descriptor reports to be ready without need.
    pub spurious_poll: u8,
    /// Chance, per call, that a poll ends with `ENOMEM`.
    pub poll_fails: u8,
    /// Chance, per event, that a multishot poll ends with it.
    pub multishot_ends: u8,
    /// Chance in percent that a completion of a file operation comes twice.
    pub duplicate: u8,
    /// Chance in percent that a cancellation comes too late.
    pub late_cancel: u8,
    /// Chance in percent that the table of registered files is full.
    pub no_fixed_file: u8,
    /// Write garbage to memory that an operation reads into, while it is in flight and beyond the bytes that
    /// it reads.
    pub scribble: bool,
    /// How far each reading of the clock advances time, nanoseconds. Must not be 0 if a loop polls.
    pub clock_step_ns: u64,
}

impl Default for Faults {
    /// No faults, but operations that complete in any order.
    fn default() -> Self {
        Faults {
            latency_ns: (1_000, 100_000),
            late: 0,
            short: 0,
            fail: 0,
            errnos: Vec::new(),
            entries: 256,
            full: 0,
            completions: 2048,
            early_return: 0,
            spurious_poll: 0,
            poll_fails: 0,
            multishot_ends: 0,
            duplicate: 0,
            late_cancel: 0,
            no_fixed_file: 0,
            scribble: true,
            clock_step_ns: 20,
        }
    }
}

impl Faults {
    /// Returns all faults that correct code handles without an error.
    ///
    /// No operation fails.
    pub fn rough() -> Self {
        Faults {
            late: 5,
            short: 20,
            entries: 4,
            full: 20,
            completions: 3,
            early_return: 20,
            spurious_poll: 20,
            poll_fails: 5,
            multishot_ends: 30,
            late_cancel: 50,
            no_fixed_file: 50,
            ..Faults::default()
        }
    }

    pub(super) fn latency(&self, random: &Random, happened: &mut Happened) -> u64 {
        let (least, most) = self.latency_ns;
        let latency = least + random.below(most.saturating_sub(least).saturating_add(1).max(1));
        if !random.percent(self.late) {
            return latency;
        }
        happened.late += 1;
        latency.saturating_mul(100)
    }

    pub(super) fn verdict(&self, op: &SimOp, random: &Random) -> Verdict {
        if random.percent(self.fail) {
            let errno = match self.errnos.as_slice() {
                [] => libc::EIO,
                errnos => errnos[random.below(errnos.len() as u64) as usize],
            };
            return Verdict::Fail(errno);
        }
        match op {
            SimOp::Read { len, .. } | SimOp::Write { len, .. } if *len > 1 => {
                if !random.percent(self.short) {
                    return Verdict::Good;
                }
                let part = 1 + random.below(len - 1);
                // Transfers stop at sector boundaries on a disk, and anywhere in memory. A sector is written at
                // once, as a power cut would otherwise tear it.
                let sectors = part / 512 * 512;
                let whole = sectors > 0 && random.percent(50);
                match op {
                    SimOp::Write { .. } if sectors == 0 => Verdict::Good,
                    SimOp::Write { .. } => Verdict::Short(sectors),
                    _ => Verdict::Short(if whole { sectors } else { part }),
                }
            }
            _ => Verdict::Good,
        }
    }
}

macro_rules! happened {
    ($($(#[doc = $doc:literal])* $name:ident $text:literal),* $(,)?) => {
        /// How often a ring has caused each fault.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Happened { $($(#[doc = $doc])* pub $name: u64),* }

        impl Happened {
            /// Returns the sum of both.
            #[must_use]
            pub fn and(&self, other: &Happened) -> Happened {
                Happened { $($name: self.$name + other.$name),* }
            }

            /// Returns all counts with their descriptions.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($text, self.$name)),*]
            }
        }
    };
}

happened! {
    /// Operations that took a hundred times as long.
    late "operations that took a hundred times as long",
    /// Transfers that stopped short.
    short "transfers that stopped short",
    /// Operations that failed with a transient error.
    transient "operations that failed with EAGAIN or EINTR",
    /// Operations that failed with another error.
    failed "operations that failed for good",
    /// Completions that overtook an earlier operation.
    reordered "completions out of order",
    /// Completions that came twice.
    duplicates "completions that came twice",
    /// Operations that found the submission queue full.
    full "operations that found the submission queue full",
    /// Calls that found no room for all completions.
    overflows "calls with more completions than room",
    /// Calls that returned early.
    early_returns "calls that returned before they had to",
    /// Polls that fired for nothing.
    spurious_polls "polls that fired for nothing",
    /// Polls that ended with `ENOMEM`.
    failed_polls "polls that failed",
    /// Multishot polls that ended with an event.
    ended_multishots "multishot polls that ended",
}

/// A file operation for a script. Lengths and offsets in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimOp {
    /// A read.
    Read {
        /// First byte.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// A write.
    Write {
        /// First byte.
        offset: u64,
        /// Length.
        len: u64,
        /// With `RWF_DSYNC`.
        dsync: bool,
    },
    /// fsync(2) or fdatasync(2).
    Fsync,
    /// fallocate(2).
    Fallocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// First byte.
        offset: u64,
        /// Length.
        len: u64,
    },
}

/// The outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// According to seed and faults.
    Seeded,
    /// It succeeds.
    Good,
    /// It fails with this errno, without an effect.
    Fail(i32),
    /// It fails with this errno, this many nanoseconds later: `(nanoseconds, errno)`.
    FailLate(u64, i32),
    /// A read or write stops after this many bytes. 0 means the end of the file.
    Short(u64),
    /// It succeeds, this many nanoseconds later.
    Delay(u64),
    /// It succeeds once [`Sim::release`](super::Sim::release) is called.
    Hold,
}

/// Describes the operation for a script, with its file. Returns `None` for other operations.
pub(super) fn describe(op: &RingOp) -> Option<(SimOp, RingFile)> {
    let rw = |write, offset, len: usize, rw_flags: i32| {
        let len = len as u64;
        if write {
            SimOp::Write { offset, len, dsync: rw_flags & libc::RWF_DSYNC != 0 }
        } else {
            SimOp::Read { offset, len }
        }
    };
    Some(match *op {
        RingOp::Rw { file, write, segment, offset, rw_flags, .. } => {
            (rw(write, offset, segment.iov_len, rw_flags), file)
        }
        RingOp::RwVectored { file, write, offset, rw_flags, .. } => {
            let len = super::carry_out::segments(op).iter().map(|v| v.iov_len).sum();
            (rw(write, offset, len, rw_flags), file)
        }
        RingOp::Fsync { file, .. } => (SimOp::Fsync, file),
        RingOp::Fallocate { file, mode, offset, len } => {
            (SimOp::Fallocate { mode, offset, len }, file)
        }
        // A command reaches no file of the simulation.
        RingOp::Command { .. } => return None,
        RingOp::PollAdd { .. } | RingOp::PollRemove { .. } | RingOp::Cancel { .. } => return None,
    })
}
