//! What a throttle group limits, as its options say it, and which limits make sense together.

use std::fmt;

/// The largest rate or burst: 10^15 per second, as in QEMU.
pub const MAX: u64 = 1_000_000_000_000_000;

/// A limit on bytes, or operations, per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// The rate that is kept to over a long time, per second; at most [`MAX`]. 0: no limit.
    pub average: u64,
    /// `-max`: the rate during a burst, per second; at most [`MAX`]. 0: bursts of 100 ms' worth only.
    pub max: u64,
    /// `-max-length`: how long a burst at that rate lasts, seconds; at least 1.
    pub max_length: u32,
}

impl Default for Limit {
    fn default() -> Self {
        Limit { average: 0, max: 0, max_length: 1 }
    }
}

/// The limits of a throttle group.
///
/// Of reads and writes together, or of reads and of writes, not both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// `bps-total`: bytes, reads and writes together.
    pub bps_total: Limit,
    /// `bps-read`: bytes read.
    pub bps_read: Limit,
    /// `bps-write`: bytes written, discarded or zeroed.
    pub bps_write: Limit,
    /// `iops-total`: reads and writes together.
    pub iops_total: Limit,
    /// `iops-read`: reads.
    pub iops_read: Limit,
    /// `iops-write`: writes, discards, write-zeroes.
    pub iops_write: Limit,
    /// `iops-size`, bytes: a larger request counts as so many operations of this size, not rounded.
    /// 0: each request is one operation.
    pub iops_size: u64,
}

/// Limits that make no sense. The messages are QEMU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitsError(&'static str);

impl fmt::Display for LimitsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for LimitsError {}

impl ThrottleLimits {
    fn all(&self) -> [Limit; 6] {
        let ThrottleLimits { bps_total, bps_read, bps_write, .. } = *self;
        let ThrottleLimits { iops_total, iops_read, iops_write, .. } = *self;
        [bps_total, bps_read, bps_write, iops_total, iops_read, iops_write]
    }

    /// Returns whether they can be kept to.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong with them.
    pub fn check(&self) -> Result<(), LimitsError> {
        let wrong = |message| Err(LimitsError(message));
        let both = |total: Limit, read: Limit, write: Limit| {
            total.average > 0 && (read.average > 0 || write.average > 0)
                || total.max > 0 && (read.max > 0 || write.max > 0)
        };
        if both(self.bps_total, self.bps_read, self.bps_write)
            || both(self.iops_total, self.iops_read, self.iops_write)
        {
            return wrong(
                "bps/iops/max total values and read/write values cannot be used at the same time",
            );
        }
        let iops = [self.iops_total, self.iops_read, self.iops_write];
        if self.iops_size > 0 && iops.iter().all(|limit| limit.average == 0) {
            return wrong("iops size requires an iops value to be set");
        }
        for Limit { average, max, max_length } in self.all() {
            if average > MAX || max > MAX {
                return wrong("bps/iops/max values must be within [0, 1000000000000000]");
            }
            if max_length == 0 {
                return wrong("the burst length cannot be 0");
            }
            if max_length > 1 && max == 0 {
                return wrong("burst length set without burst rate");
            }
            if max > 0 && u64::from(max_length) > MAX / max {
                return wrong("burst length too high for this burst rate");
            }
            if max > 0 && average == 0 {
                return wrong("bps_max/iops_max require corresponding bps/iops values");
            }
            if max > 0 && max < average {
                return wrong("bps_max/iops_max cannot be lower than bps/iops");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each was tried on qemu-storage-daemon 11.1.
    #[test]
    fn contradicting_limits_are_refused_in_qemus_words() {
        let limit = |average, max, max_length| Limit { average, max, max_length };
        let total = |limit| ThrottleLimits { iops_total: limit, ..Default::default() };
        let refused = |limits: ThrottleLimits| limits.check().unwrap_err().to_string();
        for good in [limit(0, 0, 1), limit(1, 0, 1), limit(1, 1, 1), limit(10, 20, 60)] {
            assert_eq!(total(good).check(), Ok(()), "{good:?}");
        }
        assert_eq!(refused(total(limit(1, 1, 0))), "the burst length cannot be 0");
        assert_eq!(refused(total(limit(1, 0, 2))), "burst length set without burst rate");
        assert_eq!(
            refused(total(limit(0, 30, 2))),
            "bps_max/iops_max require corresponding bps/iops values"
        );
        assert_eq!(
            refused(total(limit(200, 100, 1))),
            "bps_max/iops_max cannot be lower than bps/iops"
        );
        assert_eq!(
            refused(total(limit(MAX + 1, 0, 1))),
            "bps/iops/max values must be within [0, 1000000000000000]"
        );
        assert_eq!(
            refused(total(limit(1_000_000_000, 100_000_000_000, 100_000))),
            "burst length too high for this burst rate"
        );
        let one = limit(1, 0, 1);
        assert_eq!(
            refused(ThrottleLimits { bps_total: one, bps_write: one, ..Default::default() }),
            "bps/iops/max total values and read/write values cannot be used at the same time"
        );
        assert_eq!(
            refused(ThrottleLimits { iops_size: 1, bps_total: one, ..Default::default() }),
            "iops size requires an iops value to be set"
        );
    }
}
