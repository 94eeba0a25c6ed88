//! When a request may be sent on: leaky buckets, without a clock and without I/O.

use std::sync::atomic::{AtomicU64, Ordering};

use super::limits::{Limit, ThrottleLimits};

/// Resolution of time. With a fraction of a nanosecond, rounding the cost of a request is harmless, and
/// 36 years fit.
const TICKS_PER_NS: u64 = 16;
const TICKS_PER_SECOND: f64 = 1e9 * TICKS_PER_NS as f64;

/// The limits that a request counts towards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    /// Writes, discards, write-zeroes, flushes.
    Write,
}

/// A leaky bucket. Each request adds its cost, and the bucket leaks at a constant rate. While its level is
/// above the mark, the next request has to wait. So a single request may cost more than the mark.
///
/// The level is stored as the time at which the bucket will be empty. That number changes only with
/// requests, so threads share it by compare-and-exchange.
#[derive(Debug)]
struct Bucket {
    /// Time for one unit to leak.
    ticks_per_unit: f64,
    /// Time to leak from the mark to empty.
    mark: u64,
    empty_at: AtomicU64,
}

impl Bucket {
    /// A bucket that leaks `rate` units per second; `seconds` is the time from the mark to empty.
    fn new(rate: u64, seconds: f64) -> Self {
        Bucket {
            ticks_per_unit: TICKS_PER_SECOND / rate as f64,
            // Casts saturate.
            mark: (seconds * TICKS_PER_SECOND) as u64,
            empty_at: AtomicU64::new(0),
        }
    }

    /// Adds a request. Returns the time from which on it may be sent, in ticks.
    fn pour(&self, now: u64, units: f64) -> u64 {
        // Rounded up: rounding must not let more pass than the limit.
        let worth = (units * self.ticks_per_unit).ceil() as u64;
        let full_until = |empty_at: u64| empty_at.max(now);
        let before = self.empty_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| {
            Some(full_until(at).saturating_add(worth))
        });
        // It never fails.
        let (Ok(before) | Err(before)) = before;
        full_until(before).saturating_sub(self.mark)
    }
}

/// One limit. On its own cache line, since threads write to it at independent times.
#[derive(Debug)]
#[repr(align(128))]
struct Meter {
    of: Unit,
    average: Bucket,
    /// Limits the rate of a burst. A burst of up to a second may come at once.
    burst: Option<Bucket>,
}

#[derive(Debug, Clone, Copy)]
enum Unit {
    Byte,
    /// Requests larger than this many bytes count as several.
    Operation(u64),
}

impl Meter {
    /// `None`: no limit. The marks are those of QEMU's docs/throttle.txt.
    fn new(of: Unit, limit: Limit) -> Option<Meter> {
        let Limit { average, max, max_length } = limit;
        let length = f64::from(max_length);
        let seconds = match (average, max) {
            (0, _) => return None,
            (_, 0) => 0.1,
            (average, max) => max as f64 * length / average as f64,
        };
        let burst = (max > 0 && max_length > 1).then(|| Bucket::new(max, 0.1));
        Some(Meter { of, average: Bucket::new(average, seconds), burst })
    }

    fn pour(&self, now: u64, bytes: u64) -> u64 {
        let units = match self.of {
            Unit::Byte => bytes as f64,
            Unit::Operation(0) => 1.0,
            Unit::Operation(size) => (bytes as f64 / size as f64).max(1.0),
        };
        let average = self.average.pour(now, units);
        let burst = self.burst.as_ref().map_or(0, |burst| burst.pour(now, units));
        average.max(burst)
    }
}

/// The limits of a group, shared by all its channels.
#[derive(Debug)]
pub(super) struct Schedule {
    total: [Option<Meter>; 2],
    read: [Option<Meter>; 2],
    write: [Option<Meter>; 2],
}

impl Schedule {
    /// All buckets empty.
    pub(super) fn new(limits: &ThrottleLimits) -> Self {
        let meters = |bps, iops| {
            [Meter::new(Unit::Byte, bps), Meter::new(Unit::Operation(limits.iops_size), iops)]
        };
        Schedule {
            total: meters(limits.bps_total, limits.iops_total),
            read: meters(limits.bps_read, limits.iops_read),
            write: meters(limits.bps_write, limits.iops_write),
        }
    }

    /// Counts a request. Returns the time from which on it may be sent, in nanoseconds: `now` or later.
    ///
    /// The request counts at once. So the caller must send it then, and must not count another request of
    /// that direction before. Callers that wait are then served in the order of their calls.
    pub(super) fn take(&self, now: u64, direction: Direction, bytes: u64) -> u64 {
        let own = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        let ticks = now.saturating_mul(TICKS_PER_NS);
        let meters = self.total.iter().chain(own).flatten();
        let when = meters.map(|meter| meter.pour(ticks, bytes)).max().unwrap_or(0);
        when.div_ceil(TICKS_PER_NS).max(now)
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
