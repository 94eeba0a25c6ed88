//! Where everything of a new image is, and the contents of its metadata.
//!
//! The file has, in this order and without gaps: header, refcount table, refcount blocks, L1 table, LUKS header, L2
//! tables and, if space is allocated beforehand, data. A plan has all of it cluster by cluster, since the tables of an
//! image whose clusters are all mapped have gigabytes.

use std::ops::Range;

use super::engine::{COPIED, set_count};
use super::header::{
    BACKING_FORMAT, COMPRESSION, COMPRESSION_AT, DATA_FILE, DATA_FILE_NAME, ENTRY, EXTENDED_L2,
    LUKS_EXTENSION, MAGIC, MAX_CLUSTER_BITS, MAX_L1, MAX_NAME, MAX_REFCOUNT_TABLE, RAW_DATA_FILE,
    V2_LEN, V3_LEN,
};
use super::layout::CreateQcow2;

/// No cluster begins here or later: the offsets of entries have that many bits.
const END: u64 = 1 << 56;
/// The compatible feature that says that reference counts may be updated late.
const LAZY_REFCOUNTS: u64 = 1;
/// The compression type of images that are not compressed by deflate.
const ZSTD: u8 = 1;

/// What a new image has that QEMU's defaults lack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Features {
    /// `version=v2`.
    pub(super) is_v2: bool,
    /// `lazy-refcounts`.
    pub(super) lazy_refcounts: bool,
    /// `compression-type=zstd`.
    pub(super) zstd: bool,
    /// `data-file`: the name of the file with the guest's data.
    pub(super) data_file: Option<String>,
    /// `data-file-raw`: that file by itself is the disk's raw image.
    pub(super) is_raw: bool,
    /// `preallocation`: each cluster of the disk has a place from the beginning.
    pub(super) is_mapped: bool,
    /// `backing-fmt` without `backing-file`, which is refused.
    pub(super) has_only_format: bool,
}

/// A new image. All ranges count clusters of its file.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The contents of the first cluster.
    header: Vec<u8>,
    cluster_bits: u32,
    refcount_order: u32,
    /// Bytes of an entry in L2 tables.
    l2_entry: u64,
    refcount_table: Range<u64>,
    refcount_blocks: Range<u64>,
    l1: Range<u64>,
    /// The LUKS header, if there is one.
    luks: Range<u64>,
    l2: Range<u64>,
    /// The guest's data in this file. Empty if the data is in another file, or has no place yet.
    data: Range<u64>,
    /// Clusters of the disk with a place.
    mapped: u64,
    /// The place of the first of them, in the file with the data.
    first: u64,
}

impl Plan {
    /// `None`: the options contradict each other, or the format has no images that large.
    pub(super) fn new(create: &CreateQcow2, features: &Features, luks_len: u64) -> Option<Plan> {
        let cluster = u64::from(create.cluster_size);
        let (bits, order) = (cluster.trailing_zeros(), create.refcount_bits.trailing_zeros());
        let is_possible = create.cluster_size.is_power_of_two()
            && (9..=MAX_CLUSTER_BITS).contains(&bits)
            && create.refcount_bits.is_power_of_two()
            && order <= 6;
        let l2_entry = if create.extended_l2 { 2 * ENTRY } else { ENTRY };
        let l1_entries = create.size.div_ceil(cluster.checked_mul(cluster / l2_entry)?);
        if !is_possible || l1_entries * ENTRY > MAX_L1 {
            return None;
        }
        let l1_len = (l1_entries * ENTRY).div_ceil(cluster);
        let luks_clusters = luks_len.div_ceil(cluster);
        // The data of a raw data file is there without a write.
        let is_mapped = features.is_mapped || features.is_raw;
        let mapped = if is_mapped { create.size.div_ceil(cluster) } else { 0 };
        let l2_len = if is_mapped { l1_entries } else { 0 };
        let data_len = if features.data_file.is_some() { 0 } else { mapped };
        let reach = (cluster * 8) >> order;
        let (mut table, mut blocks) = (1, 1);
        loop {
            let used = 1 + table + blocks + l1_len + luks_clusters + l2_len + data_len;
            if blocks * reach < used {
                blocks = used.div_ceil(reach);
            } else if table * cluster < blocks * ENTRY {
                table = (blocks * ENTRY).div_ceil(cluster);
            } else {
                break;
            }
            if table * cluster > MAX_REFCOUNT_TABLE {
                return None;
            }
        }
        let mut end = 1;
        let mut next = |len| {
            end += len;
            end - len..end
        };
        let (refcount_table, refcount_blocks, l1) = (next(table), next(blocks), next(l1_len));
        let (luks, l2, data) = (next(luks_clusters), next(l2_len), next(data_len));
        if end > END >> bits {
            return None;
        }
        let mut plan = Plan {
            header: Vec::new(),
            cluster_bits: bits,
            refcount_order: order,
            l2_entry,
            first: if features.data_file.is_some() { 0 } else { data.start },
            refcount_table,
            refcount_blocks,
            l1,
            luks,
            l2,
            data,
            mapped,
        };
        plan.header = plan.make_header(create, features, l1_entries as u32, luks_len)?;
        Some(plan)
    }

    /// Clusters of metadata, from the header on.
    pub(super) fn metadata(&self) -> u64 {
        self.l2.end
    }

    /// Bytes of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the file.
    pub(super) fn len(&self) -> u64 {
        self.data.end << self.cluster_bits
    }

    /// The bytes of the file for the guest's data.
    pub(super) fn data(&self) -> Range<u64> {
        self.data.start << self.cluster_bits..self.data.end << self.cluster_bits
    }

    /// Clusters of the LUKS header, which [`fill`](Self::fill) leaves out.
    pub(super) fn luks(&self) -> Range<u64> {
        self.luks.clone()
    }

    /// Writes the contents of a cluster of metadata into zeroed memory of its size.
    pub(super) fn fill(&self, cluster: u64, memory: &mut [u8]) {
        let (len, bits) = (self.cluster(), self.cluster_bits);
        if cluster == 0 {
            memory.copy_from_slice(&self.header);
        } else if self.refcount_table.contains(&cluster) {
            let nth = (cluster - self.refcount_table.start) * (len / ENTRY);
            let blocks = self.refcount_blocks.start + nth..self.refcount_blocks.end;
            put_entries(memory, ENTRY, blocks.map(|block| block << bits));
        } else if self.refcount_blocks.contains(&cluster) {
            let reach = (len * 8) >> self.refcount_order;
            let first = (cluster - self.refcount_blocks.start) * reach;
            let used = self.data.end.saturating_sub(first).min(reach);
            (0..used).for_each(|at| set_count(memory, at as usize, self.refcount_order, 1));
        } else if self.l1.contains(&cluster) {
            let nth = (cluster - self.l1.start) * (len / ENTRY);
            let tables = self.l2.start + nth..self.l2.end;
            put_entries(memory, ENTRY, tables.map(|table| table << bits | COPIED));
        } else if self.l2.contains(&cluster) {
            let nth = (cluster - self.l2.start) * (len / self.l2_entry);
            let places = self.first + nth..self.first + self.mapped;
            // No subcluster of an extended entry has data.
            put_entries(memory, self.l2_entry, places.map(|place| place << bits | COPIED));
        }
    }

    /// The contents of the first cluster.
    fn make_header(
        &self,
        create: &CreateQcow2,
        features: &Features,
        l1_entries: u32,
        luks_len: u64,
    ) -> Option<Vec<u8>> {
        let bits = self.cluster_bits;
        let mut extensions = Extensions::default();
        let name = create.backing.as_ref().map_or(&[][..], |(name, format)| {
            if let Some(format) = format {
                extensions.add(BACKING_FORMAT, format.as_bytes());
            }
            name.as_bytes()
        });
        if luks_len > 0 {
            let place = [self.luks.start << bits, luks_len].map(u64::to_be_bytes);
            extensions.add(LUKS_EXTENSION, place.as_flattened());
        }
        if let Some(data_file) = &features.data_file {
            extensions.add(DATA_FILE_NAME, data_file.as_bytes());
        }
        let header_len = match (features.is_v2, features.zstd) {
            (true, _) => V2_LEN,
            (false, false) => V3_LEN,
            (false, true) => V3_LEN + 8,
        };
        let extensions = extensions.end();
        let name_at = match name {
            [] => 0,
            _ => header_len + extensions.len(),
        };
        let mut header = MAGIC.to_vec();
        let mut put = |bytes: &[u8]| header.extend_from_slice(bytes);
        put(&if features.is_v2 { 2u32 } else { 3 }.to_be_bytes());
        put(&(name_at as u64).to_be_bytes());
        put(&(name.len() as u32).to_be_bytes());
        put(&bits.to_be_bytes());
        put(&create.size.to_be_bytes());
        // The encryption: none, or LUKS.
        put(&if luks_len == 0 { 0u32 } else { 2 }.to_be_bytes());
        put(&l1_entries.to_be_bytes());
        // As in QEMU, an empty table has no place.
        let l1_at = if self.l1.is_empty() { 0 } else { self.l1.start };
        put(&(l1_at << bits).to_be_bytes());
        put(&(self.refcount_table.start << bits).to_be_bytes());
        let table_len = self.refcount_table.end - self.refcount_table.start;
        put(&(table_len as u32).to_be_bytes());
        // No snapshots.
        put(&[0; 12]);
        if !features.is_v2 {
            let feature = |is_on, bit| if is_on { bit } else { 0u64 };
            let incompatible = feature(create.extended_l2, EXTENDED_L2)
                | feature(features.zstd, COMPRESSION)
                | feature(features.data_file.is_some(), DATA_FILE);
            put(&incompatible.to_be_bytes());
            put(&feature(features.lazy_refcounts, LAZY_REFCOUNTS).to_be_bytes());
            put(&feature(features.is_raw, RAW_DATA_FILE).to_be_bytes());
            put(&self.refcount_order.to_be_bytes());
            put(&(header_len as u32).to_be_bytes());
        }
        header.resize(header_len, 0);
        if features.zstd {
            *header.get_mut(COMPRESSION_AT)? = ZSTD;
        }
        header.extend(extensions);
        header.extend_from_slice(name);
        (header.len() <= 1 << bits && name.len() <= MAX_NAME).then(|| {
            header.resize(1 << bits, 0);
            header
        })
    }
}

/// Writes entries of a table, as many as there is room for. `len`: bytes from one to the next.
fn put_entries(memory: &mut [u8], len: u64, entries: impl Iterator<Item = u64>) {
    for (place, entry) in memory.chunks_exact_mut(len as usize).zip(entries) {
        if let Some(place) = place.first_chunk_mut() {
            *place = entry.to_be_bytes();
        }
    }
}

/// Header extensions.
#[derive(Default)]
struct Extensions(Vec<u8>);

impl Extensions {
    fn add(&mut self, kind: u32, data: &[u8]) {
        self.0.extend_from_slice(&kind.to_be_bytes());
        self.0.extend_from_slice(&(data.len() as u32).to_be_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }

    /// All of them, with the end mark.
    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 8, 0);
        self.0
    }
}
