//! The image's header, read and judged before anything else of the image is.
//!
//! The fields are those of the specification, docs/interop/qcow2.rst in QEMU's sources. Features that the
//! driver lacks are refused here, and wrong sizes and places of tables, and header extensions that do not have
//! the form they should have. What QEMU reads all the same is read in the same way: a size within a sector, names
//! that end at a NUL or are not UTF-8, extensions that occur several times.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use super::bitmaps::Extension as Bitmaps;
use super::compression::Compression;
use super::marker::Mark;
use crate::error::OpenError;

/// Bytes of a header of version 2.
pub(super) const V2_LEN: usize = 72;
/// Bytes of one of version 3, at least.
pub(super) const V3_LEN: usize = 104;
/// Bytes of a cluster, as a rule.
pub(super) const USUAL: usize = 1 << 16;

pub(super) const MAGIC: &[u8; 4] = b"QFI\xfb";
/// QEMU's limit.
pub(super) const MAX_CLUSTER_BITS: u32 = 21;
/// QEMU's limit, bytes of the L1 table.
pub(super) const MAX_L1: u64 = 32 << 20;
/// QEMU's limit, bytes of the refcount table.
pub(super) const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// The bit that says that reference counts may be wrong, and the byte that has it in a header of version 3.
pub(super) const DIRTY_BIT: u8 = 1;
pub(super) const DIRTY_AT: usize = 79;
/// The bit in the same byte that marks damaged metadata (corrupt).
pub(super) const CORRUPT_BIT: u8 = 2;
/// Bytes of a header of version 3 with the autoclear features. A writer that does not maintain a feature
/// clears its bit.
pub(super) const AUTOCLEAR: Range<usize> = 88..96;
/// Longest name of a backing file.
pub(super) const MAX_NAME: usize = 1023;
/// Bytes of the name of a backing file's format, at most.
const MAX_FORMAT: usize = 15;
/// Bytes of an entry of a table.
pub(super) const ENTRY: u64 = 8;

/// Incompatible features.
const DIRTY: u64 = DIRTY_BIT as u64;
const CORRUPT: u64 = CORRUPT_BIT as u64;
pub(super) const DATA_FILE: u64 = 1 << 2;
pub(super) const COMPRESSION: u64 = 1 << 3;
/// The byte with the compression type.
pub(super) const COMPRESSION_AT: usize = 104;
pub(super) const EXTENDED_L2: u64 = 1 << 4;
/// Subclusters of a cluster, in images with extended L2 entries.
const SUBCLUSTERS: u64 = 32;
/// The smallest cluster of such an image.
pub(super) const MIN_EXTENDED: u64 = SUBCLUSTERS * 512;
/// Autoclear features.
pub(super) const BITMAPS: u64 = 1;
pub(super) const RAW_DATA_FILE: u64 = 1 << 1;

/// Header extensions.
pub(super) const END: u32 = 0;
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
pub(super) const FEATURE_NAMES: u32 = 0x6803_f857;
pub(super) const DATA_FILE_NAME: u32 = 0x4441_5441;
pub(super) const BITMAPS_EXTENSION: u32 = 0x2385_2875;
pub(super) const LUKS_EXTENSION: u32 = 0x0537_be77;
/// ringmill's: the content of the [backing image](super::origin).
pub(super) const ORIGIN_EXTENSION: u32 = 0x726d_6f72;
/// More than any LUKS header takes, bytes.
const MAX_LUKS: u64 = 64 << 20;
const SECTOR: u64 = 512;

/// What an image is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
    /// A check or a repair: features that say that it is needed are accepted.
    Check,
}

impl Purpose {
    /// That of an image that guests use.
    pub(crate) fn of(read_only: bool) -> Purpose {
        if read_only { Purpose::Read } else { Purpose::Write }
    }
}

/// What an image's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// 2 or 3.
    pub(crate) version: u32,
    /// Of compressed clusters.
    pub(crate) compression: Compression,
    /// Bytes of a cluster: a power of two, 512 to 2 MiB.
    pub(crate) cluster: u64,
    /// Bytes of the disk, a multiple of 512: as in QEMU, the header's size rounded down.
    pub(crate) size: u64,
    /// The image that lies behind this one.
    pub(crate) backing: Option<Backing>,
    /// The guest's data lies in another file.
    pub(crate) data_file: Option<DataFile>,
    /// That file by itself has the disk's bytes, also where the image has zeroes.
    pub(crate) data_file_raw: bool,
    /// Bits of a reference count: a power of two, 1 to 64.
    pub(crate) refcount_bits: u32,
    /// The table of internal snapshots: first byte and number of snapshots.
    pub(crate) snapshots: (u64, u32),
    /// The L1 table: first byte and number of bytes.
    pub(crate) l1_table: (u64, u64),
    /// The refcount table: first byte and number of bytes.
    pub(crate) refcount_table: (u64, u64),
    /// Where a process has kept what is missing, and up to which commit nothing is.
    pub(crate) mark: Option<(Mark, u64)>,
    /// The image has not been closed. Without a mark, reference counts may be wrong.
    pub(crate) is_dirty: bool,
    /// Entries of L2 tables have a bitmap of subclusters.
    pub(crate) extended_l2: bool,
    /// There is room for a mark.
    pub(crate) has_room: bool,
    /// The image has autoclear features that end when the image is written to.
    pub(crate) loses_autoclear: bool,
    /// The persistent dirty bitmaps, if their autoclear bit says that the bitmaps are valid.
    pub(crate) bitmaps: Option<Bitmaps>,
    /// The autoclear bit says that the bitmaps are not valid.
    pub(crate) has_stale_bitmaps: bool,
    /// The LUKS header of an encrypted image: its bytes in the file.
    pub(crate) luks: Option<Range<u64>>,
    /// The recorded content of the backing image.
    pub(crate) origin: Option<String>,
}

/// The backing file that a header names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backing {
    /// As it stands there: a path, as a rule relative to the image's. Not empty.
    pub(crate) filename: OsString,
    /// The format, if it is told.
    pub(crate) format: Option<String>,
}

/// The external data file of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataFile {
    /// Its name, if it is told.
    pub(crate) filename: Option<OsString>,
}

fn kept_autoclear(bitmaps: bool, data_file_raw: bool) -> u64 {
    let bit = |is_kept, bit| if is_kept { bit } else { 0 };
    bit(bitmaps, BITMAPS) | bit(data_file_raw, RAW_DATA_FILE)
}

impl Header {
    /// The autoclear features of the image that stay when it is written to.
    pub(super) fn kept_autoclear(&self) -> u64 {
        kept_autoclear(self.bitmaps.is_some(), self.data_file_raw)
    }

    /// The header of another disk in the image, of so many bytes, whose L1 table is at `l1`.
    ///
    /// # Errors
    ///
    /// The table cannot be there, or is too small.
    pub(super) fn at(&self, size: u64, l1: Range<u64>) -> Result<Header, OpenError> {
        let len = l1.end - l1.start;
        check_tables(
            size,
            self.cluster,
            reach(self.cluster, self.extended_l2),
            l1.start,
            len / ENTRY,
        )?;
        Ok(Header {
            size: size - size % SECTOR,
            l1_table: (l1.start, len),
            bitmaps: None,
            ..self.clone()
        })
    }

    /// Bytes that are mapped as a whole: a subcluster, or a cluster.
    pub(crate) fn unit(&self) -> u64 {
        if self.extended_l2 { self.cluster / SUBCLUSTERS } else { self.cluster }
    }
}

/// Whether an image that begins with these bytes is in this format.
pub(crate) fn is_qcow2(start: &[u8]) -> bool {
    start.starts_with(MAGIC) && matches!(number(start, 4, 4), Some(2 | 3))
}

/// Bytes to read of an image that begins with these: its first cluster, which the header with its extensions and the name
/// of the backing file never leaves. The largest one there is takes a while.
pub(super) fn to_read(start: &[u8]) -> usize {
    let bits = number(start, 20, 4).unwrap_or_default().min(u64::from(MAX_CLUSTER_BITS));
    1 << bits
}

/// A number in the format's order of bytes, `len` of them.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.get(..len)?;
    Some(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn invalid(why: impl std::fmt::Display) -> OpenError {
    OpenError::new(format!("Image is not a valid qcow2 image: {why}"))
}

impl Header {
    /// Reads the header from the image's first bytes: [as many as it takes](to_read), or as it has.
    pub(crate) fn parse(bytes: &[u8], purpose: Purpose) -> Result<Header, OpenError> {
        if !bytes.starts_with(MAGIC) {
            return Err(OpenError::new("Image is not in qcow2 format")
                .with_hint("driver=raw opens an image without a format"));
        }
        if bytes.len() < V2_LEN {
            return Err(invalid("it ends within the header"));
        }
        // There are as many bytes.
        let u32_at = |at| number(bytes, at, 4).unwrap_or_default() as u32;
        let u64_at = |at| number(bytes, at, 8).unwrap_or_default();
        let version = u32_at(4);
        if !matches!(version, 2 | 3) {
            return Err(OpenError::new(format!("Unsupported qcow2 version {version}")));
        }
        let cluster_bits = u32_at(20);
        if !(9..=MAX_CLUSTER_BITS).contains(&cluster_bits) {
            return Err(OpenError::new(format!("Unsupported cluster size: 2^{cluster_bits}")));
        }
        let cluster = 1 << cluster_bits;
        let is_luks = match u32_at(32) {
            0 => false,
            1 => return Err(super::encrypt::legacy()),
            2 => true,
            method => return Err(invalid(format!("Unsupported encryption method {method}"))),
        };
        let header_len = match version {
            2 => V2_LEN,
            _ if bytes.len() < V3_LEN => return Err(invalid("it ends within the header")),
            _ => u32_at(100) as usize,
        };
        if version == 3 && (header_len < V3_LEN || header_len as u64 > cluster) {
            return Err(invalid(format!("a header of {header_len} bytes")));
        }
        let order = if version == 2 { 4 } else { u32_at(96) };
        if order > 6 {
            return Err(OpenError::new(format!(
                "Reference count entry width too large: 2^{order}"
            )));
        }
        let incompatible = if version == 2 { 0 } else { u64_at(72) };
        let autoclear = if version == 2 { 0 } else { u64_at(88) };
        let compression = compression(bytes, header_len, incompatible)?;
        let mark = Mark::find(bytes, cluster).filter(|_| version == 3);
        check_features(incompatible, purpose)?;
        let size = u64_at(24);
        let extended_l2 = incompatible & EXTENDED_L2 != 0;
        if extended_l2 && cluster < MIN_EXTENDED {
            let unit = cluster / SUBCLUSTERS;
            return Err(OpenError::new(format!("Unsupported subcluster size: {unit}")));
        }
        check_tables(size, cluster, reach(cluster, extended_l2), u64_at(40), u32_at(36).into())?;
        let refcount_table = (u64_at(48), u64::from(u32_at(56)) << cluster_bits);
        check_table("refcount table", refcount_table.0, refcount_table.1, cluster)?;
        if refcount_table.1 > MAX_REFCOUNT_TABLE {
            return Err(OpenError::new("Reference count table too large"));
        }
        if refcount_table.1 == 0 && purpose == Purpose::Write {
            return Err(OpenError::new("Image does not contain a reference count table"));
        }
        // Within the first cluster, as far as there is one.
        let first = &bytes[..bytes.len().min(cluster as usize)];
        let extensions = match (version, u64_at(8)) {
            // The name may follow at once.
            (2, offset @ 1..) => &first[..first.len().min(offset as usize)],
            _ => first,
        };
        let extensions = Extensions::parse(extensions, header_len, version)?;
        let backing = match (u64_at(8), u32_at(16) as usize) {
            (0, _) | (_, 0) => None,
            (offset, len) => Some(name(first, offset, len)?).filter(|name| !name.is_empty()),
        };
        let backing =
            backing.map(|filename| Backing { filename, format: extensions.backing_format });
        let data_file =
            (incompatible & DATA_FILE != 0).then_some(DataFile { filename: extensions.data_file });
        let (bitmaps, has_stale_bitmaps) = match (extensions.bitmaps, autoclear & BITMAPS != 0) {
            (Some(data), true) => (Some(bitmaps_at(data, cluster)?), false),
            (data, _) => (None, data.is_some()),
        };
        let data_file_raw = data_file.is_some() && autoclear & RAW_DATA_FILE != 0;
        let kept = kept_autoclear(bitmaps.is_some(), data_file_raw);
        let luks = match (extensions.luks, is_luks) {
            (Some(data), true) => Some(luks_at(data, cluster)?),
            (None, true) => {
                return Err(invalid("the header extension for its encryption is missing"));
            }
            (Some(_), false) => {
                let why = "CRYPTO header extension only expected with LUKS encryption method";
                return Err(OpenError::new(why));
            }
            (None, false) => None,
        };
        Ok(Header {
            version,
            compression,
            cluster,
            size: size - size % SECTOR,
            backing,
            data_file,
            data_file_raw,
            refcount_bits: 1 << order,
            snapshots: (u64_at(64), u32_at(60)),
            l1_table: (u64_at(40), u64::from(u32_at(36)) * ENTRY),
            refcount_table,
            mark,
            is_dirty: incompatible & DIRTY != 0,
            extended_l2,
            has_room: version == 3 && Mark::fits(bytes, cluster),
            loses_autoclear: autoclear & !kept != 0,
            bitmaps,
            has_stale_bitmaps,
            luks,
            origin: extensions.origin.map(origin),
        })
    }
}

/// The compression type. Its incompatible bit is set if it is not zlib.
fn compression(
    bytes: &[u8],
    header_len: usize,
    incompatible: u64,
) -> Result<Compression, OpenError> {
    let kind = match header_len > COMPRESSION_AT {
        true => bytes.get(COMPRESSION_AT).copied().unwrap_or_default(),
        false => 0,
    };
    match (kind, incompatible & COMPRESSION != 0) {
        (0, false) => Ok(Compression::Zlib),
        (1, true) => Ok(Compression::Zstd),
        (0 | 1, _) => Err(invalid("its compression type and the incompatible bit for it disagree")),
        (kind, _) => Err(OpenError::new(format!("Unknown compression type: {kind}"))),
    }
}

fn check_features(incompatible: u64, purpose: Purpose) -> Result<(), OpenError> {
    if incompatible & CORRUPT != 0 && purpose == Purpose::Write {
        let why = "qcow2: Image is corrupt; cannot be opened read/write";
        return Err(OpenError::new(why).with_hint(
            "ringmill check --repair all repairs what can be repaired; read-only=on opens it for reading",
        ));
    }
    let unknown = incompatible & !(DIRTY | DATA_FILE | CORRUPT | COMPRESSION | EXTENDED_L2);
    if unknown != 0 {
        return Err(OpenError::new(format!("Unsupported qcow2 feature(s): {unknown:#x}")));
    }
    Ok(())
}

/// Bytes of the disk that an L2 table maps.
fn reach(cluster: u64, extended_l2: bool) -> u64 {
    cluster * (cluster / if extended_l2 { 2 * ENTRY } else { ENTRY })
}

/// Checks the disk's size and the L1 table, `entries` at `offset`. `reach`: bytes of the disk that an L2 table maps.
fn check_tables(
    size: u64,
    cluster: u64,
    reach: u64,
    offset: u64,
    entries: u64,
) -> Result<(), OpenError> {
    if entries * ENTRY > MAX_L1 {
        return Err(OpenError::new("Active L1 table too large"));
    }
    if size.div_ceil(reach) > entries {
        return Err(OpenError::new("L1 table is too small"));
    }
    check_table("L1 table", offset, entries * ENTRY, cluster)
}

fn check_table(what: &str, offset: u64, len: u64, cluster: u64) -> Result<(), OpenError> {
    let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
    if !offset.is_multiple_of(cluster) || end.is_none() || (len > 0 && offset < cluster) {
        return Err(invalid(format!("the offset of the {what}, {offset:#x}")));
    }
    Ok(())
}

/// The name of the backing file.
fn name(first: &[u8], offset: u64, len: usize) -> Result<OsString, OpenError> {
    if len > MAX_NAME {
        return Err(OpenError::new("Backing file name too long"));
    }
    let bytes = usize::try_from(offset).ok().and_then(|at| first.get(at..)?.get(..len));
    let bytes = bytes.ok_or_else(|| invalid("the offset of the backing file's name"))?;
    Ok(OsStr::from_bytes(c_string(bytes)).to_owned())
}

/// The bytes up to the first NUL, as QEMU reads names.
fn c_string(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// The name of a backing file's format. `None`: it is empty, so the format is probed.
fn format_name(data: &[u8]) -> Result<Option<String>, OpenError> {
    if data.len() > MAX_FORMAT {
        let len = data.len();
        let why = format!("ERROR: ext_backing_format: len={len} too large (>=16)");
        return Err(OpenError::new(why));
    }
    let name = String::from_utf8_lossy(c_string(data));
    Ok((!name.is_empty()).then(|| name.into_owned()))
}

/// Those header extensions that matter. Of an extension that occurs several times the last one counts, as in QEMU.
#[derive(Default)]
struct Extensions<'a> {
    backing_format: Option<String>,
    data_file: Option<OsString>,
    bitmaps: Option<&'a [u8]>,
    luks: Option<&'a [u8]>,
    origin: Option<&'a [u8]>,
}

impl<'a> Extensions<'a> {
    fn parse(first: &'a [u8], mut at: usize, version: u32) -> Result<Extensions<'a>, OpenError> {
        let mut found = Extensions::default();
        loop {
            let kind = number(first, at, 4);
            let len = number(first, at + 4, 4);
            let (Some(kind), Some(len)) = (kind, len) else {
                // Version 2 has none as a rule, and does not require an end mark.
                return match version {
                    2 => Ok(found),
                    _ => Err(invalid("header extensions without an end")),
                };
            };
            let (kind, len) = (kind as u32, len as usize);
            if kind == END {
                return Ok(found);
            }
            let data = first.get(at + 8..).and_then(|rest| rest.get(..len));
            let data = data.ok_or_else(|| invalid("header extensions beyond the first cluster"))?;
            match kind {
                BACKING_FORMAT => found.backing_format = format_name(data)?,
                DATA_FILE_NAME => {
                    found.data_file = Some(OsStr::from_bytes(c_string(data)).to_owned());
                }
                BITMAPS_EXTENSION => found.bitmaps = Some(data),
                LUKS_EXTENSION => found.luks = Some(data),
                ORIGIN_EXTENSION => found.origin = Some(data),
                _ => {}
            }
            at += 8 + len.next_multiple_of(8);
        }
    }
}

/// The recorded content of a backing image, for comparison and for messages.
fn origin(text: &[u8]) -> String {
    String::from_utf8_lossy(text).replace(char::is_control, "?")
}

fn bitmaps_at(data: &[u8], cluster: u64) -> Result<Bitmaps, OpenError> {
    Bitmaps::parse(data, cluster).map_err(|why| invalid(format!("bitmaps_ext: {why}")))
}

/// The place of the LUKS header: an offset and a length.
fn luks_at(data: &[u8], cluster: u64) -> Result<Range<u64>, OpenError> {
    let (Some(at), Some(len), 16) = (number(data, 0, 8), number(data, 8, 8), data.len()) else {
        return Err(invalid(format!("CRYPTO header extension size {} is not 16", data.len())));
    };
    if !at.is_multiple_of(cluster) {
        return Err(OpenError::new(format!(
            "Encryption header offset '{at}' is not a multiple of cluster size '{cluster}'"
        )));
    }
    let end = at.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
    match end {
        Some(end) if at > 0 && (1..=MAX_LUKS).contains(&len) => Ok(at..end),
        _ => Err(invalid(format!("an encryption header of {len} bytes at {at:#x}"))),
    }
}
