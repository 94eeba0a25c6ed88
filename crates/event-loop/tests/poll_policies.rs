//! What the polling policies do under simple loads, as pure values. `bench polling` compares them under
//! real ones.

use event_loop::polling::policy::{Policy, SourceKind, SourceState};
use event_loop::polling::price::Price;
use event_loop::{PollGoal, PollParams, PollPolicy};

/// The policies that follow the load.
fn adaptive() -> impl Iterator<Item = PollPolicy> {
    let policies = PollPolicy::ALL.into_iter().map(|(_, policy, _)| policy);
    policies.filter(|policy| *policy != PollPolicy::Fixed)
}

/// A virtual machine's: how late a sleep makes an event, and its CPU time, nanoseconds.
const LATE_NS: u64 = 30_000;
const CPU_NS: u64 = 10_000;

/// A loop with a queue and a disk.
struct Loop {
    params: PollParams,
    late_ns: u64,
    price: Price,
    policy: Policy,
    ring: SourceState,
    queue: SourceState,
    slept: u32,
}

impl Loop {
    fn new(policy: PollPolicy) -> Self {
        Loop {
            params: PollParams::of(policy),
            late_ns: LATE_NS,
            price: Price::new(LATE_NS, CPU_NS),
            policy: Policy::default(),
            ring: SourceState::default(),
            queue: SourceState::default(),
            slept: 0,
        }
    }

    /// Waits for an event that comes after `gap` ns; afterwards so many operations are `in_flight`.
    /// Returns the window that there was.
    fn wait(&mut self, gap: u64, kind: SourceKind, in_flight: usize) -> u64 {
        let window = self.policy.window_ns();
        let found = gap <= window;
        self.slept += u32::from(!found);
        self.policy.begin(if found { gap } else { gap + self.late_ns });
        let ring = kind == SourceKind::Ring;
        self.policy.account(&self.params, &mut self.ring, SourceKind::Ring, ring);
        self.policy.account(&self.params, &mut self.queue, SourceKind::Handler, !ring);
        self.policy.end(&self.params, self.price, in_flight, u64::from(ring));
        window
    }

    /// A guest at depth 1 with these disk and think times; returns the windows that there were.
    fn request(&mut self, disk: u64, think: u64) -> (u64, u64) {
        let thinking = self.wait(think, SourceKind::Handler, 1);
        (self.wait(disk, SourceKind::Ring, 0), thinking)
    }

    /// How many of so many waits of `gap` ns, for a queue, ended in a sleep.
    fn sleeps(&mut self, waits: u32, gap: u64) -> u32 {
        let before = self.slept;
        for _ in 0..waits {
            self.wait(gap, SourceKind::Handler, 0);
        }
        self.slept - before
    }
}

#[test]
fn a_fast_source_is_polled_and_a_slow_one_is_not() {
    for policy in adaptive() {
        let mut fast = Loop::new(policy);
        fast.sleeps(100, 2_000);
        assert_eq!(fast.sleeps(2_000, 2_000), 0, "{policy:?}");
        let mut slow = Loop::new(policy);
        slow.sleeps(100, 1_000_000);
        assert_eq!(slow.policy.window_ns(), 0, "{policy:?}");
        assert_eq!(slow.sleeps(2_000, 1_000_000), 2_000, "{policy:?}");
    }
}

#[test]
fn a_maximum_of_0_never_polls() {
    for policy in adaptive() {
        let mut off = Loop::new(policy);
        off.params.max_ns = 0;
        assert_eq!(off.sleeps(1_000, 1), 1_000, "{policy:?}");
    }
}

#[test]
fn a_change_of_load_is_followed() {
    for policy in adaptive() {
        let mut loads = Loop::new(policy);
        for _ in 0..3 {
            loads.sleeps(1_000, 1_000_000);
            loads.sleeps(250, 2_000);
            assert_eq!(loads.sleeps(100, 2_000), 0, "{policy:?} polls within 250 events");
            loads.sleeps(400, 1_000_000);
            let mut polled = 0;
            for _ in 0..100 {
                polled += loads.wait(1_000_000, SourceKind::Handler, 0);
            }
            // The weighted window is never halved to nothing.
            assert!(polled <= 100, "{policy:?} stops within 400 events: {polled} ns");
        }
    }
}

#[test]
fn another_policy_begins_anew() {
    let mut changed = Loop::new(PollPolicy::Weighted);
    changed.sleeps(100, 2_000);
    assert!(changed.policy.window_ns() > 0);
    let after = PollParams { policy: PollPolicy::Stepped, ..changed.params };
    changed.policy.change(&changed.params, &after);
    assert_eq!(changed.policy.window_ns(), 0);
}

/// A guest that waits for its answers and sleeps when they do not come at once: what is in between its answer
/// and its next request holds its own wake-up.
#[test]
fn loops_that_put_each_other_to_sleep_are_detected() {
    let mut both = Loop::new(PollPolicy::Measured);
    let (mut asleep, mut polled) = (true, 0);
    for wait in 0..2_000 {
        let gap = if asleep { LATE_NS + 2_000 } else { 2_000 };
        asleep = both.wait(gap, SourceKind::Handler, 0) < gap;
        polled += u32::from(wait >= 200 && !asleep);
    }
    assert_eq!(polled, 1_800, "all but the first 200 waits are polled");
}

#[test]
fn arrivals_by_the_clock_that_a_sleep_makes_look_close_are_slept_for() {
    // Every 50 us; a loop that is late waits less for the next one.
    let mut clock = Loop::new(PollPolicy::Measured);
    let (mut late, mut slept) = (0, 0);
    for wait in 0..20_000 {
        let gap = 50_000 - late;
        let found = clock.wait(gap, SourceKind::Handler, 0) >= gap;
        late = if found { 0 } else { LATE_NS };
        slept += u32::from(wait >= 10_000 && !found);
    }
    assert!(slept > 9_900, "{slept} of 10,000 waits are slept");
}

#[test]
fn a_slow_disk_is_slept_for_and_its_guest_polled_for() {
    let mut slow_disk = Loop::new(PollPolicy::Measured);
    for _ in 0..200 {
        slow_disk.request(100_000, 5_000);
    }
    let (mut for_disk, mut for_guest) = (0, 0);
    for _ in 0..2_000 {
        let (disk, guest) = slow_disk.request(100_000, 5_000);
        for_disk += u32::from(disk > 0);
        for_guest += u32::from(guest >= 5_000);
    }
    assert_eq!((for_disk, for_guest), (0, 2_000));
}

#[test]
fn the_hits_of_a_cache_are_polled_for_and_not_its_misses() {
    let mut cached = Loop::new(PollPolicy::Measured);
    let disk = |request: u64| if request.is_multiple_of(4) { 200_000 } else { 3_000 };
    for request in 0..400 {
        cached.request(disk(request), 5_000);
    }
    for request in 0..2_000 {
        let (for_disk, _) = cached.request(disk(request), 5_000);
        assert!((3_000..8_000).contains(&for_disk), "{for_disk}");
    }
}

/// What a deep queue waits for is served by the wake-up of another.
#[test]
fn a_deep_queue_is_slept_for_where_a_single_request_is_polled_for() {
    let windows = |in_flight| {
        let mut disk = Loop::new(PollPolicy::Measured);
        (0..2_000)
            .map(|_| u64::from(disk.wait(8_000, SourceKind::Ring, in_flight) > 0))
            .sum::<u64>()
    };
    assert!(windows(1) > 1_900, "{}", windows(1));
    assert!(windows(64) < 100, "{}", windows(64));
}

#[test]
fn the_goal_moves_the_longest_wait_that_is_polled() {
    let polls = |goal, gap| {
        let mut waits = Loop::new(PollPolicy::Measured);
        waits.params.goal = goal;
        waits.sleeps(1_000, gap);
        waits.sleeps(1_000, gap) < 100
    };
    // A sleep is worth 20 us of CPU time, and 15 or 120 us for being late.
    assert!(polls(PollGoal::Cpu, 10_000) && !polls(PollGoal::Cpu, 25_000));
    assert!(polls(PollGoal::Balanced, 25_000) && !polls(PollGoal::Balanced, 50_000));
    assert!(polls(PollGoal::Latency, 50_000) && !polls(PollGoal::Latency, 150_000));
}

/// The same waits on a machine where sleeps are ten times cheaper.
#[test]
fn the_machine_decides() {
    let mut cheap = Loop::new(PollPolicy::Measured);
    (cheap.late_ns, cheap.price) = (3_000, Price::new(3_000, 1_000));
    cheap.sleeps(1_000, 10_000);
    assert!(cheap.sleeps(1_000, 10_000) > 900);
    let mut dear = Loop::new(PollPolicy::Measured);
    dear.sleeps(1_000, 10_000);
    assert!(dear.sleeps(1_000, 10_000) < 100);
}

/// The same waits of a thread that shares its CPU: where it polls, others wait.
#[test]
fn a_thread_without_a_cpu_of_its_own_polls_only_to_save_cpu_time() {
    let polls = |share, gap| {
        let mut waits = Loop::new(PollPolicy::Measured);
        waits.price = waits.price.with_share(share);
        waits.sleeps(1_000, gap);
        waits.sleeps(1_000, gap) < 100
    };
    assert!(polls(100, 26_000) && !polls(10, 26_000));
    assert!(polls(10, 8_000));
}

#[test]
fn no_window_is_longer_than_the_maximum() {
    for max_ns in [1, 255, 256, 1_000, 1 << 20, 1 << 40, u64::MAX] {
        let mut limited = Loop::new(PollPolicy::Measured);
        limited.params.max_ns = max_ns;
        for gap in [0, 100, 10_000, 300_000, 1 << 50] {
            for _ in 0..200 {
                assert!(limited.wait(gap, SourceKind::Ring, 1) <= max_ns);
            }
        }
    }
}

#[test]
fn a_fixed_window_is_what_it_is() {
    let mut fixed = Loop::new(PollPolicy::Fixed);
    fixed.sleeps(1, 1_000_000);
    for _ in 0..100 {
        assert_eq!(fixed.wait(1_000_000, SourceKind::Ring, 1), PollParams::QEMU_MAX_NS);
    }
}
