//! Journals of qcow2 images. They survive a kill, and not a power cut. This parser shares nothing with the
//! driver.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{NodeRegistry, OpenImage};

use crate::common::tmpfs;
use crate::power::guest::SECTOR;
use crate::power::oracle::Stored;

/// Of a journal: the numbers of the last commit, and of the last one of which all is in the image.
const COMMITTED: usize = 64;
const WRITTEN: usize = 72;
/// The inode of the image's file.
const INODE: u64 = 88;
/// Where slots begin: the number of a sector, that of the commit, and the sector.
const SLOTS: usize = 4096;
const SLOT: usize = 16 + SECTOR;
/// In the number of a sector: it is not metadata any more.
const FORGOTTEN: u64 = 1 << 63;
/// Of a journal: both numbers once more, by a version that knows files of bitmaps.
const AGAIN: usize = 96;
/// Of a file of a bitmap: its state, the size of the disk, the bytes of a part, the name. Bits begin behind the header.
const STATE: usize = 48;
const SIZE: usize = 64;
const GRANULARITY: usize = 72;
const NAME_LEN: usize = 96;
const NAME: usize = 104;
const BITS: usize = 4096;

/// A folder for journals, removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Creates a folder.
    pub(crate) fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Folder(tmpfs().join(format!("ringmill-power-journals-{process}-{number}")))
    }

    /// A registry for a process with these journals.
    pub(crate) fn registry(&self) -> NodeRegistry {
        NodeRegistry::new().with_journals(&self.0).expect("a folder in memory")
    }

    /// The same for a process that takes an image over.
    pub(crate) fn registry_with_journals(&self) -> NodeRegistry {
        let mut registry = self.registry();
        for entry in std::fs::read_dir(&self.0).unwrap() {
            let path = entry.unwrap().path();
            let fd = File::options().read(true).write(true).open(&path).unwrap().into();
            registry.inherit_image(OpenImage { path, fd, lock: None });
        }
        registry
    }

    /// The folder after a kill of its process, without locks.
    pub(crate) fn left(&self) -> Folder {
        let left = Folder::new();
        DirBuilder::new().mode(0o700).create(&left.0).unwrap();
        for entry in std::fs::read_dir(&self.0).unwrap() {
            let entry = entry.unwrap();
            let copy = left.0.join(entry.file_name());
            std::fs::copy(entry.path(), &copy).unwrap();
            if !entry.file_name().to_string_lossy().starts_with("qcow2-") {
                continue;
            }
            // A copy of the image is in another file, so the inode is removed from the journal.
            let copy = File::options().write(true).open(copy).unwrap();
            copy.write_all_at(&[0; 8], INODE).unwrap();
        }
        left
    }

    /// Writes the contents of an image's journal to the image. Returns whether there were any.
    pub(crate) fn replay(&self, image: &mut Vec<u8>) -> Result<bool, String> {
        let Some(Mark { name, id, as_of }) = Mark::of(image) else { return Ok(false) };
        let read = std::fs::read(self.0.join(&name));
        let journal = read.map_err(|error| format!("the image names journal {name}: {error}"))?;
        if !journal.starts_with(b"ringmill qcow2 1") || !journal[16..].starts_with(&id) {
            return Err(format!("the image names {name}, which is no journal of it"));
        }
        let (committed, written) = (word(&journal, COMMITTED), word(&journal, WRITTEN));
        if !(written..=committed + 1).contains(&as_of) {
            return Ok(false);
        }
        let mut newest: BTreeMap<u64, (u64, &[u8])> = BTreeMap::new();
        for slot in journal.get(SLOTS..).unwrap_or_default().chunks_exact(SLOT) {
            let (number, commit) = (word(slot, 0) & !FORGOTTEN, word(slot, 8));
            let is_newer = newest.get(&number).is_none_or(|(other, _)| *other < commit);
            if (written + 1..=committed).contains(&commit) && is_newer {
                newest.insert(number, (commit, slot));
            }
        }
        for (number, (_, slot)) in &newest {
            if word(slot, 0) & FORGOTTEN == 0 {
                let at = *number as usize * SECTOR;
                image.resize(image.len().max(at + SECTOR), 0);
                image[at..at + SECTOR].copy_from_slice(&slot[16..]);
            }
        }
        Ok(!newest.is_empty())
    }
}

impl Folder {
    /// The bitmaps that a killed process has left beside the journal of an image, with a disk of `size` bytes. Those of
    /// the image are `stored`. Returns also how many are right that are not so in the image.
    pub(crate) fn with_kept(
        &self,
        image: &[u8],
        stored: Vec<Stored>,
        size: usize,
    ) -> (Vec<Stored>, usize) {
        let (mut all, mut right) = (stored, 0);
        let Some(Mark { name, as_of, .. }) = Mark::of(image) else { return (all, 0) };
        let Ok(journal) = std::fs::read(self.0.join(&name)) else { return (all, 0) };
        let (committed, written) = (word(&journal, COMMITTED), word(&journal, WRITTEN));
        let is_known = journal.get(AGAIN..AGAIN + 16) == journal.get(COMMITTED..COMMITTED + 16);
        if !is_known || !(written..=committed + 1).contains(&as_of) {
            return (all, 0);
        }
        let prefix = name.replace("qcow2-", "bitmap-");
        for entry in std::fs::read_dir(&self.0).unwrap() {
            let entry = entry.unwrap();
            if !entry.file_name().to_string_lossy().starts_with(&prefix) {
                continue;
            }
            let file = std::fs::read(entry.path()).unwrap();
            let granularity = word(&file, GRANULARITY) as usize;
            let name_len = word(&file, NAME_LEN) as usize;
            let name = String::from_utf8(file[NAME..NAME + name_len].to_vec()).unwrap();
            // Others may lack writes, or are lent to another process.
            if ![1, 2].contains(&word(&file, STATE)) || word(&file, SIZE) != size as u64 {
                continue;
            }
            let len = size.div_ceil(granularity).div_ceil(64) * 8;
            let mut bits = file[BITS..BITS + len].to_vec();
            if word(&file, STATE) == 2 {
                // Those that were taken.
                bits.iter_mut().zip(&file[BITS + len..]).for_each(|(bit, taken)| *bit |= taken);
            }
            let kept = Stored { name, in_use: false, granularity, bits };
            match all.iter_mut().find(|stored| stored.name == kept.name) {
                Some(stored) if stored.in_use && stored.granularity == granularity => {
                    *stored = kept
                }
                Some(_) => continue,
                None => all.push(kept),
            }
            right += 1;
        }
        (all, right)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether an image names a journal.
pub(crate) fn is_marked(image: &[u8]) -> bool {
    Mark::of(image).is_some()
}

/// The mark in an image that names a journal.
struct Mark {
    /// The journal's name.
    name: String,
    /// The journal's first bytes.
    id: [u8; 32],
    /// The number of the image's last commit.
    as_of: u64,
}

impl Mark {
    /// That of an image that says it lacks something.
    fn of(image: &[u8]) -> Option<Mark> {
        let version = u32::from_be_bytes(*image.get(4..)?.first_chunk()?);
        if version < 3 || image.get(79)? & 1 == 0 {
            return None;
        }
        let cluster = 1usize << image.get(23)?;
        let sector = image.get(cluster.checked_sub(SECTOR)?..cluster)?;
        let rest = sector.strip_prefix(b"ringmill journal")?;
        let (id, as_of) = (*rest.first_chunk::<32>()?, *rest[32..].first_chunk()?);
        let digits: String = id[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        Some(Mark { name: format!("qcow2-{digits}"), id, as_of: u64::from_be_bytes(as_of) })
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*bytes[at..].first_chunk().expect("eight bytes"))
}
