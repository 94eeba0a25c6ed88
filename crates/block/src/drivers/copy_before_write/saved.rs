//! What has been copied so far, in memory that another process takes over in an upgrade.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::error::OpenError;
use crate::inherited::OpenImage;
use crate::job::{Bitmap, Snapshot};

/// The first bytes of the file.
const MAGIC: &[u8; 8] = b"RMCBW\x001\x00";
/// Bytes before the bits: magic, size, granularity, whether the snapshot is broken.
const HEAD: usize = 32;

/// A file in memory.
pub(super) struct Saved {
    path: PathBuf,
    file: Arc<OwnedFd>,
}

/// What has been copied so far.
pub(super) struct CopyState {
    /// Parts that are not copied yet.
    pub(super) left: Bitmap,
    /// Parts that are kept.
    pub(super) kept: Bitmap,
    /// Whether a write went through to what had not been copied.
    pub(super) broken: bool,
}

impl Saved {
    /// Returns the file's name, for a node of that name.
    pub(super) fn name(node: &str) -> String {
        format!("ringmill-copy-before-write-{node}")
    }

    /// A new file.
    pub(super) fn new(node: &str) -> Result<Saved, OpenError> {
        let name = Saved::name(node);
        let file = memfd_create(name.as_str(), MFdFlags::MFD_CLOEXEC);
        let file = file.map_err(|errno| OpenError::os("memfd_create failed", errno))?;
        Ok(Saved { path: name.into(), file: Arc::new(file) })
    }

    /// A file that another process has written, and what is in it.
    pub(super) fn inherit(
        node: &str,
        file: File,
        size: u64,
    ) -> Result<(Saved, CopyState), OpenError> {
        let failed =
            |error| OpenError::io(format!("node '{node}': what was copied is unknown"), &error);
        let state = read(&file, size).map_err(failed)?;
        Ok((Saved { path: Saved::name(node).into(), file: Arc::new(file.into()) }, state))
    }

    /// Returns the file as one that is handed over.
    pub(super) fn image(&self) -> OpenImage<Arc<OwnedFd>> {
        OpenImage { path: self.path.clone(), fd: self.file.clone(), lock: None }
    }

    /// Writes what has been copied so far.
    pub(super) fn write(&self, snapshot: &Snapshot, kept: &Bitmap) -> io::Result<()> {
        let left = &snapshot.left;
        let numbers = [left.size(), left.granularity(), snapshot.is_broken().into()];
        let words = numbers.into_iter().chain(left.words()).chain(kept.words());
        let bytes: Vec<u8> =
            MAGIC.iter().copied().chain(words.flat_map(u64::to_le_bytes)).collect();
        File::from(self.file.try_clone()?).write_all_at(&bytes, 0)
    }
}

fn read(file: &File, size: u64) -> io::Result<CopyState> {
    let wrong = || io::Error::from(io::ErrorKind::InvalidData);
    let mut head = [0; HEAD];
    file.read_exact_at(&mut head, 0)?;
    let (magic, numbers) = head.as_chunks::<8>().0.split_first().ok_or_else(wrong)?;
    let [of, granularity, broken] =
        [0, 1, 2].map(|n| numbers.get(n).map(|n| u64::from_le_bytes(*n)));
    let granularity = granularity.filter(|bytes| bytes.is_power_of_two()).ok_or_else(wrong)?;
    if magic != MAGIC || of != Some(size) {
        return Err(wrong());
    }
    let mut at = HEAD as u64;
    let mut bitmap = || {
        let bitmap = Bitmap::new(size, granularity, false);
        let mut bytes = vec![0; bitmap.words().count() * 8];
        file.read_exact_at(&mut bytes, at)?;
        at += bytes.len() as u64;
        bitmap.set_words(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
        Ok::<_, io::Error>(bitmap)
    };
    Ok(CopyState { left: bitmap()?, kept: bitmap()?, broken: broken != Some(0) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{OnCbwError, What};

    #[test]
    fn another_process_reads_what_was_written() {
        let size = 100 * 65536 + 512;
        let (left, kept) = (Bitmap::new(size, 65536, true), Bitmap::new(size, 65536, false));
        left.clear(7..9);
        kept.set(0, 8 * 65536);
        let snapshot = Snapshot::new(left, OnCbwError::BreakSnapshot, What::All(1));
        snapshot.set_broken();
        let saved = Saved::new("n").unwrap();
        saved.write(&snapshot, &kept).unwrap();
        let file = || File::from(saved.file.try_clone().unwrap());
        let (_, state) = Saved::inherit("n", file(), size).unwrap();
        assert!(state.broken && state.left.words().eq(snapshot.left.words()));
        assert!(state.kept.words().eq(kept.words()) && state.left.granularity() == 65536);
        assert!(Saved::inherit("n", file(), size - 512).is_err(), "of another disk");
        file().set_len(40).unwrap();
        assert!(Saved::inherit("n", file(), size).is_err(), "cut short");
    }
}
