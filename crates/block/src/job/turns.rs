//! The copies of a mirror that are under way, of its worker and of its filter: two copies never touch the same part.
//!
//! With `copy-mode=write-blocking` the filter copies what a guest has written before the write is answered. A copy by the
//! worker that has read the old data must not reach the target after that.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::claims::Claims;
use super::giving_up::GivingUp;

/// The copies of a mirror, for all threads.
#[derive(Default)]
pub struct Turns {
    /// Writes are answered when the target has them.
    blocking: AtomicBool,
    pub(super) giving_up: GivingUp,
    claims: Claims,
}

/// Parts that are claimed for a copy, until this is dropped.
pub(super) struct Turn {
    turns: Arc<Turns>,
    parts: Range<u64>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.claims.release(&self.parts, false);
    }
}

impl Turns {
    /// Returns whether writes are answered only when the target has them.
    pub fn is_blocking(&self) -> bool {
        self.blocking.load(Ordering::Acquire) && !self.giving_up.is_given_up()
    }

    /// Has later writes be answered only when the target has them.
    pub fn set_blocking(&self) {
        self.blocking.store(true, Ordering::Release);
    }

    /// Has writes be answered without the target, also those that wait for it. Call this when the job is cancelled or fails.
    pub fn give_up(&self) {
        self.giving_up.give_up();
    }

    /// Claims parts if none of them is being copied.
    pub(super) fn try_claim(self: &Arc<Turns>, parts: &Range<u64>) -> Option<Turn> {
        let mut claimed = self.claims.lock();
        if claimed.touches(parts) {
            return None;
        }
        claimed.add(parts.clone(), false);
        Some(Turn { turns: self.clone(), parts: parts.clone() })
    }

    /// Claims parts, as soon as none of them is being copied.
    pub(super) async fn claim(self: &Arc<Turns>, parts: &Range<u64>) -> Turn {
        self.claims.wait_for(|| self.try_claim(parts)).await
    }

    /// Whether a part is being copied.
    pub(super) fn is_claimed(&self, part: u64) -> bool {
        self.claims.lock().has(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_copied_by_one_at_a_time() {
        let turns = Arc::new(Turns::default());
        let first = turns.try_claim(&(2..5)).unwrap();
        assert!(turns.try_claim(&(4..6)).is_none() && turns.try_claim(&(0..3)).is_none());
        let second = turns.try_claim(&(5..6)).unwrap();
        assert!(turns.is_claimed(4) && turns.is_claimed(5) && !turns.is_claimed(1));
        drop(first);
        assert!(!turns.is_claimed(4));
        assert!(turns.try_claim(&(4..6)).is_none());
        drop(second);
        assert!(turns.try_claim(&(4..6)).is_some());
    }
}
