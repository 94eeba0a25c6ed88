//! Properties of the pure parts, over generated cases.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use event_loop::polling::policy::{Policy, SourceKind, SourceState};
use event_loop::polling::price::Price;
use event_loop::polling::weighted;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{DeferredCall, EventLoop, LoopConfig, PollGoal, PollParams, PollPolicy};
use proptest::prelude::*;

fn params() -> impl Strategy<Value = PollParams> {
    let max_ns = prop_oneof![Just(0), Just(32768), any::<u64>()];
    let small = prop_oneof![0..5u32, any::<u32>()];
    let policy = prop::sample::select(PollPolicy::ALL.map(|(_, policy, _)| policy).to_vec());
    let goal = prop_oneof![Just(PollGoal::Latency), Just(PollGoal::Balanced), Just(PollGoal::Cpu)];
    (policy, goal, max_ns, small.clone(), small.clone(), small).prop_map(
        |(policy, goal, max_ns, grow, shrink, weight)| PollParams {
            policy,
            goal,
            max_ns,
            grow,
            shrink,
            weight,
        },
    )
}

fn interval() -> impl Strategy<Value = u64> {
    prop_oneof![0..100_000u64, any::<u64>()]
}

/// The weighted policy (docs/decisions/0009-polling-policy.md), in integers that cannot overflow.
fn model(ns: u128, params: &PollParams, interval: u128, had_event: bool) -> u128 {
    let weight = if params.weight == 0 { 3 } else { params.weight.min(63) };
    let ns = match (had_event, ns) {
        (true, 0) => interval,
        (true, ns) => ns - (ns >> weight) + (interval >> weight),
        (false, 0) => 0,
        (false, ns) => ns + interval,
    };
    if ns > u128::from(params.max_ns) { 0 } else { ns }
}

proptest! {
    #[test]
    fn intervals_follow_the_algorithm(params in params(), events in prop::collection::vec((interval(), any::<bool>()), 0..50)) {
        let (mut ns, mut expected) = (0, 0);
        for (interval, had_event) in events {
            // Sums that do not fit are beyond any maximum but one.
            prop_assume!(expected + u128::from(interval) < u128::from(u64::MAX));
            weighted::update(&mut ns, &params, interval, had_event);
            expected = model(expected, &params, interval.into(), had_event);
            prop_assert_eq!(u128::from(ns), expected);
            prop_assert!(ns <= params.max_ns);
        }
    }

    #[test]
    fn the_weighted_window_keeps_to_its_bounds_and_moves_towards_what_was_needed(params in params(), needs in prop::collection::vec(interval(), 0..50)) {
        let mut window = 0;
        for best in needs {
            let best = best.min(params.max_ns);
            let before = window;
            window = weighted::follow(window, &params, best);
            prop_assert!(window <= params.max_ns);
            if best > before {
                prop_assert!(window >= best, "it must reach what was needed");
            } else {
                prop_assert!(window <= before && (window >= best || window == before));
            }
        }
    }

    #[test]
    fn no_policy_exceeds_the_maximum_nor_panics(params in params(), price in (any::<u64>(), any::<u64>()), rounds in prop::collection::vec((interval(), any::<bool>(), any::<bool>(), 0..70_000usize), 0..300)) {
        let (mut policy, mut ring, mut queue) = (Policy::default(), SourceState::default(), SourceState::default());
        for (interval, completion, request, in_flight) in rounds {
            policy.begin(interval);
            policy.account(&params, &mut ring, SourceKind::Ring, completion);
            policy.account(&params, &mut queue, SourceKind::Handler, request);
            policy.end(&params, Price::new(price.0, price.1), in_flight, u64::from(completion));
            prop_assert!(policy.window_ns() <= params.max_ns);
        }
    }

    #[test]
    fn deferred_calls_run_once_per_section_in_order(sections in prop::collection::vec(prop::collection::vec((0..6usize, 0..3u32), 0..12), 1..6)) {
        let sim = Sim::new(0, Faults::default());
        let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
        let log = Rc::new(RefCell::new(Vec::new()));
        let calls: Vec<_> = (0..6).map(|name| Rc::new(Call {
            event_loop: event_loop.clone(), name, log: log.clone(), queued: Cell::new(false), again: Cell::new(0),
        })).collect();
        for section in sections {
            log.borrow_mut().clear();
            let mut expected: Vec<usize> = Vec::new();
            let mut more = [0; 6];
            event_loop.section(|| {
                for (name, again) in &section {
                    let call = &calls[*name];
                    if !expected.contains(name) {
                        expected.push(*name);
                        call.again.set(*again);
                        more[*name] = *again;
                    }
                    event_loop.section(|| event_loop.defer(&(call.clone() as Rc<dyn DeferredCall>)));
                    assert!(log.borrow().is_empty(), "an inner section's end runs nothing");
                }
            });
            // Those that deferred themselves again follow, round by round.
            let first = expected.clone();
            for round in 1..=3 {
                expected.extend(first.iter().filter(|name| more[**name] >= round));
            }
            prop_assert_eq!(&*log.borrow(), &expected);
        }
    }
}

struct Call {
    event_loop: EventLoop,
    name: usize,
    log: Rc<RefCell<Vec<usize>>>,
    queued: Cell<bool>,
    again: Cell<u32>,
}

impl DeferredCall for Call {
    fn run(&self) {
        self.log.borrow_mut().push(self.name);
        if self.again.get() > 0 {
            self.again.set(self.again.get() - 1);
            // Only itself: another handle of the same, as devices do it.
            let me: Rc<dyn DeferredCall> = Rc::new(Again(
                self.name,
                self.log.clone(),
                Cell::new(false),
                self.event_loop.clone(),
                Cell::new(self.again.get()),
            ));
            self.event_loop.defer(&me);
        }
    }
    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

/// What a call leaves to be done once more.
struct Again(usize, Rc<RefCell<Vec<usize>>>, Cell<bool>, EventLoop, Cell<u32>);

impl DeferredCall for Again {
    fn run(&self) {
        self.1.borrow_mut().push(self.0);
        if self.4.get() > 0 {
            let left = self.4.get() - 1;
            let next =
                Again(self.0, self.1.clone(), Cell::new(false), self.3.clone(), Cell::new(left));
            self.3.defer(&(Rc::new(next) as Rc<dyn DeferredCall>));
        }
    }
    fn queued(&self) -> &Cell<bool> {
        &self.2
    }
}
