//! What the polling policies do under simple loads, as pure values. How they compare over traces is
//! in the simulator of `bench`.

use event_loop::polling::policy::{Policy, SourceKind, SourceState};
use event_loop::{PollParams, PollPolicy};

const ALL: [PollPolicy; 3] = [PollPolicy::Histogram, PollPolicy::Weighted, PollPolicy::Stepped];

/// How long it takes to wake up.
const WAKING_NS: u64 = 16_000;

/// A loop with a queue and a disk.
struct Loop {
    params: PollParams,
    policy: Policy,
    ring: SourceState,
    queue: SourceState,
    slept: u32,
}

impl Loop {
    fn new(policy: PollPolicy, max_ns: u64) -> Self {
        Loop {
            params: PollParams { policy, max_ns, ..PollParams::default() },
            policy: Policy::default(),
            ring: SourceState::default(),
            queue: SourceState::default(),
            slept: 0,
        }
    }

    /// Waits for an event that comes after `gap` ns; afterwards operations are `in_flight` or not.
    /// Returns the window that there was.
    fn wait(&mut self, gap: u64, kind: SourceKind, in_flight: bool) -> u64 {
        let window = self.policy.window_ns();
        let found = gap <= window;
        self.slept += u32::from(!found);
        self.policy.begin(if found { gap } else { gap + WAKING_NS });
        let ring = kind == SourceKind::Ring;
        self.policy.account(&self.params, &mut self.ring, SourceKind::Ring, ring);
        self.policy.account(&self.params, &mut self.queue, SourceKind::Handler, !ring);
        self.policy.end(&self.params, in_flight);
        window
    }

    /// A guest at depth 1 with these disk and think times; returns the windows that there were.
    fn request(&mut self, disk: u64, think: u64) -> (u64, u64) {
        let thinking = self.wait(think, SourceKind::Handler, true);
        (self.wait(disk, SourceKind::Ring, false), thinking)
    }

    /// How many of so many waits of `gap` ns, for a queue, ended in a sleep.
    fn sleeps(&mut self, waits: u32, gap: u64) -> u32 {
        let before = self.slept;
        for _ in 0..waits {
            self.wait(gap, SourceKind::Handler, false);
        }
        self.slept - before
    }
}

#[test]
fn a_fast_source_is_polled_and_a_slow_one_is_not() {
    for policy in ALL {
        let mut fast = Loop::new(policy, 32_768);
        fast.sleeps(100, 5_000);
        assert_eq!(fast.sleeps(2_000, 5_000), 0, "{policy:?}");
        let mut slow = Loop::new(policy, 32_768);
        slow.sleeps(100, 1_000_000);
        assert_eq!(slow.policy.window_ns(), 0, "{policy:?}");
        assert_eq!(slow.sleeps(2_000, 1_000_000), 2_000, "{policy:?}");
    }
}

#[test]
fn a_maximum_of_0_never_polls() {
    for policy in ALL {
        let mut off = Loop::new(policy, 0);
        assert_eq!(off.sleeps(1_000, 1), 1_000, "{policy:?}");
    }
}

#[test]
fn a_change_of_load_is_followed() {
    for policy in ALL {
        let mut loads = Loop::new(policy, 32_768);
        for _ in 0..3 {
            loads.sleeps(1_000, 1_000_000);
            loads.sleeps(250, 5_000);
            assert_eq!(loads.sleeps(100, 5_000), 0, "{policy:?} polls within 250 events");
            loads.sleeps(400, 1_000_000);
            let mut polled = 0;
            for _ in 0..100 {
                polled += loads.wait(1_000_000, SourceKind::Handler, false);
            }
            // The weighted window is never halved to nothing.
            assert!(polled <= 100, "{policy:?} stops within 400 events: {polled} ns");
        }
    }
}

#[test]
fn another_policy_begins_anew() {
    let mut changed = Loop::new(PollPolicy::Weighted, 32_768);
    changed.sleeps(100, 20_000 - WAKING_NS);
    assert!(changed.policy.window_ns() > 0);
    let after = PollParams { policy: PollPolicy::Stepped, ..changed.params };
    changed.policy.change(&changed.params, &after);
    assert_eq!(changed.policy.window_ns(), 0);
}

#[test]
fn histogram_polls_for_the_guest_and_not_for_a_slow_disk() {
    let mut slow_disk = Loop::new(PollPolicy::Histogram, 32_768);
    for _ in 0..100 {
        slow_disk.request(100_000, 5_000);
    }
    for _ in 0..2_000 {
        let (for_disk, for_guest) = slow_disk.request(100_000, 5_000);
        assert_eq!(for_disk, 0);
        assert!((5_000..=32_768).contains(&for_guest), "{for_guest}");
    }
}

#[test]
fn histogram_polls_just_past_the_hits_of_a_cache() {
    let mut cached = Loop::new(PollPolicy::Histogram, 32_768);
    let disk = |request: u64| if request.is_multiple_of(4) { 100_000 } else { 8_000 };
    for request in 0..200 {
        cached.request(disk(request), 5_000);
    }
    for request in 0..2_000 {
        let (for_disk, _) = cached.request(disk(request), 5_000);
        assert!((8_000..12_000).contains(&for_disk), "{for_disk}");
    }
}

#[test]
fn histogram_does_not_take_the_time_to_wake_up_for_a_slow_source() {
    // Far less than a sleep, but a sleep makes it look like 24 us.
    let mut woken = Loop::new(PollPolicy::Histogram, 32_768);
    woken.sleeps(1_000, 1_000_000);
    woken.sleeps(150, 8_000);
    assert_eq!(woken.sleeps(500, 8_000), 0);
}

#[test]
fn histogram_keeps_to_small_and_large_maxima() {
    for max_ns in [1, 255, 256, 1_000, 1 << 20, 1 << 40, u64::MAX] {
        let mut limited = Loop::new(PollPolicy::Histogram, max_ns);
        for gap in [0, 100, 10_000, 300_000, 1 << 50] {
            for _ in 0..200 {
                assert!(limited.wait(gap, SourceKind::Ring, true) <= max_ns);
            }
        }
    }
    let mut patient = Loop::new(PollPolicy::Histogram, 1 << 20);
    patient.sleeps(200, 300_000);
    assert_eq!(patient.sleeps(100, 300_000), 0, "a larger maximum is worth longer windows");
}
