//! The status line: the guest's load. On a terminal it is shown once a second. Elsewhere a log line (info) has
//! it every ten seconds in which a number changed.

use std::io::IsTerminal;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::{EventLoop, LoopHandle};
use stats::{QueueNumbers, QueueStats};

use crate::localize::Progress;
use crate::logger;
use crate::service_manager::ServiceManager;

/// Seconds between two lines.
const ON_TERMINAL: u64 = 1;
const IN_LOG: u64 = 10;

/// The counters that the status line shows.
pub(crate) struct Sources {
    pub(crate) queues: Vec<Arc<QueueStats>>,
    pub(crate) loops: Vec<LoopHandle>,
    /// The copy of `serve --localize`.
    pub(crate) localized: Rc<Progress>,
}

/// Shows the status while the daemon runs.
pub struct Status {
    terminal: bool,
}

#[derive(Clone, Copy, Default, PartialEq)]
struct Totals {
    requests: u64,
    bytes: u64,
    latency_ns: u64,
    errors: u64,
    /// Percent of the copy. `None`: there is none.
    localized: Option<u64>,
}

impl Sources {
    fn totals(&self) -> Totals {
        let mut all = QueueNumbers::default();
        self.queues.iter().for_each(|queue| all.add(&queue.get()));
        let start = Totals { localized: self.localized.percent(), ..Totals::default() };
        all.kinds.iter().fold(start, |t, kind| Totals {
            requests: t.requests + kind.done + kind.failed + kind.invalid,
            bytes: t.bytes + kind.bytes,
            latency_ns: t.latency_ns + kind.total_ns,
            errors: t.errors + kind.failed + kind.invalid,
            ..t
        })
    }

    /// The widest poll window, microseconds.
    fn window_us(&self) -> f64 {
        let widest = self.loops.iter().map(|l| l.stats().poll_window_ns.get()).max();
        widest.unwrap_or(0) as f64 / 1e3
    }
}

impl Status {
    /// Returns the status line of a daemon.
    ///
    /// `others_write`: standard error has other writers than the log.
    pub fn new(others_write: bool) -> Self {
        Status { terminal: std::io::stderr().is_terminal() && !others_write }
    }

    /// Shows a line after each interval, for as long as the loop runs.
    pub(crate) async fn show(
        self,
        event_loop: EventLoop,
        sources: Sources,
        manager: Option<Rc<ServiceManager>>,
    ) {
        let seconds = if self.terminal { ON_TERMINAL } else { IN_LOG };
        let mut before = sources.totals();
        let mut deadline = event_loop.now_ns();
        loop {
            deadline += seconds * 1_000_000_000;
            event_loop.sleep_until(deadline).await;
            let now = sources.totals();
            let parts = parts(before, now, seconds as f64, sources.window_us());
            let line = parts.join("  ");
            if self.terminal {
                logger::show_status(&parts);
            } else if now != before {
                log::info!("{line}");
            }
            if let Some(manager) = manager.as_ref().filter(|_| now != before) {
                manager.status(&line);
            }
            before = now;
        }
    }
}

/// Returns the parts of the status line, the most important first.
fn parts(before: Totals, now: Totals, seconds: f64, window_us: f64) -> Vec<String> {
    let requests = now.requests - before.requests;
    let rate = requests as f64 / seconds;
    let mib = (now.bytes - before.bytes) as f64 / seconds / f64::from(1 << 20);
    let latency = (now.latency_ns - before.latency_ns) as f64 / requests.max(1) as f64 / 1e3;
    let mut parts = vec![
        format!("{rate:.0} requests/s"),
        format!("{mib:.1} MiB/s"),
        format!("latency {latency:.1} us"),
        format!("poll window {window_us:.1} us"),
    ];
    if now.errors > 0 {
        parts.insert(1, format!("{} errors so far", now.errors));
    }
    if let Some(percent) = now.localized {
        parts.insert(1, format!("localized {percent}%"));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_rates_of_the_interval() {
        let before =
            Totals { requests: 100, bytes: 0, latency_ns: 0, errors: 0, ..Totals::default() };
        let now = Totals {
            requests: 300,
            bytes: 4 << 20,
            latency_ns: 2_000_000,
            errors: 0,
            ..Totals::default()
        };
        assert_eq!(
            parts(before, now, 2.0, 32.768),
            ["100 requests/s", "2.0 MiB/s", "latency 10.0 us", "poll window 32.8 us"]
        );
        assert_eq!(parts(now, now, 1.0, 0.0)[0], "0 requests/s");
        let failed = Totals { errors: 3, ..now };
        assert_eq!(parts(now, failed, 1.0, 0.0)[1], "3 errors so far");
        let copied = Totals { localized: Some(7), ..now };
        assert_eq!(parts(now, copied, 1.0, 0.0)[1], "localized 7%");
    }
}
