//! How much memory the tables of an image may take.

use ::options::OptionError;

/// Default for L2 tables, bytes, as in QEMU.
const L2: u64 = 32 << 20;
/// Default for refcount blocks, bytes.
const REFCOUNTS: u64 = 4 << 20;
/// Refcount blocks that `cache-size` leaves room for at least, as in QEMU.
const LEAST_BLOCKS: u64 = 4;

/// `cache-size` and other options of the caches; `None`: not given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheSizes {
    /// Bytes of both caches together.
    pub total: Option<u64>,
    /// Bytes of L2 tables.
    pub l2: Option<u64>,
    /// Bytes of refcount blocks.
    pub refcounts: Option<u64>,
    /// Seconds after which tables that were not used meanwhile leave the memory; 0: they stay.
    pub clean_interval: u64,
}

impl CacheSizes {
    /// Checks that the sizes agree, as QEMU does.
    ///
    /// # Errors
    ///
    /// All three are given, or one is larger than both together.
    pub(super) fn checked(self) -> Result<CacheSizes, OptionError> {
        let error = match (self.total, self.l2, self.refcounts) {
            (Some(_), Some(_), Some(_)) => {
                "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time"
            }
            (Some(total), Some(l2), None) if l2 > total => {
                "l2-cache-size may not exceed cache-size"
            }
            (Some(total), None, Some(refcounts)) if refcounts > total => {
                "refcount-cache-size may not exceed cache-size"
            }
            (Some(_), ..) | (None, ..) => return Ok(self),
        };
        Err(OptionError::new(error))
    }

    /// Bytes for L2 tables and for refcount blocks of an image with clusters of `cluster` bytes, all L2 tables of which
    /// take `all_l2` bytes.
    pub(super) fn bytes(self, all_l2: u64, cluster: u64) -> (u64, u64) {
        let Some(total) = self.total else {
            return (self.l2.unwrap_or(L2), self.refcounts.unwrap_or(REFCOUNTS));
        };
        match (self.l2, self.refcounts) {
            (Some(l2), _) => (l2, total.saturating_sub(l2)),
            (None, Some(refcounts)) => (total.saturating_sub(refcounts), refcounts),
            (None, None) => {
                let l2 = all_l2.min(total.saturating_sub(LEAST_BLOCKS * cluster));
                (l2, total - l2)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_divided_as_in_qemu() {
        let sizes = |total, l2, refcounts| CacheSizes { total, l2, refcounts, clean_interval: 0 };
        let bytes = |sizes: CacheSizes| sizes.checked().unwrap().bytes(10 << 20, 65536);
        assert_eq!(bytes(sizes(None, None, None)), (32 << 20, 4 << 20));
        assert_eq!(bytes(sizes(None, Some(1), None)), (1, 4 << 20));
        assert_eq!(bytes(sizes(Some(5 << 20), Some(1 << 20), None)), (1 << 20, 4 << 20));
        assert_eq!(bytes(sizes(Some(5 << 20), None, Some(1 << 20))), (4 << 20, 1 << 20));
        assert_eq!(bytes(sizes(Some(12 << 20), None, None)), (10 << 20, 2 << 20));
        assert_eq!(bytes(sizes(Some(1 << 20), None, None)), (768 << 10, 256 << 10));
        assert_eq!(bytes(sizes(Some(0), None, None)), (0, 0));
        for wrong in [
            sizes(Some(1), Some(2), None),
            sizes(Some(1), None, Some(2)),
            sizes(Some(2), Some(1), Some(1)),
        ] {
            assert!(wrong.checked().is_err(), "{wrong:?}");
        }
    }
}
