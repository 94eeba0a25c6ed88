//! How much memory can be pinned. The probe tries: neither capabilities nor limits tell the result.
//!
//! The kernel counts registered memory towards `RLIMIT_MEMLOCK`: separately for each ring, and for all
//! processes of a user together. Rings made with `CAP_IPC_LOCK` in the initial user namespace are exempt. A
//! process in another namespace never has this capability there, whatever its own capabilities are.

use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, rlim_t, setrlimit};

use super::limits::bytes;
use daemon::errno::words;

/// Most bytes that the trial pins.
const TRIAL: rlim_t = 1 << 20;

/// The result of the trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pinning {
    /// `RLIMIT_MEMLOCK` does not apply.
    Unlimited,
    /// `RLIMIT_MEMLOCK` applies, and the trial was within it.
    Counted,
    /// `RLIMIT_MEMLOCK` applies, and nothing is left of it.
    Full,
    /// Pinning failed with and without regard to the limit, for this reason.
    Refused(String),
}

impl Pinning {
    /// Pins memory as a trial. Lowers the limit of the process meanwhile.
    pub(super) fn take() -> Self {
        match Self::tried() {
            Ok(pinning) => pinning,
            // The memory of a ring counts towards the limit, too.
            Err(error) if error.raw_os_error() == Some(Errno::ENOMEM as i32) => Pinning::Full,
            Err(error) => Pinning::Refused(words(&error)),
        }
    }

    fn tried() -> io::Result<Self> {
        let config = LoopConfig { name: "probe".to_owned(), ..LoopConfig::default() };
        let event_loop = EventLoop::new(config).map_err(|error| error.error)?;
        if !event_loop.has_io_uring() {
            return Ok(Pinning::Refused("there is no io_uring".to_owned()));
        }
        let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
        let len = usize::try_from((soft / 2).clamp(4096, TRIAL)).unwrap_or(4096);
        let as_it_is = pin(&event_loop, len);
        setrlimit(Resource::RLIMIT_MEMLOCK, 0, hard)?;
        let without_limit = pin(&event_loop, len);
        setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard)?;
        Ok(match (without_limit, as_it_is) {
            (Ok(()), _) => Pinning::Unlimited,
            (Err(_), Ok(())) => Pinning::Counted,
            (Err(_), Err(error)) => return Err(error),
        })
    }

    /// Describes the result. `memlock` is the soft limit, bytes.
    pub(super) fn describe(&self, memlock: Option<rlim_t>) -> String {
        let limit = memlock.map_or("RLIMIT_MEMLOCK".to_owned(), bytes);
        let more = "more with LimitMEMLOCK=infinity (systemd), 'ulimit -l unlimited', or \
                    CAP_IPC_LOCK in the initial user namespace";
        match self {
            Pinning::Unlimited => {
                "any amount: RLIMIT_MEMLOCK is not applied to io_uring here (tried)".to_owned()
            }
            Pinning::Counted if memlock == Some(RLIM_INFINITY) => {
                "any amount: RLIMIT_MEMLOCK is unlimited (tried)".to_owned()
            }
            Pinning::Counted => format!(
                "up to {limit} for all processes of this user together, once per I/O thread \
                 (tried); {more}"
            ),
            Pinning::Full => format!(
                "none: of the {limit} that all processes of this user may pin together, nothing is \
                 left (tried); {more}"
            ),
            Pinning::Refused(why) => format!("not possible: {why}"),
        }
    }
}

/// Pins `len` bytes with the loop's ring, and unpins them.
fn pin(event_loop: &EventLoop, len: usize) -> io::Result<()> {
    let mut memory = vec![0u8; len];
    let base = NonNull::from(memory.as_mut_slice()).cast();
    event_loop.block_on(event_loop.register_memory(Rc::new(memory), base, len))?.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_said_as_they_were_found() {
        let of = |pinning: Pinning, limit| pinning.describe(Some(limit));
        assert!(of(Pinning::Unlimited, 8 << 20).starts_with("any amount: "));
        assert!(of(Pinning::Counted, 8 << 20).starts_with("up to 8 MiB for all processes"));
        assert!(of(Pinning::Counted, RLIM_INFINITY).starts_with("any amount: "));
        assert!(of(Pinning::Full, 8 << 20).starts_with("none: of the 8 MiB "));
        assert_eq!(of(Pinning::Refused("no".into()), 1), "not possible: no");
    }
}
