//! The cost of a sleep of an I/O thread on this machine. The cost decides how long the thread polls.

use std::sync::mpsc;
use std::time::Duration;

use event_loop::{IoThread, IoThreadConfig, PollParams};

/// Number of wake-ups.
const WAKES: usize = 32;

/// Time between two wake-ups, long enough for the thread to fall asleep.
const PAUSE: Duration = Duration::from_millis(1);

/// The measured values, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sleep {
    /// From an event to the thread running.
    late_ns: u64,
    /// CPU time of the thread.
    cpu_ns: u64,
    /// The longest time that an I/O thread polls by default.
    bound_ns: u64,
}

impl Sleep {
    /// Starts an I/O thread and wakes it. `None`: it could not be started, or measured nothing.
    pub(super) fn take() -> Option<Self> {
        let thread = IoThread::spawn(IoThreadConfig::default()).ok()?;
        for _ in 0..WAKES {
            std::thread::sleep(PAUSE);
            let (sender, receiver) = mpsc::channel();
            let asked = thread.handle().spawn(move |_| {
                let _ = sender.send(());
            });
            asked.ok()?;
            receiver.recv().ok()?;
        }
        let stats = thread.handle().stats();
        let (late_ns, cpu_ns) = (stats.sleep_late_ns.get(), stats.sleep_cpu_ns.get());
        let bound_ns = PollParams::default().bound_ns(stats);
        (late_ns > 0 && cpu_ns > 0).then_some(Sleep { late_ns, cpu_ns, bound_ns })
    }

    /// Describes the cost of a sleep.
    pub(super) fn cost(&self) -> String {
        let us = |ns: u64| ns as f64 / 1e3;
        format!("{:.1} us late, {:.1} us of CPU time", us(self.late_ns), us(self.cpu_ns))
    }

    /// Describes the resulting default of `poll-max-ns`.
    pub(super) fn choice(&self) -> String {
        format!("{} by default: polling for longer costs more than a sleep", self.bound_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_woken_has_its_sleeps_measured() {
        let sleep = Sleep::take().expect("an I/O thread");
        assert!(sleep.late_ns < 10_000_000 && sleep.cpu_ns < 10_000_000, "{sleep:?}");
        assert!(sleep.bound_ns >= 2 * sleep.cpu_ns + sleep.late_ns, "{sleep:?}");
    }

    #[test]
    fn figures_in_words() {
        let sleep = Sleep { late_ns: 32_450, cpu_ns: 10_000, bound_ns: 68_675 };
        assert_eq!(sleep.cost(), "32.5 us late, 10.0 us of CPU time");
        assert!(sleep.choice().starts_with("68675 by default"));
    }
}
