//! The mark of an image with metadata outside it: a process has the image open, or was killed.
//!
//! The mark names the [journal](super::journal). It is in the last sector of the header's cluster, which the
//! format leaves unused. The format's dirty bit is set as well.
//!
//! The mark protects against the use of a wrong journal:
//!
//! - Another writer. QEMU, which does not know journals, sees the dirty bit and repairs the image: it
//!   recounts references, clears the bit and rewrites the header's cluster without the mark.
//! - An older copy of the image. The mark has the number of the last commit that is in the image's metadata.
//! - A power cut, or another machine. The mark has the boot's ID. If that differs, the journal is lost, and the
//!   image has at least everything up to the last flush.

use std::fmt;
use std::io;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use nix::errno::Errno;

use super::context::Channels;
use super::header::{AUTOCLEAR, CORRUPT_BIT, DIRTY_AT, DIRTY_BIT};
use super::steps::{SECTOR, read, write};
use super::storage::sync;

const MAGIC: &[u8; 16] = b"ringmill journal";
/// Clusters that have room for it behind the header.
const SMALLEST: u64 = 4096;

/// The name of a journal, unique across machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    name: [u8; 16],
    boot: [u8; 16],
}

impl Mark {
    /// Returns a new, unique mark.
    pub(super) fn new() -> io::Result<Mark> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let mut name = [0; 16];
        name[..8].copy_from_slice(&(since.unwrap_or_default().as_nanos() as u64).to_be_bytes());
        name[8..12].copy_from_slice(&process::id().to_be_bytes());
        name[12..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
        Ok(Mark { name, boot: boot()? })
    }

    /// Returns the mark's offset for a cluster size, bytes. `None`: the cluster has no room.
    pub(super) fn place(cluster: u64) -> Option<u64> {
        (cluster >= SMALLEST).then(|| cluster - SECTOR as u64)
    }

    /// Finds the mark in an image's first bytes. Returns also the last commit that the image
    /// contains.
    pub(super) fn find(first: &[u8], cluster: u64) -> Option<(Mark, u64)> {
        let sector = first.get(Self::place(cluster)? as usize..)?.first_chunk::<SECTOR>()?;
        let (name, rest) = sector.strip_prefix(MAGIC)?.split_first_chunk()?;
        let (boot, rest) = rest.split_first_chunk()?;
        let (commit, rest) = rest.split_first_chunk()?;
        let mark = Mark { name: *name, boot: *boot };
        rest.iter().all(|byte| *byte == 0).then(|| (mark, u64::from_be_bytes(*commit)))
    }

    /// Whether there is room for a mark: nothing is there, or a mark.
    pub(super) fn fits(first: &[u8], cluster: u64) -> bool {
        let sector =
            Self::place(cluster).and_then(|at| first.get(at as usize..)?.first_chunk::<SECTOR>());
        sector.is_some_and(|sector| sector == &[0; SECTOR]) || Self::find(first, cluster).is_some()
    }

    /// Whether it was made since the machine was started.
    pub(super) fn is_of_this_boot(&self) -> bool {
        boot().is_ok_and(|boot| boot == self.boot)
    }

    /// Returns the mark's sector for an image that contains all commits up to `commit`.
    pub(super) fn sector(&self, commit: u64) -> [u8; SECTOR] {
        let mut sector = [0; SECTOR];
        sector[..16].copy_from_slice(MAGIC);
        sector[16..48].copy_from_slice(&self.bytes());
        sector[48..56].copy_from_slice(&commit.to_be_bytes());
        sector
    }

    /// The inverse of [`bytes`](Self::bytes).
    pub(super) fn from_bytes(bytes: &[u8; 32]) -> Mark {
        let mut mark = Mark { name: [0; 16], boot: [0; 16] };
        mark.name.copy_from_slice(&bytes[..16]);
        mark.boot.copy_from_slice(&bytes[16..]);
        mark
    }

    pub(super) fn bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.name);
        bytes[16..].copy_from_slice(&self.boot);
        bytes
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Sets or clears the dirty bit in a header of version 3.
pub(super) fn set_dirty(header: &mut [u8; SECTOR], dirty: bool) {
    if header[4..8] == 3u32.to_be_bytes() {
        header[DIRTY_AT] = header[DIRTY_AT] & !DIRTY_BIT | if dirty { DIRTY_BIT } else { 0 };
    }
}

/// Sets or clears the corrupt bit in a header of version 3.
pub(super) fn set_corrupt(header: &mut [u8; SECTOR], corrupt: bool) {
    if header[4..8] == 3u32.to_be_bytes() {
        let bit = if corrupt { CORRUPT_BIT } else { 0 };
        header[DIRTY_AT] = header[DIRTY_AT] & !CORRUPT_BIT | bit;
    }
}

/// Sets the corrupt bit in the header of a file of version 3.
pub(super) async fn write_corrupt(channels: &Channels) -> Result<(), Errno> {
    change_header(channels, |header| set_corrupt(header, true)).await
}

/// Sets the autoclear features in the header of a file of version 3. On stable storage on return, so before data
/// changes.
pub(super) async fn write_autoclear(channels: &Channels, features: u64) -> Result<(), Errno> {
    change_header(channels, |header| header[AUTOCLEAR].copy_from_slice(&features.to_be_bytes()))
        .await?;
    sync(channels).await
}

async fn change_header(
    channels: &Channels,
    change: impl FnOnce(&mut [u8; SECTOR]),
) -> Result<(), Errno> {
    let bytes = read(channels, 0, SECTOR).await?;
    let mut header = *bytes.first_chunk::<SECTOR>().ok_or(Errno::EIO)?;
    change(&mut header);
    write(channels, 0, &header)?.await.0
}

/// Sets or clears the dirty bit in the header of a file of version 3: whether the image needs
/// repair.
pub(super) async fn write_dirty(channels: &Channels, dirty: bool) -> Result<(), Errno> {
    change_header(channels, |header| set_dirty(header, dirty)).await
}

/// Clears the dirty and the corrupt bit in the header of a file of version 3.
pub(super) async fn write_clean(channels: &Channels) -> Result<(), Errno> {
    change_header(channels, |header| {
        set_dirty(header, false);
        set_corrupt(header, false);
    })
    .await
}

/// Has an image with such clusters say that nothing is missing, and name no journal.
pub(super) async fn unmark(channels: &Channels, cluster: u64) -> Result<(), Errno> {
    write_dirty(channels, false).await?;
    // A mark that is gone and a bit that is not would be an image that has to be repaired.
    sync(channels).await?;
    if let Some(at) = Mark::place(cluster) {
        write(channels, at, &[0; SECTOR])?.await.0?;
        sync(channels).await?;
    }
    Ok(())
}

/// What tells this start of the machine from others, proc_sys_kernel(5).
fn boot() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok(id.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_where_it_was_put() {
        let mark = Mark::new().unwrap();
        assert_ne!(mark, Mark::new().unwrap());
        let mut first = vec![0; 65536];
        assert!(Mark::fits(&first, 65536) && Mark::find(&first, 65536).is_none());
        first[65024..].copy_from_slice(&mark.sector(7));
        assert_eq!(Mark::find(&first, 65536), Some((mark.clone(), 7)));
        assert!(mark.is_of_this_boot() && Mark::fits(&first, 65536));
        first[65535] = 1;
        assert!(!Mark::fits(&first, 65536) && Mark::find(&first, 65536).is_none());
        // A header alone in its cluster, or with less behind it.
        assert!(!Mark::fits(&first, 512) && !Mark::fits(&[], 65536));
    }
}
