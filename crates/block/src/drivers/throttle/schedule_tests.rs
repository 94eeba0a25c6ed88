use std::cmp::Reverse;
use std::collections::BinaryHeap;

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn iops(average: u64, max: u64, max_length: u32) -> ThrottleLimits {
    let iops_total = Limit { average, max, max_length };
    ThrottleLimits { iops_total, ..Default::default() }
}

fn bps(average: u64) -> ThrottleLimits {
    let bps_total = Limit { average, ..Default::default() };
    ThrottleLimits { bps_total, ..Default::default() }
}

/// Clients that always have something to ask for, each waiting for its turn before it asks again; a
/// request of each is `sizes` bytes, by its number. When each request went, and whose, until `end`.
fn greedy(schedule: &Schedule, sizes: &[u64], end: u64) -> Vec<(u64, usize)> {
    let mut waiting: BinaryHeap<_> =
        (0..sizes.len()).map(|client| Reverse((0, 0, client))).collect();
    let mut gone = Vec::new();
    let mut order = 0;
    let mut asked = vec![false; sizes.len()];
    while let Some(Reverse((now, _, client))) = waiting.pop() {
        if now > end {
            break;
        }
        if std::mem::replace(&mut asked[client], true) {
            gone.push((now, client));
        }
        order += 1;
        let when = schedule.take(now, Direction::Read, sizes[client]);
        assert!(when >= now);
        waiting.push(Reverse((when, order, client)));
    }
    gone
}

fn until(gone: &[(u64, usize)], time: u64) -> u64 {
    gone.iter().filter(|(at, _)| *at <= time).count() as u64
}

#[test]
fn without_limits_nothing_waits() {
    let schedule = Schedule::new(&ThrottleLimits::default());
    for now in [0, 7, u64::MAX] {
        assert_eq!(schedule.take(now, Direction::Write, u64::MAX), now);
    }
}

#[test]
fn a_tenth_of_a_second_may_come_at_once_and_then_the_rate_holds() {
    let schedule = Schedule::new(&iops(100, 0, 1));
    let at_once = (0..11).map(|_| schedule.take(0, Direction::Read, 4096)).max();
    assert_eq!(at_once, Some(0));
    for n in 1..100 {
        assert_eq!(schedule.take(0, Direction::Write, 1), n * SECOND / 100);
    }
}

/// The example of docs/throttle.txt: 2000 per second for about a minute, then 100. The bucket has room
/// for 2000 x 60, and leaks 100 per second all the while.
#[test]
fn a_burst_lasts_as_long_as_it_is_said_to() {
    let schedule = Schedule::new(&iops(100, 2000, 60));
    let gone = greedy(&schedule, &[4096], 100 * SECOND);
    let rate = |second: u64| until(&gone, (second + 1) * SECOND) - until(&gone, second * SECOND);
    for second in 1..63 {
        assert!(rate(second).abs_diff(2000) <= 1, "{} in second {second}", rate(second));
    }
    for second in 64..100 {
        assert!(rate(second).abs_diff(100) <= 1, "{} in second {second}", rate(second));
    }
}

#[test]
fn a_burst_of_a_second_may_come_at_once() {
    let schedule = Schedule::new(&iops(100, 2000, 1));
    let gone = greedy(&schedule, &[4096], 2 * SECOND);
    assert_eq!(until(&gone, 0), 2001);
    assert!(until(&gone, 2 * SECOND).abs_diff(2201) <= 1);
}

#[test]
fn unused_bandwidth_is_available_for_one_burst_only() {
    let schedule = Schedule::new(&iops(100, 2000, 1));
    let burst = |now| (0..).take_while(|_| schedule.take(now, Direction::Read, 1) <= now).count();
    assert_eq!(burst(0), 2001);
    // It leaked for a second, less the one that waited.
    assert!(burst(SECOND).abs_diff(100) <= 2);
    assert_eq!(burst(1000 * SECOND), 2001);
}

#[test]
fn large_requests_count_by_their_size_where_there_is_one() {
    let limits = ThrottleLimits { iops_size: 4096, ..iops(1000, 0, 1) };
    let schedule = Schedule::new(&limits);
    let full = (0..101).map(|_| schedule.take(0, Direction::Read, 512)).max();
    assert_eq!(full, Some(0), "small ones count once");
    let ms = SECOND / 1000;
    assert_eq!(schedule.take(0, Direction::Read, 4096 * 5 / 2), ms);
    assert_eq!(schedule.take(0, Direction::Read, 4096), ms * 7 / 2, "the one before counted 2.5");
}

#[test]
fn reads_and_writes_have_limits_of_their_own() {
    let one = Limit { average: 1, ..Default::default() };
    let schedule = Schedule::new(&ThrottleLimits { iops_write: one, ..Default::default() });
    assert_eq!(schedule.take(0, Direction::Write, 1), 0);
    assert!(schedule.take(0, Direction::Write, 1) > 0);
    assert_eq!(schedule.take(0, Direction::Read, 1), 0);
}

#[test]
fn a_request_larger_than_the_bucket_passes_and_is_paid_for() {
    let schedule = Schedule::new(&bps(1000));
    assert_eq!(schedule.take(0, Direction::Read, 1_000_000), 0);
    let late = schedule.take(0, Direction::Read, 1);
    assert!(late.abs_diff(1000 * SECOND - SECOND / 10) <= 1, "{late}");
}

#[test]
fn the_largest_limits_overflow_nothing() {
    let schedule = Schedule::new(&iops(1, super::super::MAX, 1));
    assert_eq!(schedule.take(u64::MAX, Direction::Read, u64::MAX), u64::MAX);
    let schedule = Schedule::new(&bps(super::super::MAX));
    assert_eq!(schedule.take(0, Direction::Read, 512), 0);
    assert_eq!(schedule.take(5, Direction::Read, 512), 5);
}

#[test]
fn clients_take_turns_however_many_requests_they_have() {
    for clients in [2, 3, 7] {
        let schedule = Schedule::new(&iops(1000, 0, 1));
        let gone = greedy(&schedule, &vec![4096; clients], 10 * SECOND);
        // From when the first burst is over.
        let mut counts = vec![0u64; clients];
        gone.iter().filter(|(at, _)| *at > 0).for_each(|(_, client)| counts[*client] += 1);
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{counts:?}");
        assert!(counts.iter().sum::<u64>().abs_diff(10_000) <= clients as u64);
    }
}

proptest! {
    /// However requests come, no more pass than the rate, what may come at once and what each client
    /// has waiting; and clients that always have some get all of that.
    #[test]
    fn the_limit_is_kept_and_used(
        rate in 1u64..100_000,
        sizes in prop::collection::vec(1u64..10_000, 1..6),
        by_bytes in any::<bool>(),
    ) {
        let limits = if by_bytes { bps(rate * 1000) } else { iops(rate, 0, 1) };
        let worth = |client: usize| if by_bytes { sizes[client] as f64 } else { 1.0 };
        let rate = if by_bytes { rate as f64 * 1000.0 } else { rate as f64 };
        let largest = (0..sizes.len()).map(worth).fold(0.0, f64::max);
        let schedule = Schedule::new(&limits);
        // So long that some hundreds pass.
        let end = (300.0 * largest / rate * 1e9) as u64 + SECOND / 10;
        let gone = greedy(&schedule, &sizes, end);
        let mut total = 0.0;
        for (at, client) in &gone {
            total += worth(*client);
            let allowed = rate * (*at as f64 / 1e9 + 0.1) + largest + 1e-6 * total;
            prop_assert!(total <= allowed, "{total} by {at}: {allowed} allowed");
        }
        let owed = rate * end as f64 / 1e9 - largest * sizes.len() as f64;
        prop_assert!(total >= 0.999 * owed, "{total} passed, of {owed} that might");
    }

    /// The same where they come and go: over every stretch of time.
    #[test]
    fn no_stretch_of_time_has_more_than_the_rate_and_a_burst(
        gaps in prop::collection::vec(0u64..30_000_000, 2..200),
    ) {
        let (rate, schedule) = (1000.0, Schedule::new(&iops(1000, 0, 1)));
        let (mut now, mut gone) = (0, Vec::new());
        for gap in gaps {
            // Many at once, then a pause.
            now = schedule.take(now + if gap % 7 == 0 { gap } else { 0 }, Direction::Write, 1);
            gone.push(now);
        }
        for (i, first) in gone.iter().enumerate() {
            for (n, last) in gone.iter().skip(i).enumerate() {
                let allowed = rate * ((last - first) as f64 / 1e9 + 0.1) + 2.0;
                prop_assert!((n + 1) as f64 <= allowed, "{} in {}", n + 1, last - first);
            }
        }
    }
}

#[test]
fn threads_share_a_limit_and_none_is_counted_twice_or_not_at_all() {
    const EACH: u64 = 10_000;
    let schedule = Schedule::new(&iops(1000, 0, 1));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..EACH {
                    schedule.take(0, Direction::Read, 1);
                }
            });
        }
    });
    let next = schedule.take(0, Direction::Read, 1);
    assert_eq!(next, 4 * EACH * SECOND / 1000 - SECOND / 10);
}
