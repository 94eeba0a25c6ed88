//! What a process keeps of an image's metadata for the one after it, should it be killed.
//!
//! Metadata waits in memory for a flush ([`metadata`](super::metadata)), where a process that is killed leaves it. What the guest
//! was told is written must not go with it, as the guest lives on. So before a write is answered, the
//! sectors that it has changed go to a file in memory, which is there until the machine ends: a copy, without
//! any waiting for a disk. Who opens the image next finds the file by a [mark](super::marker) in the image,
//! and writes what is there to the image, in the order in which a flush would.
//!
//! A journal is a header and slots. A slot holds a sector as of some commit. Of those with the same number
//! the highest commit counts, if that was finished, and what it has is not in the image yet. So a
//! commit is one write, of its number, after the slots; and a flush is one, too.

mod folder;
mod slots;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::fstat;

use self::folder::Folder;
pub(super) use self::folder::Found;
pub(crate) use self::folder::Journals;
pub(super) use self::folder::name;
use self::slots::{Run, Slot, Slots};
use super::marker::Mark;
use super::steps::SECTOR;
use crate::inherited::OpenImage;

/// What a journal begins with; the mark follows.
const MAGIC: &[u8; 16] = b"ringmill qcow2 1";
/// Where its header has the last commit that was finished, the last of which all is in the image, whether an
/// image may be marked with it, and the inode of the image's file, or 0.
const COMMITS: u64 = 64;
const NAMED: u64 = COMMITS + 16;
const INODE: u64 = NAMED + 8;
/// Nobody makes more commits: a journal that says so has rotted. As many again can be counted.
const MOST_COMMITS: u64 = u64::MAX / 2;
/// Where slots begin.
const SLOTS: usize = 4096;
/// Slots that an empty journal keeps.
const KEPT: usize = 2048;

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A journal, and who has it is the only one.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    folder: Arc<Folder>,
    mark: Mark,
    slots: Slots,
    committed: u64,
    written: u64,
}

impl Journal {
    /// What the image has to be marked with.
    pub(super) fn mark(&self) -> &Mark {
        &self.mark
    }

    /// The last commit.
    pub(super) fn committed(&self) -> u64 {
        self.committed
    }

    /// Keeps sectors, all of them or, should the process be killed, none. `None`: no metadata any more.
    ///
    /// # Errors
    ///
    /// Those of pwrite(2); somebody has removed the file. The journal must not be used any more.
    pub(super) fn commit<'a>(
        &mut self,
        sectors: impl Iterator<Item = (u64, Option<&'a [u8; SECTOR]>)>,
    ) -> io::Result<()> {
        if fstat(&self.file)?.st_nlink == 0 {
            return Err(io::Error::other("the journal file has been removed"));
        }
        let commit = self.next();
        let mut run = Run::default();
        let mut superseded = Vec::new();
        for (number, sector) in sectors {
            let old = self.slots.of.get(&number).copied();
            if sector.is_none() && old.is_none() {
                continue;
            }
            let slot = self.slots.take();
            self.slots.of.insert(number, Slot { slot, commit });
            superseded.extend(old.map(|old| old.slot));
            run.add(&self.file, slot, number, commit, sector)?;
        }
        if run.bytes.is_empty() {
            return Ok(());
        }
        run.write(&self.file)?;
        self.committed = commit;
        self.write_commits()?;
        self.slots.free.append(&mut superseded);
        Ok(())
    }

    /// All that was kept up to a commit is in the image.
    pub(super) fn written(&mut self, commit: u64) -> io::Result<()> {
        if commit <= self.written {
            return Ok(());
        }
        self.written = commit;
        self.write_commits()?;
        self.slots.give_up(commit);
        if self.slots.of.is_empty() && self.slots.all > KEPT {
            self.slots = Slots::default();
            self.file.set_len(SLOTS as u64)?;
        }
        Ok(())
    }

    /// The commit as of which the image is once this is made void.
    pub(super) fn next(&self) -> u64 {
        self.committed + 1
    }

    /// Nothing is to be found in it any more, nor what an unfinished commit has left.
    pub(super) fn make_void(&mut self) -> io::Result<()> {
        self.committed = self.next();
        self.written(self.committed)
    }

    /// Whether an image may be marked with it, from now on.
    pub(super) fn set_named(&self, named: bool) -> io::Result<()> {
        self.file.write_all_at(&u64::from(named).to_ne_bytes(), NAMED)
    }

    /// Its file, for a process that goes on with it. Whoever has that has the lock as well.
    pub(super) fn file(&self) -> io::Result<OpenImage<Arc<OwnedFd>>> {
        let path = self.folder.path.join(name(&self.mark));
        Ok(OpenImage { path, fd: Arc::new(self.file.try_clone()?.into()), lock: None })
    }

    fn write_commits(&self) -> io::Result<()> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.committed.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.written.to_ne_bytes());
        self.file.write_all_at(&bytes, COMMITS)
    }

    /// It is not needed any more.
    pub(super) fn remove(self) {
        let name = name(&self.mark);
        if let Err(errno) = self.folder.remove(&name) {
            let path = self.folder.path.join(name);
            log::warn!("{}: could not be removed: {errno}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::PathBuf;

    use nix::unistd::geteuid;

    use super::slots::SLOT;
    use super::*;
    use crate::drivers::qcow2::steps::Sectors;

    struct Folder(PathBuf);

    fn me() -> u32 {
        geteuid().as_raw()
    }

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder =
                std::env::temp_dir().join(format!("ringmill-{name}-{}", std::process::id()));
            Folder(folder)
        }

        /// Whose the folder is, and what lies in it.
        fn owners(&self) -> Vec<u32> {
            let in_it = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
            let paths = [self.0.clone()].into_iter().chain(in_it);
            paths.map(|path| std::fs::metadata(path).unwrap().uid()).collect()
        }

        fn journals(&self) -> Journals {
            Journals::in_folder(&self.0, me()).unwrap()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn find(journals: &Journals, mark: &Mark, as_of: u64) -> (Journal, Sectors) {
        match journals.find(mark, as_of, None, false).unwrap() {
            Found::Left(Some(journal), sectors) => (journal, sectors),
            found => panic!("{found:?}"),
        }
    }

    fn found(journals: &Journals, mark: &Mark, as_of: u64) -> Vec<(u64, u8)> {
        let (_, sectors) = find(journals, mark, as_of);
        sectors.iter().map(|(number, sector)| (*number, sector[0])).collect()
    }

    #[test]
    fn what_was_committed_is_found_and_what_was_written_is_not() {
        let folder = Folder::new("journal");
        let journals = folder.journals();
        let mut journal = journals.create(None).unwrap();
        let mark = journal.mark().clone();
        assert!(matches!(journals.find(&mark, 0, None, false), Ok(Found::InUse)));
        let sector = |byte: u8| [byte; SECTOR];
        journal.commit([(1, Some(&sector(1))), (7, Some(&sector(2)))].into_iter()).unwrap();
        journal.commit([(7, Some(&sector(3))), (9, Some(&sector(4)))].into_iter()).unwrap();
        let second = journal.committed();
        drop(journal);
        assert_eq!(found(&journals, &mark, 0), [(1, 1), (7, 3), (9, 4)]);

        let (mut journal, _) = find(&journals, &mark, 0);
        journal.commit([(1, None), (5, None), (9, Some(&sector(5)))].into_iter()).unwrap();
        drop(journal);
        // While the second commit is being written, the image may be as of that already.
        assert_eq!(found(&journals, &mark, second), [(7, 3), (9, 5)]);

        let (mut journal, _) = find(&journals, &mark, 0);
        journal.written(second).unwrap();
        drop(journal);
        assert_eq!(found(&journals, &mark, second), [(9, 5)]);
        // An image that is older than what was written, or newer than what was committed, is another one.
        assert!(matches!(journals.find(&mark, second - 1, None, false), Ok(Found::Nothing)));
        assert!(matches!(journals.find(&mark, second + 3, None, false), Ok(Found::Nothing)));

        find(&journals, &mark, second).0.remove();
        assert!(matches!(journals.find(&mark, second, None, false), Ok(Found::Nothing)));
    }

    #[test]
    fn it_is_not_for_a_copy_and_not_in_use_by_who_only_looks() {
        let folder = Folder::new("journal-copy");
        let journals = folder.journals();
        let mut journal = journals.create(Some(7)).unwrap();
        let mark = journal.mark().clone();
        journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).unwrap();
        drop(journal);
        let find = |inode, for_a_look| journals.find(&mark, 0, inode, for_a_look).unwrap();
        assert!(matches!(find(Some(8), false), Found::OfAnother));
        let looks = [Some(7), None].map(|inode| find(inode, true));
        assert!(
            looks.iter().all(|look| matches!(look, Found::Left(None, left) if left.len() == 1))
        );
        assert!(matches!(find(Some(7), false), Found::Left(Some(_), _)));
    }

    #[test]
    fn a_commit_that_was_cut_off_counts_for_nothing_now_and_later() {
        let folder = Folder::new("journal-cut");
        let journals = folder.journals();
        let mut journal = journals.create(None).unwrap();
        let mark = journal.mark().clone();
        journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).unwrap();
        // Its slots are there, its number is not.
        journal.commit([(1, Some(&[2; SECTOR])), (2, Some(&[2; SECTOR]))].into_iter()).unwrap();
        journal.committed -= 1;
        journal.write_commits().unwrap();
        drop(journal);
        assert_eq!(found(&journals, &mark, 0), [(1, 1)]);

        let (mut journal, _) = find(&journals, &mark, 0);
        journal.make_void().unwrap();
        let as_of = journal.committed();
        journal.commit([(3, Some(&[3; SECTOR]))].into_iter()).unwrap();
        drop(journal);
        assert_eq!(found(&journals, &mark, as_of), [(3, 3)]);
    }

    #[test]
    fn one_with_more_commits_than_can_be_counted_is_refused() {
        let folder = Folder::new("journal-commits");
        let journals = folder.journals();
        let mut journal = journals.create(None).unwrap();
        journal.committed = u64::MAX;
        journal.write_commits().unwrap();
        let mark = journal.mark().clone();
        drop(journal);
        let refused = journals.find(&mark, 0, None, false).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_nobody_has_and_no_image_names_is_swept_away() {
        let folder = Folder::new("journal-sweep");
        let journals = folder.journals();
        let made = [(); 3].map(|()| journals.create(None).unwrap());
        let marks = made.each_ref().map(|journal| journal.mark().clone());
        let [named, unnamed, used] = made;
        named.set_named(true).unwrap();
        drop((named, unnamed));
        folder.journals();
        let is_there = marks.map(|mark| folder.0.join(name(&mark)).exists());
        assert_eq!(is_there, [true, false, true]);
        drop(used);
    }

    #[test]
    fn what_is_no_file_is_nothing_to_wait_for() {
        let folder = Folder::new("journal-pipe");
        let (journals, mark) = (folder.journals(), Mark::new().unwrap());
        let path = folder.0.join(name(&mark));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(journals.find(&mark, 0, None, false).is_err());
        drop(folder.journals());
        assert!(path.exists());
    }

    #[test]
    fn one_that_somebody_has_removed_keeps_nothing() {
        let folder = Folder::new("journal-removed");
        let mut journal = folder.journals().create(None).unwrap();
        std::fs::remove_dir_all(&folder.0).unwrap();
        assert!(journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).is_err());
    }

    #[test]
    fn one_that_was_large_becomes_small() {
        let folder = Folder::new("journal-large");
        let mut journal = folder.journals().create(None).unwrap();
        let sector = [1; SECTOR];
        journal.commit((0..KEPT as u64 + 1).map(|number| (number, Some(&sector)))).unwrap();
        journal.written(journal.committed()).unwrap();
        assert_eq!(journal.file.metadata().unwrap().len(), SLOTS as u64);
        journal.commit([(1, Some(&sector))].into_iter()).unwrap();
        assert_eq!(journal.file.metadata().unwrap().len(), (SLOTS + SLOT) as u64);
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let folder = Folder::new("journal-open");
        std::fs::create_dir(&folder.0).unwrap();
        std::fs::set_permissions(&folder.0, Permissions::from_mode(0o777)).unwrap();
        assert!(Journals::in_folder(&folder.0, me()).is_err());
        let link = Folder::new("journal-link");
        std::fs::set_permissions(&folder.0, Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(&folder.0, &link.0).unwrap();
        assert!(Journals::in_folder(&link.0, me()).is_err());
        assert!(Journals::in_folder(&folder.0, me()).is_ok());
        std::fs::remove_file(&link.0).unwrap();
    }

    /// Whom the process becomes gets the folder, with what it had before; nobody else's is taken for it.
    #[test]
    fn a_folder_is_given_to_the_user_that_the_process_becomes() {
        const USER: u32 = 65533;
        let folder = Folder::new("journal-user");
        let mut left = folder.journals().create(None).unwrap();
        left.set_named(true).unwrap();
        left.commit([(1, Some(&[1; SECTOR]))].into_iter()).unwrap();
        if me() != 0 {
            // Only root can.
            let refused = Journals::in_folder(&folder.0, USER).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            return;
        }
        let journals = Journals::in_folder(&folder.0, USER).unwrap();
        let made = journals.create(None).unwrap();
        assert_eq!(folder.owners(), [USER; 3]);
        made.remove();
        // It is that user's from then on, and nobody else's.
        drop(Journals::in_folder(&folder.0, USER).unwrap());
        assert!(Journals::in_folder(&folder.0, USER + 1).is_err());
        assert!(Journals::in_folder(&folder.0, me()).is_err());
        // The user has another folder come up by that name: nothing is made there.
        let moved = Folder::new("journal-moved");
        std::fs::rename(&folder.0, &moved.0).unwrap();
        std::fs::create_dir(&folder.0).unwrap();
        let made = journals.create(None).unwrap();
        assert_eq!((folder.owners(), moved.owners()), (vec![0], vec![USER; 3]));
        made.remove();
        assert_eq!(moved.owners(), [USER; 2]);
    }
}
