//! The interrupt line.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use event_loop::Counter;

/// A level. Its callback is called without any lock; that calls come one at a time and in
/// order is the work of `turn`.
pub(crate) struct Line {
    callback: Box<dyn Fn(bool) + Send + Sync>,
    level: AtomicBool,
    turn: AtomicU8,
}

/// Nobody is calling; somebody is; somebody is, and has to look again.
const IDLE: u8 = 0;
const CALLING: u8 = 1;
const AGAIN: u8 = 2;

impl Line {
    pub(crate) fn new(callback: impl Fn(bool) + Send + Sync + 'static) -> Self {
        let (level, turn) = (AtomicBool::new(false), AtomicU8::new(IDLE));
        Line { callback: Box::new(callback), level, turn }
    }

    /// Tells the level that `wanted` finds. Who comes while another thread, or this one further up,
    /// is telling leaves it to that one to look once more.
    pub(crate) fn update(&self, wanted: impl Fn() -> bool, raised: &Counter) {
        if self.turn.swap(AGAIN, Ordering::AcqRel) != IDLE {
            return;
        }
        loop {
            self.turn.swap(CALLING, Ordering::AcqRel);
            let level = wanted();
            if self.level.swap(level, Ordering::AcqRel) != level {
                if level {
                    raised.add_from_any_thread(1);
                }
                (self.callback)(level);
            }
            let done =
                self.turn.compare_exchange(CALLING, IDLE, Ordering::AcqRel, Ordering::Acquire);
            if done.is_ok() {
                return;
            }
        }
    }
}
