//! How much memory can be pinned: tried, since neither capabilities nor limits tell by themselves.
//!
//! The kernel counts what a ring has registered towards `RLIMIT_MEMLOCK`, for each ring anew, and for all
//! processes of a user together. It does not where whoever made the ring had `CAP_IPC_LOCK` in the initial user
//! namespace, which a process in another namespace does not have, whatever its capabilities say.

use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use event_loop::{EventLoop, LoopConfig};
use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, rlim_t, setrlimit};

use super::limits::bytes;
use crate::errno::words;

/// Most bytes that are pinned to try it.
const TRIAL: rlim_t = 1 << 20;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pinning {
    /// It is not counted.
    Unlimited,
    /// It is counted, and there is room.
    Counted,
    /// It is counted, and there is no room left.
    Full,
    /// It is not possible, limit or not.
    Refused(String),
}

impl Pinning {
    /// Tries it. The limit is lowered for a moment.
    pub(super) fn take() -> Self {
        match Self::tried() {
            Ok(pinning) => pinning,
            // A ring counts, too.
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

    /// In words, where `memlock` is the soft limit.
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

/// Pins so many bytes with the loop's ring, and gives them back.
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
