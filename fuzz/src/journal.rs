//! The journal of a killed daemon for a qcow2 image's metadata: torn, corrupted, or arbitrary.
//!
//! The first byte selects the kind, whether the image is opened read-only, and the number of requests of six bytes
//! each. The rest is the journal. A journal does not prove that its sectors are right, so they may contain
//! anything. But nothing else in the image may change, and a refused journal changes nothing. The process with
//! the image is then killed too, and the image is opened again.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::node::BlockNode;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::EventLoop;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::input::Input;
use crate::qcow2;
use crate::requests;
use crate::world;

const SECTOR: usize = 512;
const CLUSTER: usize = 4096;
/// First bytes of a journal. The name and the boot from the image's mark follow.
const MAGIC: &[u8; 16] = b"ringmill qcow2 1";
const MARK: &[u8; 16] = b"ringmill journal";
/// Where a journal has the last commit, the last one that is in the image, whether an image may name it, and the
/// inode of the image's file.
const COMMITTED: usize = 64;
const WRITTEN: usize = 72;
const NAMED: usize = 80;
const INODE: usize = 88;
/// Where slots begin: the number of a sector, that of the commit, and the sector.
const SLOTS: usize = 4096;
const SLOT: usize = 16 + SECTOR;
/// In the number of a sector: it is not metadata any more.
const FORGOTTEN: u64 = 1 << 63;
/// From here on there is no sector.
const MOST: u64 = i64::MAX as u64 / SECTOR as u64;
/// Where the image's mark says up to which commit the image is.
const AS_OF: usize = CLUSTER - SECTOR + 48;
/// Bytes of an image that are looked at, at most; one that is longer has holes.
const LOOKED_AT: u64 = 1 << 20;

/// Of the first byte.
const REQUESTS: u8 = 0x1f;
const READ_ONLY: u8 = 0x20;

/// An image, and the files that lie in the folder of journals.
type Left = (Vec<u8>, Vec<(PathBuf, Vec<u8>)>);

struct World {
    event_loop: EventLoop,
    file: File,
    folder: Folder,
    /// The image of a killed daemon.
    image: Vec<u8>,
    journal: Vec<u8>,
    path: PathBuf,
    /// The image with the contents of the journal.
    whole: Vec<u8>,
}

/// Gone with its value.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The expected result of opening.
enum Expected<'a> {
    /// There is none for it.
    Nothing,
    /// It is refused.
    Refused,
    /// The image gets these sectors; `None`: the sector stays as it is.
    Sectors(BTreeMap<u64, Option<&'a [u8]>>),
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn put(bytes: &mut [u8], at: usize, number: u64) {
    bytes[at..at + 8].copy_from_slice(&number.to_ne_bytes());
}

/// The number of a commit, or of a sector: a small one as a rule.
fn number(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        255 => input.u64(),
        254 => u64::from(input.u32()),
        few => few.into(),
    }
}

impl World {
    fn new() -> Self {
        let file = File::from(memfd_create(c"image", MFdFlags::empty()).expect("a memfd"));
        let folder = Folder(world::own_path("journals"));
        let _ = std::fs::remove_dir_all(&folder.0);
        DirBuilder::new().mode(0o700).create(&folder.0).expect("a folder");
        let image = CreateQcow2 { cluster_size: CLUSTER as u32, ..CreateQcow2::new(4 << 20) };
        create_qcow2(Path::new(&world::path_of(&file)), &image).expect("an image");
        let (event_loop, path) = (world::quiet_loop(), PathBuf::new());
        let (image, journal, whole) = (Vec::new(), Vec::new(), Vec::new());
        let mut world = World { event_loop, file, folder, image, journal, path, whole };
        let node = world.try_open(false).expect("a new image");
        // A cluster each of two L2 tables, and a flush; then others of both, zeroes, and a discard.
        let steps: [[u8; 6]; 7] = [
            [2 | 64, 7, 0, 0, 0, 0],
            [2 | 64, 7, 0, 16, 0, 0],
            [6 | 64, 0, 0, 0, 0, 0],
            [2 | 64, 15, 16, 0, 0, 0],
            [5 | 16 | 64, 7, 0, 0, 0, 0],
            [4 | 64, 7, 0, 16, 0, 0],
            [2 | 64, 7, 8, 17, 0, 0],
        ];
        requests::ask(&world.event_loop, &node, steps.as_flattened());
        let (image, mut journals) = world.leave().expect("it is small");
        drop(node);
        (world.image, world.whole) = (image.clone(), image);
        (world.path, world.journal) = journals.pop().expect("it has a journal");
        let inode = world.inode();
        let Expected::Sectors(sectors) = expected(&world.image, Some(&world.journal), inode) else {
            panic!("its journal is not its journal");
        };
        for (number, sector) in sectors {
            let at = number as usize * SECTOR;
            world.whole.resize(world.whole.len().max(at + SECTOR), 0);
            world.whole[at..at + SECTOR].copy_from_slice(sector.expect("nothing has moved"));
        }
        world
    }

    fn inode(&self) -> u64 {
        self.file.metadata().expect("it is ours").ino()
    }

    fn try_open(&self, read_only: bool) -> Option<Arc<dyn BlockNode>> {
        let options = qcow2::options(world::path_of(&self.file), read_only);
        let registry = NodeRegistry::new().with_journals(&self.folder.0);
        registry.expect("a folder of our own").open(&options).ok()
    }

    /// The state after a kill at this moment. `None`: too large to check.
    fn leave(&self) -> Option<Left> {
        let journals = std::fs::read_dir(&self.folder.0).expect("it is ours").map(|entry| {
            let path = entry.expect("it is there").path();
            let journal = std::fs::read(&path).expect("it is ours");
            (path, journal)
        });
        let journals = journals.collect();
        let len = self.file.metadata().expect("it is ours").len();
        (len <= 16 * LOOKED_AT).then(|| (self.first(len), journals))
    }

    fn put(&self, (image, journals): &Left) {
        for entry in std::fs::read_dir(&self.folder.0).expect("it is ours") {
            std::fs::remove_file(entry.expect("it is there").path()).expect("it is ours");
        }
        for (path, journal) in journals {
            std::fs::write(path, journal).expect("it fits");
        }
        self.file.set_len(0).and_then(|()| self.file.write_all_at(image, 0)).expect("it fits");
    }

    fn first(&self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let mut done = 0;
        while let Ok(n @ 1..) = self.file.read_at(&mut bytes[done..], done as u64) {
            done += n;
        }
        bytes
    }

    /// Opens that state. Only the sectors of the journal may change in the image.
    fn open(&self, left: &Left, read_only: bool) -> Option<Arc<dyn BlockNode>> {
        self.put(left);
        let (image, journals) = left;
        // A mark of another boot is a power cut's.
        let mark = mark_of(image).filter(|mark| self.journal[32..48] == mark.id[16..]);
        let name = mark.map(|mark| self.folder.0.join(mark.name()));
        let journal = journals.iter().find(|(path, _)| Some(path) == name.as_ref());
        let journal = journal.map(|(_, journal)| &journal[..]);
        let expected = expected(image, journal, self.inode());
        let node = self.try_open(read_only);
        let mut wanted = image.clone();
        wanted.resize(wanted.len().max(LOOKED_AT as usize), 0);
        let mut found = self.first(LOOKED_AT.max(image.len() as u64));
        if read_only {
            assert!(found == wanted, "an image has changed that is only read");
            return node;
        }
        // The header and the mark.
        let mark = mark_of(image).map_or(0, |mark| mark.place);
        let mut forget = |number: usize, found: &mut [u8]| {
            let sector = number * SECTOR..(number + 1) * SECTOR;
            if let (Some(found), Some(wanted)) =
                (found.get_mut(sector.clone()), wanted.get_mut(sector))
            {
                found.copy_from_slice(wanted);
            }
        };
        match expected {
            Expected::Refused => assert!(node.is_none(), "a journal that is none"),
            Expected::Nothing => [0, mark].into_iter().for_each(|at| forget(at, &mut found)),
            Expected::Sectors(sectors) => {
                [0, mark].into_iter().for_each(|at| forget(at, &mut found));
                for (number, sector) in sectors {
                    if let Some(sector) = sector
                        && node.is_some()
                        && ![0, mark as u64].contains(&number)
                    {
                        let mut there = [0; SECTOR];
                        let read = self.file.read_exact_at(&mut there, number * SECTOR as u64);
                        assert!(read.is_ok() && there == *sector, "sector {number} is lost");
                    }
                    forget(usize::try_from(number).expect("64 bits"), &mut found);
                }
            }
        }
        let other = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
        assert!(other.is_none(), "byte {other:?} has changed");
        node
    }

    /// Creates an image and a journal from the rest of the input.
    fn make(&self, how: u8, rest: &[u8]) -> Left {
        let (mut image, mut journal) = (self.image.clone(), self.journal.clone());
        let mut input = Input::new(rest);
        match how >> 6 {
            0 => self.build(&mut input, &mut image, &mut journal),
            1 => {
                // The one that was left, torn and rotten.
                let written = word(&self.journal, WRITTEN).unwrap_or_default();
                let as_of = written.wrapping_add(number(&mut input));
                image[AS_OF..AS_OF + 8].copy_from_slice(&as_of.to_be_bytes());
                if let len @ 1.. = usize::from(input.u16()) {
                    journal.truncate(len);
                }
                while !input.is_empty() {
                    let (at, byte) = (usize::from(input.u16()), input.u8());
                    journal.get_mut(at).into_iter().for_each(|there| *there = byte);
                }
            }
            2 => {
                journal.truncate(SLOTS);
                [COMMITTED, WRITTEN, NAMED, INODE]
                    .into_iter()
                    .for_each(|at| put(&mut journal, at, input.u64()));
                journal.extend_from_slice(rest.get(32..).unwrap_or_default());
            }
            _ => journal = rest.to_vec(),
        }
        (image, vec![(self.path.clone(), journal)])
    }

    /// Slot by slot, of sectors of the image as it is or is to be, with changes.
    fn build(&self, input: &mut Input<'_>, image: &mut [u8], journal: &mut Vec<u8>) {
        journal.truncate(SLOTS);
        put(journal, COMMITTED, number(input));
        put(journal, WRITTEN, number(input));
        image[AS_OF..AS_OF + 8].copy_from_slice(&number(input).to_be_bytes());
        while !input.is_empty() {
            let kind = input.u8();
            let (number, commit) = (number(input), number(input));
            let at = usize::try_from(number).ok().and_then(|number| number.checked_mul(SECTOR));
            let of = if kind & 1 == 0 { &self.whole } else { &self.image };
            let there = at.and_then(|at| of.get(at..)?.first_chunk::<SECTOR>());
            let mut sector = there.copied().unwrap_or([0; SECTOR]);
            let tag = if kind & 6 == 6 { number | FORGOTTEN } else { number };
            // Entries of tables: where to, and flags; or any eight bytes.
            for _ in 0..kind >> 4 {
                let at = usize::from(input.u8() & 63) * 8;
                let entry = match kind & 8 {
                    0 => {
                        let (cluster, flags) = (u64::from(input.u8()), u64::from(input.u8()));
                        (cluster * CLUSTER as u64) | ((flags >> 6) << 62) | (flags & 63)
                    }
                    _ => input.u64(),
                };
                sector[at..at + 8].copy_from_slice(&entry.to_be_bytes());
            }
            journal.extend_from_slice(&tag.to_ne_bytes());
            journal.extend_from_slice(&commit.to_ne_bytes());
            journal.extend_from_slice(&sector);
        }
    }

    fn play(&self, how: u8, steps: &[u8], rest: &[u8]) {
        let read_only = how & READ_ONLY != 0;
        let Some(node) = self.open(&self.make(how, rest), read_only) else { return };
        requests::ask(&self.event_loop, &node, steps);
        let left = self.leave().filter(|_| !read_only);
        drop(node);
        let again = left.and_then(|left| self.open(&left, false));
        again.iter().for_each(|node| requests::ask(&self.event_loop, node, steps));
    }
}

/// What an image says of its journal.
struct Mark<'a> {
    /// Name and boot.
    id: &'a [u8; 32],
    as_of: u64,
    /// The sector that says so.
    place: usize,
}

impl Mark<'_> {
    fn name(&self) -> String {
        let digits = self.id[..16].iter().map(|byte| format!("{byte:02x}"));
        format!("qcow2-{}", digits.collect::<String>())
    }
}

/// That of an image that says it lacks something.
fn mark_of(image: &[u8]) -> Option<Mark<'_>> {
    if image.get(4..8)? != [0, 0, 0, 3] || image.get(79)? & 1 == 0 {
        return None;
    }
    let bits = image.get(20..24).filter(|bits| bits[..3] == [0; 3])?[3];
    let place = (1usize << Some(bits).filter(|bits| (12..=21).contains(bits))?) / SECTOR - 1;
    let sector = image.get(place * SECTOR..)?.first_chunk::<SECTOR>()?;
    let (id, rest) = sector.strip_prefix(MARK)?.split_first_chunk()?;
    let (as_of, rest) = rest.split_first_chunk()?;
    let as_of = u64::from_be_bytes(*as_of);
    rest.iter().all(|byte| *byte == 0).then_some(Mark { id, as_of, place })
}

/// By the journal that it names.
fn expected<'a>(image: &[u8], journal: Option<&'a [u8]>, inode: u64) -> Expected<'a> {
    let (Some(mark), Some(journal)) = (mark_of(image), journal) else { return Expected::Nothing };
    // One that no image is said to name is swept away.
    if word(journal, NAMED).is_none_or(|named| named == 0) {
        return Expected::Nothing;
    }
    let begins = journal.starts_with(MAGIC) && journal[MAGIC.len()..].starts_with(mark.id);
    let commits = (word(journal, COMMITTED), word(journal, WRITTEN));
    let (true, (Some(committed), Some(written))) = (begins, commits) else {
        return Expected::Refused;
    };
    if committed > u64::MAX / 2 {
        return Expected::Refused;
    }
    if !(written..=committed.saturating_add(1)).contains(&mark.as_of) {
        return Expected::Nothing;
    }
    if word(journal, INODE).is_some_and(|of| ![0, inode].contains(&of)) {
        return Expected::Refused;
    }
    let mut newest: BTreeMap<u64, (u64, Option<&[u8]>)> = BTreeMap::new();
    for slot in journal.get(SLOTS..).unwrap_or_default().chunks_exact(SLOT) {
        let (Some(tag), Some(commit)) = (word(slot, 0), word(slot, 8)) else { continue };
        if commit <= written || commit > committed {
            continue;
        }
        let number = tag & !FORGOTTEN;
        if number >= MOST {
            return Expected::Refused;
        }
        if newest.get(&number).is_none_or(|(other, _)| *other <= commit) {
            newest.insert(number, (commit, (tag == number).then_some(&slot[16..])));
        }
    }
    Expected::Sectors(newest.into_iter().map(|(number, (_, sector))| (number, sector)).collect())
}

thread_local! {
    static WORLD: World = World::new();
}

/// Opens the image, uses it, and opens it again.
pub fn run(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else { return };
    let requests = usize::from(how & REQUESTS);
    let (steps, rest) = rest.split_at(rest.len().min(requests * 6));
    WORLD.with(|world| world.play(*how, steps, rest));
}
