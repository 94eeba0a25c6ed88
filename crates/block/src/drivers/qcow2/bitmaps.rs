//! Persistent dirty bitmaps: their names, for the warning that writing invalidates the bitmaps.
//!
//! The fields are those of the specification, docs/interop/qcow2.rst in QEMU's sources.

use nix::errno::Errno;

use super::context::Channels;
use super::steps::{number, read};

/// Most bytes of the bitmap directory that are read: enough for the names of some bitmaps.
const LOOKED_AT: u64 = 64 << 10;
/// Most names in the warning.
const TOLD: usize = 8;
/// Bytes of a directory entry before its extra data and its name.
const ENTRY: usize = 24;

/// The header extension that describes the bitmaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bitmaps {
    count: u32,
    /// Offset and length of the bitmap directory, bytes.
    directory: (u64, u64),
}

impl Bitmaps {
    /// Parses the extension's data. `None`: the length is wrong.
    pub(super) fn parse(data: &[u8]) -> Option<Bitmaps> {
        let data: &[u8; 24] = data.try_into().ok()?;
        Some(Bitmaps {
            count: number(&data[..4]) as u32,
            directory: (number(&data[16..]), number(&data[8..16])),
        })
    }

    /// Reads the names from the directory, and formats them for a log line.
    pub(super) async fn names(self, channels: &Channels) -> Result<String, Errno> {
        let (offset, len) = self.directory;
        if i64::try_from(offset).is_err() {
            return Err(Errno::EINVAL);
        }
        let directory = read(channels, offset, len.min(LOOKED_AT) as usize).await?;
        Ok(told(&names(&directory), self.count))
    }
}

/// Returns the names in the first bytes of a directory, up to the first malformed entry.
fn names(mut directory: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((entry, rest)) = directory.split_at_checked(ENTRY) {
        let (name_len, extra) = (number(&entry[18..20]) as usize, number(&entry[20..]) as usize);
        let name = rest.get(extra..).and_then(|rest| rest.get(..name_len));
        let Some(name) = name.filter(|name| !name.is_empty()) else { break };
        names.push(String::from_utf8_lossy(name).into_owned());
        let entry_len = (ENTRY + extra + name_len).next_multiple_of(8);
        directory = directory.get(entry_len..).unwrap_or_default();
    }
    names
}

fn told(names: &[String], count: u32) -> String {
    // A name may contain any bytes: `{:?}` escapes control characters.
    let told: Vec<_> = names.iter().take(TOLD).map(|name| format!("{name:?}")).collect();
    match (told.len(), count as usize) {
        (0, count) => format!("{count}, whose names cannot be read"),
        (some, count) if some < count => format!("{} and {} more", told.join(", "), count - some),
        _ => told.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &[u8], extra: usize) -> Vec<u8> {
        let mut entry = vec![0; 18];
        entry.extend((name.len() as u16).to_be_bytes());
        entry.extend((extra as u32).to_be_bytes());
        entry.extend(vec![0xee; extra]);
        entry.extend(name);
        entry.resize(entry.len().next_multiple_of(8), 0);
        entry
    }

    #[test]
    fn names_are_found_behind_each_other() {
        let directory = [entry(b"first", 0), entry(b"\n\x1b[2J", 5), entry(b"third", 8)].concat();
        assert_eq!(names(&directory), ["first", "\n\u{1b}[2J", "third"]);
        assert_eq!(told(&names(&directory), 3), r#""first", "\n\u{1b}[2J", "third""#);
        assert_eq!(told(&names(&directory), 9), r#""first", "\n\u{1b}[2J", "third" and 6 more"#);
    }

    #[test]
    fn a_directory_that_is_none_gives_no_names() {
        let whole = entry(b"name", 16);
        for len in 0..whole.len() {
            assert!(names(&whole[..len]).len() <= 1);
        }
        assert!(names(&[0; 4096]).is_empty());
        assert!(names(&[0xff; 4096]).is_empty());
        assert_eq!(told(&[], u32::MAX), "4294967295, whose names cannot be read");
        let many: Vec<_> = (0..100).map(|n| n.to_string()).collect();
        assert!(told(&many, 100).ends_with("and 92 more"));
    }
}
