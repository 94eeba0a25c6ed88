//! A loop's waits in virtual time, under a policy and a load.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use event_loop::PollParams;
use event_loop::polling::policy::{Policy, SourceKind, SourceState};

use super::traces::{Arrivals, Draws, Load, RecordedWait};

/// What things cost, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    /// CPU time of going to sleep and waking up.
    pub(crate) sleep_cpu: u64,
    /// From an event to the loop being awake.
    pub(crate) waking: u64,
    /// CPU time of an iteration beside what it does.
    pub(crate) iteration: u64,
    /// CPU time of taking a request, and of taking a completion.
    pub(crate) event: u64,
}

/// As measured on the machine of docs/BENCHMARKS.md: a thread woken by an eventfd from another CPU
/// after 5 to 500 us of sleep takes 3.4 to 8.0 us of CPU time and comes 14 to 22 us after the write.
pub(crate) const COSTS: Costs =
    Costs { sleep_cpu: 6_000, waking: 16_000, iteration: 200, event: 1_000 };

/// After so long without an event a source is polled for no more.
const LEAVES_AFTER: u64 = 7_000_000_000;

/// What came of a run; times in nanoseconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) elapsed: u64,
    /// CPU time spent polling, on sleeps, and on work.
    pub(crate) polled: u64,
    pub(crate) switching: u64,
    pub(crate) working: u64,
    pub(crate) requests: u64,
    /// From each request to its answer.
    pub(crate) latencies: Vec<u64>,
}

impl Outcome {
    fn finish(mut self, now: u64) -> Self {
        self.elapsed = now;
        self.latencies.sort_unstable();
        self
    }

    /// CPU time, of the time that has passed.
    pub(crate) fn utilisation(&self) -> f64 {
        (self.polled + self.switching + self.working) as f64 / self.elapsed as f64
    }

    /// CPU time per request, microseconds.
    pub(crate) fn cpu(&self) -> f64 {
        (self.polled + self.switching + self.working) as f64 / 1e3 / self.requests as f64
    }

    /// Requests per second.
    pub(crate) fn throughput(&self) -> f64 {
        self.requests as f64 * 1e9 / self.elapsed as f64
    }

    /// Latency in microseconds at a quantile, 0 to 1.
    pub(crate) fn latency(&self, quantile: f64) -> f64 {
        let rank = (self.latencies.len().saturating_sub(1) as f64 * quantile) as usize;
        self.latencies.get(rank).map_or(f64::NAN, |&ns| ns as f64 / 1e3)
    }
}

/// A loop that waits.
struct Waiting<'a> {
    now: u64,
    params: &'a PollParams,
    costs: &'a Costs,
    policy: Policy,
    ring: SourceState,
    out: Outcome,
}

impl<'a> Waiting<'a> {
    fn new(params: &'a PollParams, costs: &'a Costs) -> Self {
        Waiting {
            now: 0,
            params,
            costs,
            policy: Policy::default(),
            ring: SourceState::default(),
            out: Outcome::default(),
        }
    }

    /// Waits for an event at `at`, which may have been; returns the interval as the loop sees it.
    fn wait(&mut self, at: u64) -> u64 {
        let began = self.now;
        if at > began {
            let window = if self.params.max_ns > 0 { self.policy.window_ns() } else { 0 };
            if at <= began + window {
                self.out.polled += at - began;
                self.now = at;
            } else {
                self.out.polled += window;
                self.out.switching += self.costs.sleep_cpu;
                self.now = at.max(began + window) + self.costs.waking;
            }
        }
        self.now - began + self.costs.iteration
    }

    fn work(&mut self, ns: u64) {
        self.now += ns;
        self.out.working += ns;
    }

    fn begin(&mut self, interval: u64, by_ring: bool) {
        self.policy.begin(interval);
        self.policy.account(self.params, &mut self.ring, SourceKind::Ring, by_ring);
    }

    fn answer(&mut self, at: u64, asked: u64) {
        self.out.requests += 1;
        self.out.latencies.push(at - asked);
    }
}

/// Runs `load` for `duration` ns of virtual time (a recorded one: once).
pub(crate) fn run(
    load: &Load,
    params: &PollParams,
    costs: &Costs,
    duration: u64,
    seed: u64,
) -> Outcome {
    match load {
        Load::Queues(queues) => Model::new(queues, params, costs, seed).run(duration),
        Load::Recorded(waits) => replay(waits, params, costs),
    }
}

/// Each wait counts as a request, from its event on.
fn replay(waits: &[RecordedWait], params: &PollParams, costs: &Costs) -> Outcome {
    let mut lp = Waiting::new(params, costs);
    let mut queue = SourceState::default();
    for wait in waits {
        let at = lp.now + wait.gap_ns;
        let interval = lp.wait(at);
        lp.work(costs.iteration + costs.event);
        lp.answer(lp.now, at);
        lp.begin(interval, wait.by_ring);
        lp.policy.account(params, &mut queue, SourceKind::Handler, wait.by_queue);
        lp.policy.end(params, wait.in_flight);
    }
    let now = lp.now;
    lp.out.finish(now)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request on this queue.
    Request(usize),
    /// The completion of this queue's request of that time.
    Completion(usize, u64),
}

struct QueueState {
    source: SourceState,
    had_event: bool,
    last_event: u64,
    in_set: bool,
    between: Draws,
    disk: Option<Draws>,
    is_open: bool,
}

struct Model<'a> {
    lp: Waiting<'a>,
    /// By time, then by age.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pushed: u64,
    queues: Vec<QueueState>,
    in_flight: u64,
}

impl<'a> Model<'a> {
    fn new(
        queues: &[super::traces::Queue],
        params: &'a PollParams,
        costs: &'a Costs,
        seed: u64,
    ) -> Self {
        let mut model = Model {
            lp: Waiting::new(params, costs),
            events: BinaryHeap::new(),
            pushed: 0,
            queues: Vec::new(),
            in_flight: 0,
        };
        for (i, queue) in queues.iter().enumerate() {
            let seed = seed + 1_000 * i as u64;
            let (times, first, is_open) = match &queue.arrivals {
                Arrivals::Open(times) => (times, 1, true),
                Arrivals::Closed(depth, times) => (times, *depth, false),
            };
            let mut between = Draws::new(times.clone(), seed);
            for _ in 0..first {
                let at = between.next();
                model.push(at, Event::Request(i));
            }
            model.queues.push(QueueState {
                source: SourceState::default(),
                had_event: false,
                last_event: 0,
                in_set: false,
                between,
                disk: queue.disk.clone().map(|times| Draws::new(times, seed + 500)),
                is_open,
            });
        }
        model
    }

    fn push(&mut self, at: u64, event: Event) {
        self.pushed += 1;
        self.events.push(Reverse((at, self.pushed, event)));
    }

    fn run(mut self, duration: u64) -> Outcome {
        while self.lp.now < duration {
            let Some(&Reverse((at, ..))) = self.events.peek() else { break };
            let interval = self.lp.wait(at);
            let arrived = self.lp.now;
            self.lp.work(self.lp.costs.iteration);
            let mut by_ring = false;
            while let Some(&Reverse((at, _, event))) = self.events.peek() {
                if at > arrived {
                    break;
                }
                self.events.pop();
                self.lp.work(self.lp.costs.event);
                by_ring |= self.dispatch(at, event);
            }
            if self.lp.params.max_ns > 0 {
                self.account(interval, by_ring);
            }
        }
        self.lp.out.finish(self.lp.now)
    }

    /// `true`: it came from the ring.
    fn dispatch(&mut self, at: u64, event: Event) -> bool {
        let now = self.lp.now;
        let (i, asked, by_ring) = match event {
            Event::Request(i) => {
                let queue = &mut self.queues[i];
                (queue.had_event, queue.in_set, queue.last_event) = (true, true, now);
                let next = if queue.is_open { Some(at + queue.between.next()) } else { None };
                let done = queue.disk.as_mut().map(|disk| now + disk.next());
                if let Some(next) = next {
                    self.push(next, Event::Request(i));
                }
                if let Some(done) = done {
                    self.in_flight += 1;
                    self.push(done, Event::Completion(i, at));
                    return false;
                }
                (i, at, false)
            }
            Event::Completion(i, asked) => {
                self.in_flight -= 1;
                (i, asked, true)
            }
        };
        self.lp.answer(now, asked);
        let queue = &mut self.queues[i];
        if !queue.is_open {
            let next = now + queue.between.next();
            self.push(next, Event::Request(i));
        }
        by_ring
    }

    fn account(&mut self, interval: u64, by_ring: bool) {
        let lp = &mut self.lp;
        lp.begin(interval, by_ring);
        for queue in self.queues.iter_mut().filter(|queue| queue.in_set) {
            let had_event = std::mem::take(&mut queue.had_event);
            lp.policy.account(lp.params, &mut queue.source, SourceKind::Handler, had_event);
            queue.in_set = lp.now - queue.last_event < LEAVES_AFTER;
        }
        lp.policy.end(lp.params, self.in_flight > 0);
    }
}
