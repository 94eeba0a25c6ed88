//! Parts of a disk that tasks on any thread copy or read, and the tasks that wait for such parts.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use event_loop::sync::lock;

/// The claims on a disk's parts.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<Claimed>);

/// The claims, while nothing else changes them.
#[derive(Debug, Default)]
pub(super) struct Claimed {
    claims: Vec<Claim>,
    waiting: Vec<Waker>,
}

#[derive(Debug, PartialEq, Eq)]
struct Claim {
    parts: Range<u64>,
    /// Any number of readers may have a part at once.
    reads: bool,
}

impl Claims {
    pub(super) fn lock(&self) -> MutexGuard<'_, Claimed> {
        lock(&self.0)
    }

    /// Takes a claim back, and wakes the tasks that wait. Of equal claims of readers, it takes one.
    pub(super) fn release(&self, parts: &Range<u64>, reads: bool) {
        let waiting = {
            let mut claimed = self.lock();
            let own = Claim { parts: parts.clone(), reads };
            if let Some(index) = claimed.claims.iter().position(|claim| *claim == own) {
                claimed.claims.swap_remove(index);
            }
            std::mem::take(&mut claimed.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until `get` returns a value, which depends on the claims.
    pub(super) async fn wait_for<T>(&self, get: impl Fn() -> Option<T>) -> T {
        poll_fn(|cx| {
            if let Some(got) = get() {
                return Poll::Ready(got);
            }
            self.lock().waiting.push(cx.waker().clone());
            // A claim may have been released in between.
            get().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

impl Claimed {
    pub(super) fn add(&mut self, parts: Range<u64>, reads: bool) {
        self.claims.push(Claim { parts, reads });
    }

    /// Whether a claim touches these parts.
    pub(super) fn touches(&self, parts: &Range<u64>) -> bool {
        self.claims
            .iter()
            .any(|claim| claim.parts.start < parts.end && parts.start < claim.parts.end)
    }

    /// Whether a part is claimed.
    pub(super) fn has(&self, part: u64) -> bool {
        self.claims.iter().any(|claim| claim.parts.contains(&part))
    }

    /// Whether a part is being copied. Readers of it do not count.
    pub(super) fn is_copied(&self, part: u64) -> bool {
        self.claims.iter().any(|claim| !claim.reads && claim.parts.contains(&part))
    }
}
