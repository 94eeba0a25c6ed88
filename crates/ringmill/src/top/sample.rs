//! A daemon's activity between two samples of its monitor.

use std::collections::BTreeMap;

use control::TopSort;
use serde_json::Value as Json;

/// The values at one time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sample {
    exports: Vec<Export>,
    threads: Vec<Thread>,
}

#[derive(Debug, Clone, Default)]
struct Export {
    id: String,
    kind: String,
    connected: bool,
    /// `io-status`; empty: the daemon does not report it.
    io_status: String,
    queues: Vec<Queue>,
}

#[derive(Debug, Clone, Default)]
struct Queue {
    number: u64,
    iothread: String,
    in_flight: u64,
    batches: u64,
    done: u64,
    errors: u64,
    bytes: u64,
    total_ns: u64,
    latencies: Latencies,
}

#[derive(Debug, Clone, Default)]
struct Thread {
    id: String,
    cpu_ns: u64,
    polled_ns: u64,
    window_ns: u64,
    hits: u64,
    misses: u64,
    iterations: u64,
    enters: u64,
    wakeups: u64,
}

/// Numbers of requests per range of latency: start, end, count.
type Latencies = BTreeMap<u64, (u64, u64)>;

/// The activity in an interval, per second unless stated otherwise.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Work {
    /// The export's name; for a queue, its number and thread.
    pub(crate) name: String,
    /// The export's type; empty for a queue.
    pub(crate) kind: String,
    pub(crate) requests: f64,
    pub(crate) errors: f64,
    pub(crate) bytes: f64,
    /// Percentiles of latency in nanoseconds; `None`: no answers.
    pub(crate) percentiles: [Option<f64>; 3],
    /// Mean requests in flight.
    pub(crate) depth: f64,
    /// Requests in flight at the end.
    pub(crate) in_flight: u64,
    /// Answers per batch.
    pub(crate) batch: Option<f64>,
    pub(crate) connected: bool,
    /// What the export does; empty for a queue.
    pub(crate) state: &'static str,
    /// The queues, if there are several.
    pub(crate) queues: Vec<Work>,
}

/// The activity of a thread in an interval.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Turns {
    pub(crate) id: String,
    /// Fraction of the interval, 0 to 1.
    pub(crate) cpu: f64,
    pub(crate) polled: f64,
    /// Poll window at the end, nanoseconds.
    pub(crate) window_ns: u64,
    /// Fraction of successful polls, 0 to 1; `None`: it did not poll.
    pub(crate) success: Option<f64>,
    /// Per second.
    pub(crate) iterations: f64,
    pub(crate) enters: f64,
    pub(crate) wakeups: f64,
}

/// The activity of a daemon in an interval.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct View {
    pub(crate) exports: Vec<Work>,
    pub(crate) threads: Vec<Turns>,
}

fn list(value: &Json) -> impl Iterator<Item = &Json> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Json) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn number(value: &Json) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// Adds a number from the daemon; saturates, because it may be anything.
fn count(to: &mut u64, more: u64) {
    *to = to.saturating_add(more);
}

impl Sample {
    /// Parses the answers of `x-query-export-stats` and `x-query-iothread-stats`. Missing numbers count
    /// as 0.
    pub(crate) fn read(exports: &Json, threads: &Json) -> Self {
        let exports = list(exports).map(Export::read).collect();
        Sample { exports, threads: list(threads).map(Thread::read).collect() }
    }

    /// The activity since `before`, `seconds` ago.
    pub(crate) fn since(&self, before: &Sample, seconds: f64, sort: TopSort) -> View {
        let exports = self.exports.iter().map(|export| {
            let earlier = before.exports.iter().find(|other| other.id == export.id);
            export.work(earlier.unwrap_or(&Export::default()), seconds)
        });
        let mut exports: Vec<Work> = exports.collect();
        let key = |work: &Work| match sort {
            TopSort::Order => 0.0,
            TopSort::Requests => work.requests,
            TopSort::Bytes => work.bytes,
            TopSort::Latency => work.percentiles[1].unwrap_or(0.0),
            TopSort::Depth => work.depth,
        };
        // Stable: equal exports keep the daemon's order.
        exports.sort_by(|a, b| key(b).total_cmp(&key(a)));
        let threads = self.threads.iter().map(|thread| {
            let earlier = before.threads.iter().find(|other| other.id == thread.id);
            thread.turns(earlier.unwrap_or(&Thread::default()), seconds)
        });
        View { exports, threads: threads.collect() }
    }
}

impl Export {
    fn read(json: &Json) -> Self {
        Export {
            id: text(&json["id"]),
            kind: text(&json["type"]),
            connected: json["connected"] == true,
            io_status: text(&json["io-status"]),
            queues: list(&json["queues"]).map(Queue::read).collect(),
        }
    }

    fn work(&self, before: &Export, seconds: f64) -> Work {
        let pair = |queue: &Queue| {
            let earlier = before.queues.iter().find(|other| other.number == queue.number);
            queue.since(earlier.unwrap_or(&Queue::default()))
        };
        let queues: Vec<Queue> = self.queues.iter().map(pair).collect();
        let mut all = Queue::default();
        queues.iter().for_each(|queue| all.add(queue));
        let rows = queues.iter().map(|queue| {
            let name = format!("{} on {}", queue.number, queue.iothread);
            queue.work(name, seconds)
        });
        let queues = if queues.len() > 1 { rows.collect() } else { Vec::new() };
        let (kind, connected) = (self.kind.clone(), self.connected);
        Work { kind, connected, state: self.state(), queues, ..all.work(self.id.clone(), seconds) }
    }

    /// A stopped export holds requests, whether or not a client is connected.
    fn state(&self) -> &'static str {
        match self.io_status.as_str() {
            "nospace" => "nospace",
            "failed" => "failed",
            _ if self.connected => "ok",
            _ => "unused",
        }
    }
}

impl Queue {
    fn read(json: &Json) -> Self {
        let mut queue = Queue {
            number: number(&json["queue"]),
            iothread: text(&json["iothread"]),
            in_flight: number(&json["in-flight"]),
            batches: number(&json["batches"]),
            ..Queue::default()
        };
        for requests in list(&json["requests"]) {
            count(&mut queue.done, number(&requests["done"]));
            count(&mut queue.errors, number(&requests["failed"]));
            count(&mut queue.errors, number(&requests["invalid"]));
            count(&mut queue.total_ns, number(&requests["total-ns"]));
            // Only transferred bytes: a discard of a whole disk is no throughput.
            if requests["operation"] == "read" || requests["operation"] == "write" {
                count(&mut queue.bytes, number(&requests["bytes"]));
            }
            for range in list(&requests["latencies"]) {
                let begin = number(&range["begin-ns"]);
                let end = range["end-ns"].as_u64().unwrap_or(begin).max(begin);
                count(
                    &mut queue.latencies.entry(begin).or_insert((end, 0)).1,
                    number(&range["count"]),
                );
            }
        }
        queue
    }

    /// Subtracts the counters of `before`. Present values stay.
    fn since(&self, before: &Queue) -> Queue {
        let mut latencies = self.latencies.clone();
        for (begin, (_, count)) in &mut latencies {
            let earlier = before.latencies.get(begin).map_or(0, |(_, count)| *count);
            *count = count.saturating_sub(earlier);
        }
        Queue {
            number: self.number,
            iothread: self.iothread.clone(),
            in_flight: self.in_flight,
            batches: self.batches.saturating_sub(before.batches),
            done: self.done.saturating_sub(before.done),
            errors: self.errors.saturating_sub(before.errors),
            bytes: self.bytes.saturating_sub(before.bytes),
            total_ns: self.total_ns.saturating_sub(before.total_ns),
            latencies,
        }
    }

    fn add(&mut self, other: &Queue) {
        count(&mut self.in_flight, other.in_flight);
        count(&mut self.batches, other.batches);
        count(&mut self.done, other.done);
        count(&mut self.errors, other.errors);
        count(&mut self.bytes, other.bytes);
        count(&mut self.total_ns, other.total_ns);
        for (begin, (end, more)) in &other.latencies {
            count(&mut self.latencies.entry(*begin).or_insert((*end, 0)).1, *more);
        }
    }

    fn work(&self, name: String, seconds: f64) -> Work {
        let answers = self.done.saturating_add(self.errors);
        Work {
            name,
            kind: String::new(),
            requests: self.done as f64 / seconds,
            errors: self.errors as f64 / seconds,
            bytes: self.bytes as f64 / seconds,
            percentiles: [0.5, 0.99, 0.999].map(|part| percentile(&self.latencies, part)),
            // Little's law.
            depth: self.total_ns as f64 / 1e9 / seconds,
            in_flight: self.in_flight,
            batch: (self.batches > 0).then(|| answers as f64 / self.batches as f64),
            connected: false,
            state: "",
            queues: Vec::new(),
        }
    }
}

/// The latency in nanoseconds that the fraction `part` of all requests does not exceed. Within a range it is
/// interpolated linearly.
fn percentile(latencies: &Latencies, part: f64) -> Option<f64> {
    let all: f64 = latencies.values().map(|(_, count)| *count as f64).sum();
    let mut wanted = part * all;
    for (begin, (end, count)) in latencies.iter().filter(|(_, (_, count))| *count > 0) {
        let count = *count as f64;
        if wanted <= count {
            return Some(*begin as f64 + (end - begin) as f64 * (wanted / count));
        }
        wanted -= count;
    }
    None
}

impl Thread {
    fn read(json: &Json) -> Self {
        Thread {
            id: text(&json["id"]),
            cpu_ns: number(&json["cpu-ns"]),
            polled_ns: number(&json["polled-ns"]),
            window_ns: number(&json["poll-window-ns"]),
            hits: number(&json["polls-succeeded"]),
            misses: number(&json["polls-failed"]),
            iterations: number(&json["iterations"]),
            enters: number(&json["enters"]),
            wakeups: number(&json["wakeups"]),
        }
    }

    fn turns(&self, before: &Thread, seconds: f64) -> Turns {
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let hits = self.hits.saturating_sub(before.hits) as f64;
        let polls = hits + self.misses.saturating_sub(before.misses) as f64;
        Turns {
            id: self.id.clone(),
            cpu: rate(self.cpu_ns, before.cpu_ns) / 1e9,
            polled: rate(self.polled_ns, before.polled_ns) / 1e9,
            window_ns: self.window_ns,
            success: (polls > 0.0).then(|| hits / polls),
            iterations: rate(self.iterations, before.iterations),
            enters: rate(self.enters, before.enters),
            wakeups: rate(self.wakeups, before.wakeups),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn export(id: &str, done: u64, in_range: u64) -> Json {
        let range =
            |begin: u64, count| json!({"begin-ns": begin, "end-ns": begin + 1000, "count": count});
        json!({
            "id": id, "type": "vhost-user-blk", "connected": true,
            "queues": [{
                "queue": 0, "iothread": "io0", "in-flight": 7, "batches": done / 4,
                "requests": [
                    {"operation": "read", "done": done, "failed": 0, "invalid": 0,
                     "bytes": done * 4096, "total-ns": done * 1_000_000,
                     "latencies": [range(1000, in_range), range(9000, done - in_range)]},
                    {"operation": "discard", "done": 0, "bytes": 1u64 << 40, "latencies": []},
                ],
            }],
        })
    }

    #[test]
    fn a_view_has_the_activity_of_the_interval() {
        let thread = |n: u64| {
            json!([{"id": "io0", "cpu-ns": n * 500_000_000, "polled-ns": n * 250_000_000,
                    "poll-window-ns": 32768, "polls-succeeded": n * 3, "polls-failed": n,
                    "iterations": n * 100, "enters": n * 50, "wakeups": n * 10}])
        };
        let before = Sample::read(&json!([export("a", 1000, 1000)]), &thread(2));
        let now = json!([export("a", 1400, 1200), export("b", 4000, 0)]);
        let now = Sample::read(&now, &thread(4));
        let view = now.since(&before, 2.0, TopSort::Order);
        let a = &view.exports[0];
        assert_eq!((a.name.as_str(), a.requests, a.bytes), ("a", 200.0, 200.0 * 4096.0));
        // 200 of the new ones in each range.
        assert_eq!(a.percentiles, [Some(2000.0), Some(9980.0), Some(9998.0)]);
        assert_eq!((a.depth, a.in_flight, a.batch), (0.2, 7, Some(4.0)));
        assert!(a.queues.is_empty());
        let expected = Turns {
            id: "io0".into(),
            cpu: 0.5,
            polled: 0.25,
            window_ns: 32768,
            success: Some(0.75),
            iterations: 100.0,
            enters: 50.0,
            wakeups: 10.0,
        };
        assert_eq!(view.threads, [expected]);
        let busiest = now.since(&before, 2.0, TopSort::Requests);
        assert_eq!(busiest.exports[0].name, "b");
        let idle = now.since(&now, 2.0, TopSort::Order);
        assert_eq!(idle.exports[0].percentiles, [None; 3]);
        assert_eq!((idle.exports[0].requests, idle.exports[0].batch), (0.0, None));
    }

    #[test]
    fn missing_numbers_count_as_zero() {
        let odd = json!([{"id": 7, "queues": {"a": 1}}, 5, {"queues": [{"requests": [null]}]}]);
        let sample = Sample::read(&odd, &json!({"error": 1}));
        let view = sample.since(&Sample::default(), 1.0, TopSort::Latency);
        assert_eq!(view.exports.len(), 3);
        assert!(view.threads.is_empty());
    }
}
