//! The interrupt line.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use event_loop::Counter;

/// The interrupt level and its callback, which is called without a lock. `turn` keeps the calls in order and
/// one at a time.
pub(crate) struct Line {
    callback: Box<dyn Fn(bool) + Send + Sync>,
    level: AtomicBool,
    turn: AtomicU8,
}

/// States of `turn`: no call is running; a call is running; a call is running and must check again.
const IDLE: u8 = 0;
const CALLING: u8 = 1;
const AGAIN: u8 = 2;

impl Line {
    pub(crate) fn new(callback: impl Fn(bool) + Send + Sync + 'static) -> Self {
        let (level, turn) = (AtomicBool::new(false), AtomicU8::new(IDLE));
        Line { callback: Box::new(callback), level, turn }
    }

    /// Reports the level that `wanted` returns. If a call is already running, on another thread or further up this
    /// stack, that call checks the level once more instead.
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
