//! Entries of L1 and L2 tables, parsed.

use std::ops::Range;

use super::{Format, Stop};

/// The cluster's reference count is one, so it may be written in place.
pub(in super::super) const COPIED: u64 = 1 << 63;
pub(super) const COMPRESSED: u64 = 1 << 62;
pub(super) const ZEROES: u64 = 1;
/// Bits of an entry that hold an offset in the file.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits that must be 0 in an L2 entry that is not compressed.
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZEROES);
/// A compressed cluster's length is counted in these bytes.
const COMPRESSED_UNIT: u64 = 512;
/// Subclusters of a cluster in images with extended entries, as two to the power of this.
pub(super) const SUBCLUSTER_BITS: u32 = 5;
/// All subclusters of a cluster.
pub(super) const ALL: u32 = u32::MAX;

/// An entry of an L2 table as the table has it: the descriptor, and the bitmap of an extended entry. The bitmap's lower
/// half has a bit for each subcluster with data, the upper half one for each that reads as zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Raw {
    pub(super) descriptor: u64,
    pub(super) bitmap: u64,
}

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
    /// Its subclusters differ. The backing image shows where a subcluster has neither data nor zeroes.
    Mixed {
        /// First byte in the data's file.
        host: Option<u64>,
        /// The place may be written.
        own: bool,
        /// A bit for each subcluster with data.
        data: u32,
        /// A bit for each subcluster that reads as zeroes.
        zeroes: u32,
    },
}

impl Entry {
    /// Parses an entry of an L2 table.
    pub(super) fn parse(raw: Raw, format: &Format) -> Result<Entry, Stop> {
        let Raw { descriptor: raw, bitmap } = raw;
        let damaged = |why: &str| Stop::damaged(format_args!("L2 entry {raw:#x}: {why}"));
        if raw & COMPRESSED != 0 {
            if raw & COPIED != 0 {
                return Err(damaged("compressed and marked as copied"));
            }
            if format.has_data_file {
                return Err(damaged("compressed, in an image with a data file"));
            }
            let (host, len) = compressed(raw, format.cluster_bits);
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
        if format.is_extended {
            // As in QEMU, the bit of zeroes means nothing here.
            let (data, zeroes) = (bitmap as u32, (bitmap >> 32) as u32);
            return match host {
                Some(_) if data & zeroes != 0 => Err(damaged("a subcluster has data and zeroes")),
                None if data != 0 => Err(damaged("a subcluster has data and no place")),
                host => Ok(Entry::of(host, own, data, zeroes)),
            };
        }
        match (raw & ZEROES != 0, host) {
            (true, _) if format.version < 3 => Err(damaged("zeroes, in an image of version 2")),
            (true, host) => Ok(Entry::Zeroes { host, own: own && host.is_some() }),
            (false, Some(host)) => Ok(Entry::Data { host, own }),
            (false, None) => Ok(Entry::Nowhere),
        }
    }

    /// The entry of a cluster whose subclusters have data, read as zeroes, or neither.
    pub(super) fn of(host: Option<u64>, own: bool, data: u32, zeroes: u32) -> Entry {
        let own = own && host.is_some();
        match (host, data, zeroes) {
            (Some(host), ALL, _) => Entry::Data { host, own },
            (host, _, ALL) => Entry::Zeroes { host, own },
            (None, _, 0) => Entry::Nowhere,
            (host, data, zeroes) => Entry::Mixed { host, own, data, zeroes },
        }
    }

    /// The place, whether it may be written, and the subclusters with data and with zeroes. Of an entry that is not
    /// compressed.
    pub(super) fn parts(self) -> (Option<u64>, bool, u32, u32) {
        match self {
            Entry::Nowhere | Entry::Compressed { .. } => (None, false, 0, 0),
            Entry::Zeroes { host, own } => (host, own, 0, ALL),
            Entry::Data { host, own } => (Some(host), own, ALL, 0),
            Entry::Mixed { host, own, data, zeroes } => (host, own, data, zeroes),
        }
    }

    /// The entry as a table has it.
    pub(super) fn raw(self, format: &Format) -> Raw {
        if let Entry::Compressed { host, len } = self {
            let units = (host % COMPRESSED_UNIT + len).div_ceil(COMPRESSED_UNIT);
            let place = (units - 1) << compressed_bits(format.cluster_bits) | host;
            return Raw { descriptor: COMPRESSED | place, bitmap: 0 };
        }
        let (host, own, data, zeroes) = self.parts();
        let place = host.unwrap_or_default() | if own { COPIED } else { 0 };
        match format.is_extended {
            true => Raw { descriptor: place, bitmap: u64::from(zeroes) << 32 | u64::from(data) },
            false => Raw { descriptor: place | u64::from(zeroes) & ZEROES, bitmap: 0 },
        }
    }

    /// What the cluster has from that byte of it on, never mixed, and how many bytes have the same.
    pub(super) fn part(self, in_cluster: u64, format: &Format) -> (Entry, u64) {
        let Entry::Mixed { host, own, data, zeroes } = self else {
            return (self, format.cluster() - in_cluster);
        };
        let first = (in_cluster >> format.unit_bits()) as u32;
        let run = |bits: u32| (bits >> first).trailing_ones();
        let (part, subclusters) = match (host, run(data), run(zeroes)) {
            (Some(host), with_data @ 1.., _) => (Entry::Data { host, own }, with_data),
            (host, _, with_zeroes @ 1..) => (Entry::Zeroes { host, own }, with_zeroes),
            (_, _, _) => (Entry::Nowhere, run(!(data | zeroes))),
        };
        let end = u64::from(first + subclusters) << format.unit_bits();
        (part, end - in_cluster)
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
                | Entry::Compressed { .. }
                | Entry::Mixed { .. },
                _,
            ) => false,
        }
    }

    /// Clusters of the image's file that it has: first and end, by number.
    pub(super) fn clusters(self, format: &Format) -> Range<u64> {
        let bits = format.cluster_bits;
        match self {
            // What is in a data file is not counted.
            _ if format.has_data_file => 0..0,
            Entry::Nowhere | Entry::Zeroes { host: None, .. } | Entry::Mixed { host: None, .. } => {
                0..0
            }
            Entry::Zeroes { host: Some(host), .. }
            | Entry::Data { host, .. }
            | Entry::Mixed { host: Some(host), .. } => host >> bits..(host >> bits) + 1,
            Entry::Compressed { host, len } => host >> bits..((host + len - 1) >> bits) + 1,
        }
    }
}

/// The subclusters of a range of bytes of a cluster; without extended entries, all.
pub(super) fn subclusters(in_cluster: Range<u64>, format: &Format) -> u32 {
    let bits = format.unit_bits();
    let (first, end) =
        ((in_cluster.start >> bits) as u32, in_cluster.end.div_ceil(1 << bits) as u32);
    match format.is_extended {
        true => ALL.checked_shl(first).unwrap_or(0) & !ALL.checked_shl(end).unwrap_or(0),
        false => ALL,
    }
}

/// Bits of the offset in the entry of a compressed cluster.
fn compressed_bits(cluster_bits: u32) -> u32 {
    62 - (cluster_bits - 8)
}

/// The end of the file that entries of compressed clusters can lead to, in bytes.
pub(super) fn most_compressed(cluster_bits: u32) -> u64 {
    1 << compressed_bits(cluster_bits).min(56)
}

/// The first byte of a compressed cluster, and its bytes.
fn compressed(raw: u64, cluster_bits: u32) -> (u64, u64) {
    let bits = compressed_bits(cluster_bits);
    let host = raw & ((1 << bits) - 1) & (OFFSET | (COMPRESSED_UNIT - 1));
    let units = ((raw & !(COPIED | COMPRESSED)) >> bits) + 1;
    (host, units * COMPRESSED_UNIT - host % COMPRESSED_UNIT)
}

/// The clusters of the file that the entry of a compressed cluster refers to. `None`: it is another entry.
pub(in super::super) fn compressed_clusters(raw: u64, cluster_bits: u32) -> Option<Range<u64>> {
    let (host, len) = (raw & COMPRESSED != 0).then(|| compressed(raw, cluster_bits))?;
    Some(host >> cluster_bits..((host + len - 1) >> cluster_bits) + 1)
}

/// Parses an entry of the L1 table: the L2 table's first byte, and whether it may be changed in place. Reserved bits are
/// ignored, as by QEMU. The engine clears them where it replaces the entry.
pub(super) fn table(raw: u64, format: &Format) -> Result<Option<(u64, bool)>, Stop> {
    let offset = raw & OFFSET;
    if !offset.is_multiple_of(format.cluster()) {
        return Err(Stop::damaged(format_args!(
            "L1 entry {raw:#x}: the offset is not that of a cluster"
        )));
    }
    Ok((offset != 0).then_some((offset, raw & COPIED != 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: Format = Format {
        cluster_bits: 16,
        refcount_order: 4,
        version: 3,
        has_data_file: false,
        is_extended: false,
    };
    const EXTENDED: Format = Format { is_extended: true, ..FORMAT };

    #[test]
    fn kinds_of_entries_are_distinguished() {
        let of = |descriptor, format: &Format| Entry::parse(Raw { descriptor, bitmap: 0 }, format);
        let parse = |raw| of(raw, &FORMAT).ok();
        assert_eq!(parse(0), Some(Entry::Nowhere));
        assert_eq!(parse(1), Some(Entry::Zeroes { host: None, own: false }));
        let kept = Entry::Zeroes { host: Some(1 << 16), own: true };
        let raw = kept.raw(&FORMAT).descriptor;
        assert_eq!((parse(raw), raw), (Some(kept), COPIED | 0x1_0001));
        let data = Entry::Data { host: 1 << 16, own: false };
        let raw = data.raw(&FORMAT).descriptor;
        assert_eq!((parse(raw), raw), (Some(data), 0x1_0000));
        // Two units beyond the first, which begins in the middle.
        let compressed = parse(COMPRESSED | 2 << 54 | 0x2_0100);
        assert_eq!(compressed, Some(Entry::Compressed { host: 0x2_0100, len: 1280 }));
        let raw = compressed.map(|compressed| compressed.raw(&FORMAT).descriptor);
        assert_eq!(raw, Some(COMPRESSED | 2 << 54 | 0x2_0100));
        for wrong in [0x1_0200, 1 << 60, 2, COPIED | COMPRESSED | 0x1_0000] {
            assert_eq!(parse(wrong), None, "{wrong:#x}");
        }
        let two = Format { version: 2, ..FORMAT };
        assert!(of(1, &two).is_err());
        let external = Format { has_data_file: true, ..FORMAT };
        assert_eq!(of(COPIED, &external).ok(), Some(Entry::Data { host: 0, own: true }));
    }

    #[test]
    fn a_compressed_cluster_may_have_two_of_the_file() {
        let clusters = |host, len| Entry::Compressed { host, len }.clusters(&FORMAT);
        assert_eq!(clusters(0x1_ff00, 0x100), 1..2);
        assert_eq!(clusters(0x1_ff00, 0x101), 1..3);
    }

    #[test]
    fn bitmaps_of_extended_entries_are_read_and_written() {
        let parse = |descriptor, bitmap| Entry::parse(Raw { descriptor, bitmap }, &EXTENDED).ok();
        let (place, host) = (COPIED | 1 << 16, Some(1 << 16));
        let mixed = Entry::Mixed { host, own: true, data: 1, zeroes: 0b110 };
        for (descriptor, bitmap, entry) in [
            (0, 0, Entry::Nowhere),
            (0, 0xffff_ffff << 32, Entry::Zeroes { host: None, own: false }),
            (0, 1 << 32, Entry::Mixed { host: None, own: false, data: 0, zeroes: 1 }),
            (place, 0, Entry::Mixed { host, own: true, data: 0, zeroes: 0 }),
            (place, 0xffff_ffff, Entry::Data { host: 1 << 16, own: true }),
            (place, 0xffff_ffff << 32, Entry::Zeroes { host, own: true }),
            (place, 0b110 << 32 | 1, mixed),
        ] {
            assert_eq!(parse(descriptor, bitmap), Some(entry));
            assert_eq!(entry.raw(&EXTENDED), Raw { descriptor, bitmap });
        }
        // The bit of zeroes means nothing; nor does a bitmap of what is compressed.
        assert_eq!(parse(place | ZEROES, 0b110 << 32 | 1), Some(mixed));
        assert!(matches!(parse(COMPRESSED | 0x2_0100, 7), Some(Entry::Compressed { .. })));
        // Data and zeroes; data without a place.
        assert_eq!((parse(place, 1 << 32 | 1), parse(0, 1)), (None, None));
    }

    #[test]
    fn subclusters_with_the_same_are_one_part() {
        let unit = 2048;
        let own = true;
        let host = Some(1 << 16);
        let mixed = Entry::Mixed { host, own, data: 0b11 | 1 << 31, zeroes: 0b1_1000 };
        let part = |at| mixed.part(at, &EXTENDED);
        assert_eq!(part(512), (Entry::Data { host: 1 << 16, own }, 2 * unit - 512));
        assert_eq!(part(2 * unit), (Entry::Nowhere, unit));
        assert_eq!(part(3 * unit), (Entry::Zeroes { host, own }, 2 * unit));
        assert_eq!(part(5 * unit), (Entry::Nowhere, 26 * unit));
        assert_eq!(part(31 * unit + 512), (Entry::Data { host: 1 << 16, own }, unit - 512));
        let none = Entry::Mixed { host, own, data: 0, zeroes: 0 };
        assert_eq!(none.part(unit, &EXTENDED), (Entry::Nowhere, 31 * unit));
        assert_eq!(Entry::Nowhere.part(unit, &EXTENDED), (Entry::Nowhere, 31 * unit));
        assert_eq!(subclusters(0..1, &EXTENDED), 1);
        assert_eq!(subclusters(2048..65536, &EXTENDED), !1);
        assert_eq!(subclusters(0..65536, &EXTENDED), ALL);
        assert_eq!(subclusters(512..1024, &FORMAT), ALL);
    }
}
