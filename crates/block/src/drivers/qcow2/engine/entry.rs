//! Entries of L1 and L2 tables, parsed.

use super::{Format, Stop};

/// The cluster's reference count is one, so it may be written in place.
pub(super) const COPIED: u64 = 1 << 63;
pub(super) const COMPRESSED: u64 = 1 << 62;
pub(super) const ZEROES: u64 = 1;
/// Bits of an entry that hold an offset in the file.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits that must be 0 in an L1 entry, and in an L2 entry that is not compressed.
const L1_RESERVED: u64 = !(COPIED | OFFSET);
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZEROES);
/// A compressed cluster's length is counted in these bytes.
const COMPRESSED_UNIT: u64 = 512;

/// Where a cluster of the disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// Nowhere: the backing image shows.
    Nowhere,
    /// It reads as zeroes. `host`: the place that it keeps.
    Zeroes {
        /// First byte in the data's file.
        host: Option<u64>,
        /// The place may be written.
        own: bool,
    },
    /// In a cluster of the data's file.
    Data {
        /// First byte there.
        host: u64,
        /// The cluster may be overwritten.
        own: bool,
    },
    /// Compressed.
    Compressed {
        /// First byte in the file.
        host: u64,
        /// Bytes, at most.
        len: u64,
    },
}

impl Entry {
    /// Parses an entry of an L2 table.
    pub(super) fn parse(raw: u64, format: &Format) -> Result<Entry, Stop> {
        let damaged = |why: &str| Stop::damaged(format_args!("L2 entry {raw:#x}: {why}"));
        if raw & COMPRESSED != 0 {
            if raw & COPIED != 0 {
                return Err(damaged("compressed and marked as copied"));
            }
            if format.has_data_file {
                return Err(damaged("compressed, in an image with a data file"));
            }
            let bits = 62 - (format.cluster_bits - 8);
            let host = raw & ((1 << bits) - 1) & (OFFSET | (COMPRESSED_UNIT - 1));
            let units = ((raw & !(COPIED | COMPRESSED)) >> bits) + 1;
            let len = units * COMPRESSED_UNIT - host % COMPRESSED_UNIT;
            return Ok(Entry::Compressed { host, len });
        }
        if raw & L2_RESERVED != 0 {
            return Err(damaged("reserved bits are set"));
        }
        let (offset, own) = (raw & OFFSET, raw & COPIED != 0);
        if !offset.is_multiple_of(format.cluster()) {
            return Err(damaged("the offset is not that of a cluster"));
        }
        // In a data file the first cluster is at 0.
        let host = (offset != 0 || (format.has_data_file && own)).then_some(offset);
        match (raw & ZEROES != 0, host) {
            (true, _) if format.version < 3 => Err(damaged("zeroes, in an image of version 2")),
            (true, host) => Ok(Entry::Zeroes { host, own: own && host.is_some() }),
            (false, Some(host)) => Ok(Entry::Data { host, own }),
            (false, None) => Ok(Entry::Nowhere),
        }
    }

    /// The entry as a table has it. A compressed one is never made.
    pub(super) fn raw(self) -> u64 {
        let copied = |own| if own { COPIED } else { 0 };
        match self {
            Entry::Nowhere | Entry::Compressed { .. } => 0,
            Entry::Zeroes { host, own } => ZEROES | host.unwrap_or_default() | copied(own),
            Entry::Data { host, own } => host | copied(own),
        }
    }

    /// Whether it continues what is in the cluster before.
    pub(super) fn follows(self, before: Entry, format: &Format) -> bool {
        match (before, self) {
            (Entry::Data { host: before, own: one }, Entry::Data { host, own }) => {
                host == before + format.cluster() && own == one
            }
            (Entry::Nowhere, Entry::Nowhere)
            | (Entry::Zeroes { .. }, Entry::Zeroes { .. })
            | (Entry::Compressed { .. }, Entry::Compressed { .. }) => true,
            (
                Entry::Nowhere
                | Entry::Zeroes { .. }
                | Entry::Data { .. }
                | Entry::Compressed { .. },
                _,
            ) => false,
        }
    }

    /// Clusters of the image's file that it has: first and end, by number.
    pub(super) fn clusters(self, format: &Format) -> std::ops::Range<u64> {
        let bits = format.cluster_bits;
        match self {
            // What is in a data file is not counted.
            _ if format.has_data_file => 0..0,
            Entry::Nowhere | Entry::Zeroes { host: None, .. } => 0..0,
            Entry::Zeroes { host: Some(host), .. } | Entry::Data { host, .. } => {
                host >> bits..(host >> bits) + 1
            }
            Entry::Compressed { host, len } => host >> bits..((host + len - 1) >> bits) + 1,
        }
    }
}

/// Parses an entry of the L1 table: the L2 table's first byte, and whether it may be changed in place.
pub(super) fn table(raw: u64, format: &Format) -> Result<Option<(u64, bool)>, Stop> {
    let offset = raw & OFFSET;
    if raw & L1_RESERVED != 0 || !offset.is_multiple_of(format.cluster()) {
        return Err(Stop::damaged(format_args!("L1 entry {raw:#x}")));
    }
    Ok((offset != 0).then_some((offset, raw & COPIED != 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: Format =
        Format { cluster_bits: 16, refcount_order: 4, version: 3, has_data_file: false };

    #[test]
    fn kinds_of_entries_are_distinguished() {
        let parse = |raw| Entry::parse(raw, &FORMAT).ok();
        assert_eq!(parse(0), Some(Entry::Nowhere));
        assert_eq!(parse(1), Some(Entry::Zeroes { host: None, own: false }));
        let kept = Entry::Zeroes { host: Some(1 << 16), own: true };
        assert_eq!((parse(kept.raw()), kept.raw()), (Some(kept), COPIED | 0x1_0001));
        let data = Entry::Data { host: 1 << 16, own: false };
        assert_eq!((parse(data.raw()), data.raw()), (Some(data), 0x1_0000));
        // Two units beyond the first, which begins in the middle.
        let compressed = parse(COMPRESSED | 2 << 54 | 0x2_0100);
        assert_eq!(compressed, Some(Entry::Compressed { host: 0x2_0100, len: 1280 }));
        for wrong in [0x1_0200, 1 << 60, 2, COPIED | COMPRESSED | 0x1_0000] {
            assert_eq!(parse(wrong), None, "{wrong:#x}");
        }
        let two = Format { version: 2, ..FORMAT };
        assert!(Entry::parse(1, &two).is_err());
        let external = Format { has_data_file: true, ..FORMAT };
        assert_eq!(Entry::parse(COPIED, &external).ok(), Some(Entry::Data { host: 0, own: true }));
    }

    #[test]
    fn a_compressed_cluster_may_have_two_of_the_file() {
        let clusters = |host, len| Entry::Compressed { host, len }.clusters(&FORMAT);
        assert_eq!(clusters(0x1_ff00, 0x100), 1..2);
        assert_eq!(clusters(0x1_ff00, 0x101), 1..3);
    }
}
