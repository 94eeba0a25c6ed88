//! What goes wrong in a simulation, how often, and who says so.

use crate::ring::{RingFile, RingOp};

/// How a simulated ring behaves. Chances are in percent, per operation or per call.
#[derive(Debug, Clone)]
pub struct Faults {
    /// How long operations take, nanoseconds: from the first to the second.
    pub latency_ns: (u64, u64),
    /// Chance that an operation takes a hundred times as long.
    pub late: u8,
    /// Chance that a read or write of more than one byte is done only in part, a byte at least.
    pub short: u8,
    /// Chance that an operation fails, without an effect.
    pub fail: u8,
    /// What with: errnos, picked at random. Empty means `EIO`.
    pub errnos: Vec<i32>,
    /// Room in the submission queue.
    pub entries: usize,
    /// Chance that the submission queue calls itself full before it is.
    pub full: u8,
    /// Room in the completion queue; what finds none comes with the next call.
    pub completions: usize,
    /// Chance that a call returns early, with nothing, and having submitted only some: a signal, or no
    /// memory for requests.
    pub early_return: u8,
    /// Chance, per call, that a descriptor shows as ready that need not be.
    pub spurious_poll: u8,
    /// Chance, per call, that a poll ends with `ENOMEM`.
    pub poll_fails: u8,
    /// Chance, per event, that a multishot poll ends with it.
    pub multishot_ends: u8,
    /// Chance that a completion of a file operation comes twice.
    pub duplicate: u8,
    /// Chance that a cancellation comes too late.
    pub late_cancel: u8,
    /// Chance that there is no room in the table of registered files.
    pub no_fixed_file: u8,
    /// Write garbage to memory that an operation is to read into, for as long as it is in flight and
    /// beyond what it has read in the end.
    pub scribble: bool,
    /// How much later it is with each reading of the clock, nanoseconds. Not 0 where a loop polls.
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
    /// A bit of everything that goes unnoticed by whoever does it right: no operation fails.
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

    pub(super) fn latency(&self, random: &mut Random, happened: &mut Happened) -> u64 {
        let (least, most) = self.latency_ns;
        let latency = least + random.below(most.saturating_sub(least).saturating_add(1).max(1));
        if !random.percent(self.late) {
            return latency;
        }
        happened.late += 1;
        latency.saturating_mul(100)
    }

    pub(super) fn verdict(&self, op: &SimOp, random: &mut Random) -> Verdict {
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
                // Disks stop at sectors, memory anywhere. But what is written of a sector is so at once: who cuts the
                // power would find one torn within.
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
        /// How often a ring has done to its loop what it may.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Happened { $($(#[doc = $doc])* pub $name: u64),* }

        impl Happened {
            /// The sum of both.
            #[must_use]
            pub fn and(&self, other: &Happened) -> Happened {
                Happened { $($name: self.$name + other.$name),* }
            }

            /// All counts, with what they count.
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
    /// Operations that failed with an error that passes by itself.
    transient "operations that failed with EAGAIN or EINTR",
    /// Operations that failed with another error.
    failed "operations that failed for good",
    /// Completions that overtook an operation that was submitted before.
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

/// A file operation as a script sees it. Lengths and offsets in bytes.
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

/// What becomes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// What seed and faults say.
    Seeded,
    /// It succeeds.
    Good,
    /// It fails with this errno, without an effect.
    Fail(i32),
    /// It fails with this errno, this many nanoseconds later: `(nanoseconds, errno)`.
    FailLate(u64, i32),
    /// A read or write stops after this many bytes. 0 is how the end of a file shows.
    Short(u64),
    /// It succeeds, this many nanoseconds later.
    Delay(u64),
    /// It succeeds after [`Sim::release`](super::Sim::release), not before.
    Hold,
}

/// The operation in a script's terms, and its file. `None`: no file operation.
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
        RingOp::PollAdd { .. } | RingOp::PollRemove { .. } | RingOp::Cancel { .. } => return None,
    })
}

/// splitmix64: small, and the same everywhere.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub(super) fn percent(&mut self, chance: u8) -> bool {
        chance > 0 && self.below(100) < u64::from(chance)
    }
}
