//! A request that is pending at most once, as for a bottom half or a task's waker.

use crate::sync::{AtomicBool, Ordering};

/// Whether a request is pending that has not begun.
///
/// A thread that raises the flag publishes what it wrote before, even if the flag was already raised.
/// Lowering the flag makes all of that visible. So lowering is a read-modify-write: a plain store would not
/// read the value that it overwrites, and could take effect after the reads that follow it.
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn new(raised: bool) -> Self {
        Flag(AtomicBool::new(raised))
    }

    /// Raises the flag. Returns `true` if it was not raised, in which case the caller passes the request on.
    pub(crate) fn raise(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Lowers the flag, before the request is carried out. From then on it can be raised again.
    pub(crate) fn lower(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}

/// `inbox.rs` explains how to run these models.
#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    use super::*;

    /// Two threads count and raise the flag. The one that changed it requests a run. With a plain store in
    /// `lower` the model fails: the run misses the count of the other thread.
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
