//! A request that is pending at most once: what a bottom half or a task's waker raises.

use crate::sync::{AtomicBool, Ordering};

/// Whether something is asked for and has not begun yet.
///
/// Whoever raises it publishes what it wrote before; whoever lowers it sees all of that. That holds
/// for those who found it raised already, too, and is why lowering is a read-modify-write: a plain
/// store would not look at what it overwrites, and might even take effect after the reads that
/// follow it.
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn new(raised: bool) -> Self {
        Flag(AtomicBool::new(raised))
    }

    /// `true`: it was not raised before, so the one who asks has to pass the request on.
    pub(crate) fn raise(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Before doing what was asked for: from here on it can be asked for anew.
    pub(crate) fn lower(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}

/// For how to run it see `inbox.rs`.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    use super::*;

    /// Two threads count and raise the flag; the one that really raised it asks for a run. With a store
    /// in `lower` this fails: a run misses the count of a thread that relied on it.
    #[test]
    fn loom_a_raised_flag_is_never_lowered_unseen() {
        loom::model(|| {
            let flag = Arc::new(Flag::new(false));
            let [counted, asked] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
            let threads = [(); 2].map(|()| {
                let (flag, counted, asked) = (flag.clone(), counted.clone(), asked.clone());
                loom::thread::spawn(move || {
                    counted.fetch_add(1, Ordering::Relaxed);
                    if flag.raise() {
                        asked.fetch_add(1, Ordering::Release);
                    }
                })
            });
            let mut seen = 0;
            let mut runs = || {
                for _ in 0..asked.swap(0, Ordering::Acquire) {
                    flag.lower();
                    seen = counted.load(Ordering::Relaxed);
                }
            };
            runs();
            let _ = threads.map(|thread| thread.join());
            runs();
            assert_eq!(seen, 2, "a request was swallowed");
        });
    }
}
