//! Options of all drivers that a node with a connection changes while it is open.

use std::sync::atomic::{AtomicU8, Ordering};

use nix::errno::Errno;

use super::detect_zeroes::detect_zeroes;
use crate::options::{BlockdevOptions, DetectZeroes, Discard};
use crate::request::{Op, Request};

const READ_ONLY: u8 = 1;
const UNMAP: u8 = 2;
const NO_FLUSH: u8 = 4;
const DETECT_ZEROES: u8 = 8;
const DETECT_AND_UNMAP: u8 = 16;

/// The options, for all loops.
#[derive(Debug)]
pub(crate) struct Live(AtomicU8);

/// The options at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Options(u8);

impl Live {
    pub(crate) fn new(options: &BlockdevOptions) -> Live {
        Live(AtomicU8::new(Options::of(options).0))
    }

    /// Returns the options now.
    #[inline]
    pub(crate) fn get(&self) -> Options {
        Options(self.0.load(Ordering::Relaxed))
    }

    /// Replaces the options. Returns those before.
    pub(crate) fn set(&self, options: Options) -> Options {
        Options(self.0.swap(options.0, Ordering::Relaxed))
    }
}

impl Options {
    /// Returns what a node's definition says.
    pub(crate) fn of(options: &BlockdevOptions) -> Options {
        let zeroes = match options.detect_zeroes {
            DetectZeroes::Off => 0,
            DetectZeroes::On => DETECT_ZEROES,
            DetectZeroes::Unmap => DETECT_AND_UNMAP,
        };
        let set = |is_set: bool, bit| if is_set { bit } else { 0 };
        Options(
            zeroes
                | set(options.read_only, READ_ONLY)
                | set(options.discard == Discard::Unmap, UNMAP)
                | set(options.cache.no_flush, NO_FLUSH),
        )
    }

    fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }

    /// `read-only`.
    pub(crate) fn read_only(self) -> bool {
        self.has(READ_ONLY)
    }

    /// Whether `discard` is `unmap`.
    pub(crate) fn unmaps(self) -> bool {
        self.has(UNMAP)
    }

    /// `cache.no-flush`.
    pub(crate) fn no_flush(self) -> bool {
        self.has(NO_FLUSH)
    }

    /// Applies the options, other than `read-only`, to a request. `Some`: its answer.
    #[inline]
    pub(crate) fn apply(self, request: &mut Request) -> Option<Result<(), Errno>> {
        if self.has(DETECT_ZEROES | DETECT_AND_UNMAP) {
            let zeroes = match self.has(DETECT_ZEROES) {
                true => DetectZeroes::On,
                false => DetectZeroes::Unmap,
            };
            detect_zeroes(zeroes, request);
        }
        match &mut request.op {
            // Memory that was taken away no longer has the guest's data.
            Op::Write { .. } if request.bufs.is_lost() => return Some(Err(Errno::EFAULT)),
            Op::Discard if !self.unmaps() => return Some(Ok(())),
            Op::Flush if self.no_flush() => return Some(Ok(())),
            Op::Write { fua } => *fua &= !self.no_flush(),
            Op::WriteZeroes { may_unmap, fua, .. } => {
                *may_unmap &= self.unmaps();
                *fua &= !self.no_flush();
            }
            Op::Read | Op::Flush | Op::Discard | Op::BlockStatus => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Driver;
    use crate::options::FileOptions;

    #[test]
    fn options_are_what_they_were_made_of() {
        let driver = Driver::file(FileOptions {
            filename: "x".into(),
            aio: None,
            locking: crate::options::Locking::Off,
        });
        let mut options = BlockdevOptions::new(None, driver);
        let live = Live::new(&options);
        assert!(!live.get().read_only() && !live.get().no_flush());
        options.read_only = true;
        options.discard = Discard::Unmap;
        options.cache.no_flush = true;
        let before = live.set(Options::of(&options));
        let now = live.get();
        assert!(now.read_only() && now.unmaps() && now.no_flush() && now != before);
        assert!(!live.set(before).has(DETECT_ZEROES) && live.get() == before);
    }
}
