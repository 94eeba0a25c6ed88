//! Slow requests: a line in the log when a request takes long, and another when it is answered.
//!
//! Requests do not pay for it. A task of the control loop reads the counters now and then. For an export
//! with requests in flight it asks the I/O threads for a list of them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use stats::InFlight;

/// Most lines per check and export; further requests are counted.
const MAX_LINES: usize = 4;

/// The shortest and longest time between two checks, in nanoseconds.
const MIN_PAUSE_NS: u64 = 20_000_000;
const MAX_PAUSE_NS: u64 = 2_500_000_000;

/// Identifies a request of an export: queue or connection, its number there, and its arrival
/// time.
type Key = (u64, u64, u64);

/// The slow requests of an export.
pub(super) struct Stalls {
    /// `stall-timeout-ms`.
    limit_ns: u64,
    /// The word for queues in log lines.
    queue: &'static str,
    told: RefCell<BTreeMap<Key, InFlight>>,
    /// Time of the question to the I/O threads, until they have answered.
    asked_ns: Cell<Option<u64>>,
    /// A missing answer was reported.
    told_of_silence: Cell<bool>,
}

impl Stalls {
    /// `kind`: the export's type.
    pub(super) fn new(limit_ns: u64, kind: &str) -> Self {
        Stalls {
            limit_ns,
            queue: if kind == "nbd" { "connection" } else { "queue" },
            told: RefCell::default(),
            asked_ns: Cell::new(None),
            told_of_silence: Cell::new(false),
        }
    }

    /// `stall-timeout-ms`, in nanoseconds.
    pub(super) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Time until the next check in nanoseconds.
    pub(super) fn pause_ns(&self) -> u64 {
        (self.limit_ns / 4).clamp(MIN_PAUSE_NS, MAX_PAUSE_NS)
    }

    /// Whether the I/O threads have to be asked: something is, or was, in flight.
    pub(super) fn must_ask(&self, in_flight: bool) -> bool {
        self.asked_ns.get().is_none() && (in_flight || !self.told.borrow().is_empty())
    }

    /// Records a question.
    pub(super) fn ask(&self, now_ns: u64) {
        self.asked_ns.set(Some(now_ns));
    }

    /// A line about I/O threads that have not answered.
    pub(super) fn silence(&self, now_ns: u64) -> Option<String> {
        let waited = now_ns.saturating_sub(self.asked_ns.get()?);
        let tell = waited >= self.limit_ns && !self.told_of_silence.replace(true);
        tell.then(|| {
            let waited = Seconds(waited);
            format!("an I/O thread has not answered for {waited}: it is busy or blocked")
        })
    }

    /// Records the answer: the requests in flight. Returns log lines.
    pub(super) fn look(&self, in_flight: &[(u64, InFlight)], now_ns: u64) -> Vec<String> {
        self.asked_ns.set(None);
        self.told_of_silence.set(false);
        let key = |(queue, request): &(u64, InFlight)| (*queue, request.id, request.started_ns);
        let age = |started_ns: u64| now_ns.saturating_sub(started_ns);
        let mut lines = Vec::new();
        let mut told = self.told.borrow_mut();
        let there: Vec<Key> = in_flight.iter().map(key).collect();
        told.retain(|key, request| {
            let is_there = there.contains(key);
            if !is_there {
                let (latest, what) =
                    (Seconds(age(request.started_ns)), self.describe(key.0, request));
                lines.push(format!("{what} was answered, within {latest}"));
            }
            is_there
        });
        for entry in in_flight {
            let (key, (queue, request)) = (key(entry), entry);
            let age = age(request.started_ns);
            if age >= self.limit_ns && told.insert(key, *request).is_none() {
                let (limit, age) = (Seconds(self.limit_ns), Seconds(age));
                let what = self.describe(*queue, request);
                lines.push(format!("{what} takes longer than {limit}: {age} so far"));
            }
        }
        if let Some(more) = lines.len().checked_sub(MAX_LINES).filter(|more| *more > 0) {
            lines.truncate(MAX_LINES);
            lines.push(format!("and {more} more requests like that"));
        }
        lines
    }

    fn describe(&self, queue: u64, request: &InFlight) -> String {
        let InFlight { kind, lun, offset, len, .. } = request;
        let (name, kind) = (self.queue, kind.name());
        let lun = lun.map(|lun| format!(", LUN {lun}")).unwrap_or_default();
        let range = match len {
            0 => String::new(),
            len => format!(" of {len} bytes at offset {offset}"),
        };
        format!("{name} {queue}{lun}: {kind}{range}")
    }
}

/// Nanoseconds, printed as seconds.
struct Seconds(u64);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} s", self.0 as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use stats::Kind;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn request(id: u64, started: u64) -> (u64, InFlight) {
        let (kind, started_ns) = (Kind::Write, started * SECOND);
        (3, InFlight { id, kind, lun: None, offset: 4096, len: 512, started_ns })
    }

    #[test]
    fn a_slow_request_is_reported_once_and_again_at_its_answer() {
        let stalls = Stalls::new(10 * SECOND, "vhost-user-blk");
        let look = |list: &[_], now: u64| stalls.look(list, now * SECOND);
        let (first, second) = (request(1, 100), request(2, 104));
        assert_eq!(look(&[first, second], 109), [""; 0]);
        let what = "queue 3: write of 512 bytes at offset 4096";
        let told = format!("{what} takes longer than 10.000 s: 11.000 s so far");
        assert_eq!(look(&[first, second], 111), [told]);
        assert_eq!(look(&[first, second], 112), [""; 0]);
        // Another request in the same place.
        let again = request(1, 113);
        let answered = format!("{what} was answered, within 14.000 s");
        let told = format!("{what} takes longer than 10.000 s: 10.000 s so far");
        assert_eq!(look(&[again, second], 114), [answered, told]);
        let answered = format!("{what} was answered, within 15.000 s");
        assert_eq!(look(&[again], 119), [answered]);
    }

    #[test]
    fn excess_lines_are_counted_and_a_silent_thread_is_reported() {
        let stalls = Stalls::new(SECOND, "nbd");
        let list: Vec<_> = (0..100).map(|id| request(id, 1)).collect();
        let lines = stalls.look(&list, 5 * SECOND);
        assert_eq!(lines.len(), MAX_LINES + 1);
        assert!(lines[0].starts_with("connection 3: write of"), "{lines:?}");
        assert_eq!(lines[MAX_LINES], format!("and {} more requests like that", 100 - MAX_LINES));
        assert_eq!(stalls.look(&list, 6 * SECOND), [""; 0]);
        assert!(stalls.must_ask(false), "they are awaited");
        stalls.ask(6 * SECOND);
        assert!(!stalls.must_ask(true));
        assert_eq!(stalls.silence(6 * SECOND), None);
        assert!(stalls.silence(8 * SECOND).is_some());
        assert_eq!(stalls.silence(9 * SECOND), None);
        assert_eq!(stalls.look(&[], 9 * SECOND).len(), MAX_LINES + 1);
        assert!(!stalls.must_ask(false));
    }
}
