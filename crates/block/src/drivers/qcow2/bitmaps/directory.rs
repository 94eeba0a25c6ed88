//! The bitmap directory and the header extension that leads to it, as bytes.
//!
//! The fields are those of the specification, docs/interop/qcow2.rst in QEMU's sources, and the limits are QEMU's.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use crate::drivers::qcow2::steps::number;

/// Most bitmaps in an image.
pub(super) const MAX_BITMAPS: usize = 65535;
/// Most bytes of the directory.
const MAX_DIRECTORY: u64 = 1024 * MAX_BITMAPS as u64;
/// Longest name, bytes.
pub(super) const MAX_NAME: usize = 1023;
/// Bits of the bytes of a part.
const GRANULARITY_BITS: RangeInclusive<u32> = 9..=31;
/// Most bytes of a bitmap's bits.
const MAX_BITS: u64 = 512 << 20;
/// Bytes of a directory entry before its extra data and its name.
const ENTRY: usize = 24;
/// The only type of bitmaps.
const DIRTY_TRACKING: u8 = 1;

/// Flags: the bitmap was not stored since the image was opened; writes are to set its bits.
const IN_USE: u32 = 1;
const AUTO: u32 = 1 << 1;
/// The byte of an entry with these flags.
const FLAGS_AT: usize = 15;

/// The header extension: where the directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extension {
    pub(in super::super) count: u32,
    /// Offset and length of the bitmap directory, bytes.
    pub(in super::super) directory: (u64, u64),
}

impl Extension {
    /// Parses the extension's data.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub(in super::super) fn parse(data: &[u8], cluster: u64) -> Result<Extension, &'static str> {
        let Ok(data) = <&[u8; 24]>::try_from(data) else {
            return Err("invalid extension length");
        };
        let (count, reserved) = (number(&data[..4]) as u32, number(&data[4..8]));
        let directory @ (offset, len) = (number(&data[16..]), number(&data[8..16]));
        let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
        match () {
            () if reserved != 0 => Err("reserved field is not zero"),
            () if count == 0 => Err("found bitmaps extension with zero bitmaps"),
            () if count as usize > MAX_BITMAPS => Err("too many bitmaps"),
            () if offset == 0 || !offset.is_multiple_of(cluster) || end.is_none() => {
                Err("invalid bitmap directory offset")
            }
            () if len > MAX_DIRECTORY => Err("the bitmap directory is too large"),
            () => Ok(Extension { count, directory }),
        }
    }

    /// The extension's data.
    pub(in super::super) fn bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..4].copy_from_slice(&self.count.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.directory.1.to_be_bytes());
        bytes[16..].copy_from_slice(&self.directory.0.to_be_bytes());
        bytes
    }
}

/// A bitmap in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    /// What the bitmap has may be wrong.
    pub(super) in_use: bool,
    /// Writes are to set bits.
    pub(super) auto: bool,
    pub(super) granularity_bits: u32,
    /// First byte of the bitmap's table, and its entries.
    pub(super) table: (u64, u32),
}

impl Entry {
    /// Bytes of a part.
    pub(super) fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }

    /// Bytes in the directory.
    fn len(&self) -> usize {
        (ENTRY + self.name.len()).next_multiple_of(8)
    }

    fn put(&self, directory: &mut Vec<u8>) {
        let end = directory.len() + self.len();
        let (in_use, auto) = (u32::from(self.in_use) * IN_USE, u32::from(self.auto) * AUTO);
        directory.extend(self.table.0.to_be_bytes());
        directory.extend(self.table.1.to_be_bytes());
        directory.extend((in_use | auto).to_be_bytes());
        directory.extend([DIRTY_TRACKING, self.granularity_bits as u8]);
        directory.extend((self.name.len() as u16).to_be_bytes());
        directory.extend(0u32.to_be_bytes());
        directory.extend(self.name.as_bytes());
        directory.resize(end, 0);
    }

    fn parse(bytes: &[u8], cluster: u64) -> Result<(Entry, usize), String> {
        let damaged = || "the bitmap directory is damaged".to_owned();
        let fixed: &[u8; ENTRY] = bytes.first_chunk().ok_or_else(damaged)?;
        let (flags, kind, bits) = (number(&fixed[12..16]) as u32, fixed[16], u32::from(fixed[17]));
        let (name_len, extra) = (number(&fixed[18..20]) as usize, number(&fixed[20..]));
        let name = bytes.get(ENTRY..).and_then(|rest| rest.get(..name_len)).ok_or_else(damaged)?;
        let name = std::str::from_utf8(name).ok().filter(|name| !name.contains('\0'));
        let name = name.ok_or_else(|| "the name of a bitmap is no text".to_owned())?.to_owned();
        if extra != 0 {
            return Err(format!("bitmap '{name}' has extra data, which is not supported"));
        }
        let table = (number(&fixed[..8]), number(&fixed[8..12]) as u32);
        let end = table.0.checked_add(u64::from(table.1) * 8).filter(|end| *end <= 1 << 56);
        let is_wrong = name.is_empty()
            || name.len() > MAX_NAME
            || table.0 == 0
            || !table.0.is_multiple_of(cluster)
            || end.is_none()
            || u64::from(table.1) > MAX_BITS.div_ceil(cluster)
            || kind != DIRTY_TRACKING
            || flags & !(IN_USE | AUTO) != 0
            || !GRANULARITY_BITS.contains(&bits);
        if is_wrong {
            return Err(format!("bitmap '{name}' doesn't satisfy the constraints"));
        }
        let (in_use, auto) = (flags & IN_USE != 0, flags & AUTO != 0);
        let entry = Entry { name, in_use, auto, granularity_bits: bits, table };
        let len = entry.len();
        Ok((entry, len))
    }
}

/// Bytes of a directory of these bitmaps.
pub(super) fn bytes(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| entry.put(&mut bytes));
    bytes
}

/// The bitmaps of a directory.
///
/// # Errors
///
/// What is wrong.
pub(super) fn parse(
    mut bytes: &[u8],
    extension: Extension,
    cluster: u64,
) -> Result<Vec<Entry>, String> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut names = HashSet::new();
    while !bytes.is_empty() {
        let (entry, len) = Entry::parse(bytes, cluster)?;
        if !names.insert(entry.name.clone()) {
            return Err(format!("bitmap '{}' is there twice", entry.name));
        }
        entries.push(entry);
        bytes = bytes.get(len..).ok_or("the bitmap directory is damaged")?;
    }
    match entries.len() == extension.count as usize {
        true => Ok(entries),
        false => {
            Err("the bitmap directory does not have as many bitmaps as the header says".into())
        }
    }
}

/// Has each bitmap of a directory in use, in the bytes of a directory that [parses](parse).
pub(super) fn set_in_use(bytes: &mut [u8], entries: &[Entry]) {
    let mut at = 0;
    for entry in entries {
        if let Some(flags) = bytes.get_mut(at + FLAGS_AT) {
            *flags |= IN_USE as u8;
        }
        at += entry.len();
    }
}

/// Checks whether a new bitmap can be stored beside others.
///
/// # Errors
///
/// In QEMU's words.
pub(super) fn check_new(
    name: &str,
    granularity: u64,
    size: u64,
    stored: &[String],
) -> Result<(), String> {
    let bits = granularity.trailing_zeros();
    let bytes = |names: usize| (ENTRY + names).next_multiple_of(8) as u64;
    let directory: u64 = stored.iter().map(|name| bytes(name.len())).sum();
    match () {
        () if bits < *GRANULARITY_BITS.start() => Err(format!(
            "Granularity is under minimum ({} bytes)",
            1u64 << GRANULARITY_BITS.start()
        )),
        () if bits > *GRANULARITY_BITS.end() => {
            Err(format!("Granularity exceeds maximum ({} bytes)", 1u64 << GRANULARITY_BITS.end()))
        }
        () if name.len() > MAX_NAME => {
            Err(format!("Name length exceeds maximum ({MAX_NAME} characters)"))
        }
        () if size.div_ceil(granularity).div_ceil(8) > MAX_BITS => {
            Err("Too much space will be occupied by the bitmap. Use larger granularity".into())
        }
        () if stored.len() >= MAX_BITMAPS => {
            Err("Maximum number of persistent bitmaps is already reached".into())
        }
        () if directory + bytes(name.len()) > MAX_DIRECTORY => {
            Err("Not enough space in the bitmap directory".into())
        }
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, in_use: bool, auto: bool) -> Entry {
        Entry { name: name.into(), in_use, auto, granularity_bits: 16, table: (3 << 16, 2) }
    }

    fn extension(count: u32, len: usize) -> Extension {
        Extension { count, directory: (5 << 16, len as u64) }
    }

    #[test]
    fn what_is_written_is_read() {
        let entries = [entry("first", false, true), entry("second-1", true, false)];
        let mut bytes = bytes(&entries);
        let extension = extension(2, bytes.len());
        assert_eq!(Extension::parse(&extension.bytes(), 65536), Ok(extension));
        assert_eq!(parse(&bytes, extension, 65536).unwrap(), entries);
        set_in_use(&mut bytes, &entries);
        let in_use = parse(&bytes, extension, 65536).unwrap();
        assert_eq!(in_use, [entry("first", true, true), entry("second-1", true, false)]);
    }

    #[test]
    fn a_directory_that_is_none_is_refused() {
        let whole = bytes(&[entry("name", false, true), entry("other", false, true)]);
        for len in 0..whole.len() {
            assert!(parse(&whole[..len], extension(2, len), 65536).is_err());
        }
        assert!(parse(&whole, extension(3, whole.len()), 65536).is_err());
        for garbage in [0, 0xff] {
            assert!(parse(&[garbage; 4096], extension(1, 4096), 65536).is_err());
        }
        let twice = bytes(&[entry("name", false, true), entry("name", false, true)]);
        assert!(parse(&twice, extension(2, twice.len()), 65536).is_err());
        // The table's offset and length, flags, type, granularity, extra data.
        for (at, byte) in [(6, 1), (8, 0xff), (14, 1), (16, 2), (17, 8), (17, 32), (23, 1)] {
            let mut wrong = whole.clone();
            wrong[at] = byte;
            assert!(parse(&wrong, extension(2, whole.len()), 65536).is_err(), "{at}");
        }
    }

    #[test]
    fn an_extension_that_leads_nowhere_is_refused() {
        let right = extension(1, 32).bytes();
        assert!(Extension::parse(&right[..23], 65536).is_err());
        for (at, byte) in [(3, 0), (1, 1), (7, 1), (8, 1), (16, 0x80), (23, 1), (21, 0)] {
            let mut wrong = right;
            wrong[at] = byte;
            assert!(Extension::parse(&wrong, 65536).is_err(), "{at}");
        }
    }
}
