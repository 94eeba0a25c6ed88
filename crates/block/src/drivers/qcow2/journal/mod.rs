//! A journal: changes of an image's metadata that survive a kill of the process.
//!
//! Metadata stays in memory until a flush ([`metadata`](super::metadata)), so a killed process would lose it. But
//! the guest lives on and has been told that its writes are done. So before a write is answered, the
//! changed sectors are copied to a file in memory, which exists until the machine stops. No request waits for
//! a disk. The process that opens the image next finds the file by a [mark](super::marker) in the image,
//! and writes its contents to the image in the order of a flush.
//!
//! A journal has a header and slots. A slot has the contents of a sector at some commit. Among slots with the
//! same sector the highest finished commit counts, unless the image has it already. So a
//! commit is one write of its number after the slots, and the end of a flush is one write too.

mod elsewhere;
mod folder;
mod kept;
mod left;
mod of_image;
mod slots;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::fstat;

pub(super) use self::elsewhere::Elsewhere;
use self::folder::Folder;
pub(super) use self::folder::Found;
pub(crate) use self::folder::Journals;
pub(super) use self::folder::name;
pub use self::folder::private_folder;
pub(super) use self::kept::{Keeper, KeptFile};
pub use self::left::{JournalState, LeftJournal, left_journals, remove_left_journal};
pub(super) use self::of_image::Superseded;
use self::slots::{JournalSlot, Run, Slots};
use super::marker::Mark;
use super::steps::SECTOR;
use crate::inherited::OpenImage;

/// First bytes of a journal; the mark follows.
const MAGIC: &[u8; 16] = b"ringmill qcow2 1";
/// Place in the header of: the last finished commit, the last commit that is completely in the image, whether an
/// image may have its mark, the inode of the image's file or 0, and the two commits again. Versions that do not know
/// [files of bitmaps](kept) write the first two numbers only. [The image's place](of_image) is behind.
const COMMITS: u64 = 64;
const NAMED: u64 = COMMITS + 16;
const INODE: u64 = NAMED + 8;
const AGAIN: u64 = INODE + 8;
/// More commits never occur: such a number means corruption. As many again can be counted.
const MOST_COMMITS: u64 = u64::MAX / 2;
/// Offset of the slots.
const SLOTS: usize = 4096;
/// Number of slots that an empty journal keeps.
const KEPT: usize = 2048;

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A journal. It has one owner.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    folder: Arc<Folder>,
    mark: Mark,
    slots: Slots,
    committed: u64,
    written: u64,
    /// An image may have its mark.
    named: bool,
    /// That of the image's file, or 0.
    inode: u64,
    /// Found as a version left it that knows files of bitmaps.
    knows_bitmaps: bool,
}

impl Journal {
    /// The mark for the image.
    pub(super) fn mark(&self) -> &Mark {
        &self.mark
    }

    /// The number of the last commit.
    pub(super) fn committed(&self) -> u64 {
        self.committed
    }

    /// Commits sectors: after a kill, all of them are there or none. `None`: no longer metadata.
    ///
    /// # Errors
    ///
    /// As of pwrite(2), or the file was removed. The journal must not be used any more.
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
            self.slots.of.insert(number, JournalSlot { slot, commit });
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

    /// Records that all commits up to this one are in the image.
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

    /// The number that the image has after the journal is made void.
    pub(super) fn next(&self) -> u64 {
        self.committed + 1
    }

    /// Makes all contents void, unfinished commits included.
    pub(super) fn make_void(&mut self) -> io::Result<()> {
        self.committed = self.next();
        self.written(self.committed)
    }

    /// Sets whether an image may have its mark from now on.
    pub(super) fn set_named(&mut self, named: bool) -> io::Result<()> {
        self.named = named;
        self.file.write_all_at(&u64::from(named).to_ne_bytes(), NAMED)
    }

    /// Its file for the process that takes over. The file holds the lock too.
    pub(super) fn file(&self) -> io::Result<OpenImage<Arc<OwnedFd>>> {
        let path = self.folder.path.join(name(&self.mark));
        Ok(OpenImage { path, fd: Arc::new(self.file.try_clone()?.into()), lock: None })
    }

    fn write_commits(&self) -> io::Result<()> {
        let (committed, written) = (self.committed, self.written);
        let words = [committed, written, u64::from(self.named), self.inode, committed, written];
        let mut bytes = [0; 48];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        self.file.write_all_at(&bytes, COMMITS)
    }

    /// Removes a journal that is not needed any more.
    pub(super) fn remove(self) {
        self.folder.discard(name(&self.mark));
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
    use crate::image_place::ImagePlace;

    #[test]
    fn a_taken_name_keeps_no_user_out() {
        let parent = Folder::new("private");
        let at = |name: &str| parent.0.join(name);
        let make = |path: &std::path::Path, mode| {
            std::fs::create_dir(path).unwrap();
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        make(&parent.0, 0o700);
        let found = || private_folder(&parent.0, "r-1", me());
        assert_eq!(found(), at("r-1"));
        make(&at("r-1"), 0o777);
        let own = at(&format!("r-1-{}", std::process::id()));
        assert_eq!(found(), own);
        // Of other processes: one that others reach, one that is no folder, and one of another name.
        make(&at("r-1-1"), 0o777);
        std::os::unix::fs::symlink(&parent.0, at("r-1-2")).unwrap();
        make(&at("r-1-x"), 0o700);
        assert_eq!(found(), own);
        make(&at("r-1-3"), 0o700);
        assert_eq!(found(), at("r-1-3"));
        std::fs::remove_dir(at("r-1")).unwrap();
        assert_eq!(found(), at("r-1-3"), "it is in use");
        make(&at("r-1"), 0o700);
        assert_eq!(found(), at("r-1"));
    }

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

        /// The owners of the folder and its contents.
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
    fn committed_sectors_are_found_and_written_ones_are_not() {
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
        // An image that is older than the last write, or newer than the last commit, is another image.
        assert!(matches!(journals.find(&mark, second - 1, None, false), Ok(Found::Nothing)));
        assert!(matches!(journals.find(&mark, second + 3, None, false), Ok(Found::Nothing)));

        find(&journals, &mark, second).0.remove();
        assert!(matches!(journals.find(&mark, second, None, false), Ok(Found::Nothing)));
    }

    #[test]
    fn a_copy_of_the_image_is_refused_and_a_look_takes_no_lock() {
        let folder = Folder::new("journal-copy");
        let journals = folder.journals();
        let mut journal = journals.create(Some(&ImagePlace::file(7))).unwrap();
        let mark = journal.mark().clone();
        journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).unwrap();
        drop(journal);
        let find = |place: Option<&ImagePlace>, for_a_look| {
            journals.find(&mark, 0, place, for_a_look).unwrap()
        };
        assert!(matches!(find(Some(&ImagePlace::file(8)), false), Found::OfAnother(None)));
        let looks = [Some(&ImagePlace::file(7)), None].map(|place| find(place, true));
        assert!(
            looks.iter().all(|look| matches!(look, Found::Left(None, left) if left.len() == 1))
        );
        assert!(matches!(find(Some(&ImagePlace::file(7)), false), Found::Left(Some(_), _)));
    }

    #[test]
    fn an_unfinished_commit_has_no_effect() {
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
    fn a_journal_with_too_many_commits_is_refused() {
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
    fn journals_without_owner_and_image_are_removed() {
        let folder = Folder::new("journal-sweep");
        let journals = folder.journals();
        let made = [(); 3].map(|()| journals.create(None).unwrap());
        let marks = made.each_ref().map(|journal| journal.mark().clone());
        let [mut named, unnamed, used] = made;
        named.set_named(true).unwrap();
        drop((named, unnamed));
        folder.journals();
        let is_there = marks.map(|mark| folder.0.join(name(&mark)).exists());
        assert_eq!(is_there, [true, false, true]);
        drop(used);
    }

    /// The sandbox forbids I/O threads to remove files, and one of them may be the last owner of a node.
    #[test]
    fn another_thread_leaves_its_journal_to_the_folders_thread() {
        let folder = Folder::new("journal-left");
        let journals = folder.journals();
        let [there, here] = [(); 2].map(|()| journals.create(None).unwrap());
        let files = [&there, &here].map(|journal| folder.0.join(name(journal.mark())));
        let is_there = || files.each_ref().map(|file| file.exists());
        std::thread::spawn(|| there.remove()).join().unwrap();
        here.remove();
        assert_eq!(is_there(), [true, false]);
        journals.remove_left();
        assert_eq!(is_there(), [false, false]);

        let last = journals.create(None).unwrap();
        let file = folder.0.join(name(last.mark()));
        std::thread::spawn(|| last.remove()).join().unwrap();
        drop(journals);
        assert!(!file.exists());
    }

    /// A look for an image's journals reads the headers of others' journals once.
    #[test]
    fn headers_of_other_images_are_read_once() {
        let folder = Folder::new("journal-places");
        let journals = folder.journals();
        let place = ImagePlace::file;
        const MANY: u64 = 1000;
        let other = folder.journals();
        for inode in 0..MANY {
            let journal = other.create(Some(&place(inode))).unwrap();
            journal.set_place(&place(inode)).unwrap();
        }
        let found = |inode| journals.superseded(&place(inode), None).unwrap().len();
        let timed = [MANY, 7, MANY].map(|inode| {
            let begin = std::time::Instant::now();
            (found(inode), begin.elapsed())
        });
        println!("{timed:?}");
        assert_eq!(timed.map(|(found, _)| found), [0, 1, 0]);
        // What another image's journal says is not read again, and what this image's says is.
        for file in std::fs::read_dir(&folder.0).unwrap() {
            let file = std::fs::OpenOptions::new().write(true).open(file.unwrap().path()).unwrap();
            file.write_all_at(&of_image::bytes(&place(MANY)), of_image::PLACE as u64).unwrap();
        }
        assert_eq!([MANY, 7].map(found), [0, 0]);
    }

    #[test]
    fn journals_are_listed_and_removed_unless_their_images_may_need_them() {
        let folder = Folder::new("journal-list");
        let images = Folder::new("journal-images");
        std::fs::create_dir(&images.0).unwrap();
        let journals = folder.journals();
        let image = |name: &str| {
            let path = images.0.join(name);
            // A qcow2 header, in a cluster with a mark.
            let mut bytes = vec![0; 65536];
            bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
            bytes[23] = 16;
            std::fs::write(&path, &bytes).unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            let place = ImagePlace::of(&file, &path).unwrap();
            let mut journal = journals.create(Some(&place)).unwrap();
            journal.set_named(true).unwrap();
            journal.set_place(&place).unwrap();
            journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).unwrap();
            file.write_all_at(&journal.mark().sector(0), 65024).unwrap();
            file.write_all_at(&[1], 79).unwrap();
            std::fs::write(folder.0.join(format!("bitmap-{}-0", journal.mark())), b"x").unwrap();
            (path, journal)
        };
        let states = || {
            let all = left_journals(&folder.0).unwrap();
            let state = |name: &str| {
                let path = images.0.join(name);
                let of = all.iter().find(|journal| journal.image.as_ref() == Some(&path)).unwrap();
                (of.state.clone(), of.name.clone())
            };
            ["used", "needed", "gone", "renamed", "replaced", "repaired"].map(state)
        };
        let (_, used) = image("used");
        for name in ["needed", "gone", "renamed", "replaced", "repaired"] {
            drop(image(name));
        }
        let at = |name: &str| images.0.join(name);
        std::fs::remove_file(at("gone")).unwrap();
        std::fs::rename(at("renamed"), at("aside")).unwrap();
        std::fs::write(at("new"), b"x").unwrap();
        std::fs::rename(at("new"), at("replaced")).unwrap();
        File::options().write(true).open(at("repaired")).unwrap().write_all_at(&[0], 79).unwrap();
        let all = states();
        let expected = [
            JournalState::InUse,
            JournalState::Needed,
            JournalState::Missing,
            JournalState::Unknown("the image has another name now".into()),
            JournalState::Replaced,
            JournalState::Superseded,
        ];
        assert_eq!(all.clone().map(|(state, _)| state), expected);
        let remove = |n: usize, forced| {
            remove_left_journal(&folder.0, &all[n].1, forced).map_err(|error| error.kind())
        };
        let busy = Err(io::ErrorKind::ResourceBusy);
        // An image that is gone may have been moved.
        assert_eq!([0, 1, 2, 3, 4].map(|n| remove(n, false)), [busy; 5]);
        assert_eq!(remove(5, false), Ok(()));
        assert_eq!(remove(5, false), Err(io::ErrorKind::NotFound));
        // By force, but for one in use.
        assert_eq!([1, 2, 3, 4].map(|n| remove(n, true)), [Ok(()); 4]);
        assert_eq!(remove(0, true), busy);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2);
        for name in ["x", "bitmap-x-0", "qcow2-../x", "qcow2-"] {
            let refused = remove_left_journal(&folder.0, name, true).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::NotFound, "{name}");
        }
        drop(used);
    }

    /// A daemon of another service or user had the image open.
    #[test]
    fn a_journal_in_another_folder_is_moved_or_refused() {
        let there = Folder::new("journal-there");
        let here = Folder::new("journal-here");
        let mut journal = there.journals().create(Some(&ImagePlace::file(7))).unwrap();
        let mark = journal.mark().clone();
        journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).unwrap();
        journal.set_named(true).unwrap();
        std::fs::write(there.0.join(format!("bitmap-{mark}-3")), b"bits").unwrap();
        let (one, other) = (there.0.clone(), here.0.clone());
        // The own folder is not another one, and a missing one is none.
        let folders = vec![other, one, "/nowhere/journals".into()];
        let journals = here.journals().besides(Arc::new(move || folders.clone()));
        let find = |for_a_look| {
            journals.find_elsewhere(&mark, 0, Some(&ImagePlace::file(7)), for_a_look).unwrap()
        };
        assert!(matches!(find(false), Elsewhere::Found(_, Found::InUse)));
        drop(journal);
        let looks = find(true);
        assert!(
            matches!(&looks, Elsewhere::Found(at, Found::Left(None, left)) if *at == there.0 && left.len() == 1)
        );
        assert!(there.0.join(name(&mark)).exists());
        // An unfinished copy of a process that was killed as it moved the journal.
        std::fs::write(here.0.join(format!("part-{}", name(&mark))), b"x").unwrap();
        let moved = find(false);
        let Elsewhere::Found(at, Found::Left(Some(journal), left)) = moved else {
            panic!("{moved:?}")
        };
        assert_eq!((at, left.len()), (there.0.clone(), 1));
        drop(journal);
        assert_eq!(std::fs::read_dir(&there.0).unwrap().count(), 0);
        let names = std::fs::read_dir(&here.0).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, [format!("bitmap-{mark}-3"), name(&mark)]);
        assert!(matches!(
            journals.find(&mark, 0, Some(&ImagePlace::file(7)), false),
            Ok(Found::Left(Some(_), _))
        ));
        // Back, into a folder that others may change.
        std::fs::rename(here.0.join(name(&mark)), there.0.join(name(&mark))).unwrap();
        std::fs::set_permissions(&there.0, Permissions::from_mode(0o755)).unwrap();
        let refused = find(false);
        assert!(
            matches!(&refused, Elsewhere::Refused(at, why) if *at == there.0 && why.contains("mode 0755")),
            "{refused:?}"
        );
        std::fs::write(here.0.join("part-x"), b"x").unwrap();
        drop(here.journals());
        assert!(!here.0.join("part-x").exists());
    }

    #[test]
    fn special_files_do_not_block() {
        let folder = Folder::new("journal-pipe");
        let (journals, mark) = (folder.journals(), Mark::new().unwrap());
        let path = folder.0.join(name(&mark));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(journals.find(&mark, 0, None, false).is_err());
        drop(folder.journals());
        assert!(path.exists());
    }

    #[test]
    fn a_removed_journal_refuses_commits() {
        let folder = Folder::new("journal-removed");
        let mut journal = folder.journals().create(None).unwrap();
        std::fs::remove_dir_all(&folder.0).unwrap();
        assert!(journal.commit([(1, Some(&[1; SECTOR]))].into_iter()).is_err());
    }

    #[test]
    fn an_empty_journal_shrinks() {
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
    fn a_folder_that_other_users_can_write_to_is_refused() {
        let folder = Folder::new("journal-open");
        std::fs::create_dir(&folder.0).unwrap();
        std::fs::set_permissions(&folder.0, Permissions::from_mode(0o777)).unwrap();
        let refused = Journals::in_folder(&folder.0, me()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert!(refused.to_string().contains("mode 0777"), "{refused}");
        let link = Folder::new("journal-link");
        std::fs::set_permissions(&folder.0, Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(&folder.0, &link.0).unwrap();
        assert!(Journals::in_folder(&link.0, me()).is_err());
        assert!(Journals::in_folder(&folder.0, me()).is_ok());
        std::fs::remove_file(&link.0).unwrap();
    }

    /// The user that the process changes to gets the folder with its contents. A folder of any other user is refused.
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
        // The folder belongs to that user alone from then on.
        drop(Journals::in_folder(&folder.0, USER).unwrap());
        assert!(Journals::in_folder(&folder.0, USER + 1).is_err());
        assert!(Journals::in_folder(&folder.0, me()).is_err());
        // The user replaces the folder by another: nothing is created there.
        let moved = Folder::new("journal-moved");
        std::fs::rename(&folder.0, &moved.0).unwrap();
        std::fs::create_dir(&folder.0).unwrap();
        let made = journals.create(None).unwrap();
        assert_eq!((folder.owners(), moved.owners()), (vec![0], vec![USER; 3]));
        made.remove();
        assert_eq!(moved.owners(), [USER; 2]);
    }
}
