//! The files of dirty bitmaps that a killed daemon has left beside the journal of a qcow2 image: damaged, or any bytes.
//!
//! The first byte selects the kind, whether both files are for one bitmap, and the number of requests of six bytes each.
//! The rest is for the files. Whatever they are, the image opens. A bitmap is right only if its file could be, and then it
//! has the bits of that file. The image is closed afterwards, and must have the same bitmaps when it is opened again.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::node::BlockNode;
use block::track::Storage;
use block::{CreateQcow2, NodeRegistry, create_qcow2};
use event_loop::EventLoop;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::input::Input;
use crate::qcow2;
use crate::requests;
use crate::world;

const SIZE: u64 = 4 << 20;
const CLUSTER: u32 = 4096;
const NODE: &str = "image";
/// The bitmaps with their granularity: one that the image names, and one that was added since.
const BITMAPS: [(&str, u64); 2] = [("b0", 65536), ("b1", 4096)];

/// Words of a file's header: the state and what follows.
const STATE: usize = 6;
const RECORDING: usize = 7;
const DISK: usize = 8;
const GRANULARITY: usize = 9;
const DEVICE: usize = 11;
const NAME_LEN: usize = 12;
/// Bytes: where the owner's mark is, the name, and the bits.
const MARK: std::ops::Range<usize> = 16..48;
const NAME: usize = 104;
const BITS: usize = 4096;

/// Of the first byte.
const REQUESTS: u8 = 0x1f;
const TWICE: u8 = 0x20;

/// The files in the folder of journals.
type Files = Vec<(PathBuf, Vec<u8>)>;
/// A bitmap of a node: its name, and the granularity, whether it records, and the bits unless they may lack writes.
type Known = (String, Option<(u64, bool, Vec<u8>)>);

struct World {
    event_loop: EventLoop,
    file: File,
    folder: Folder,
    /// The image of a killed daemon, its journal, and the files of its bitmaps.
    image: Vec<u8>,
    journal: (PathBuf, Vec<u8>),
    kept: Files,
}

/// Gone with its value.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn word(bytes: &[u8], word: usize) -> u64 {
    let word = bytes.get(word * 8..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

impl World {
    fn new() -> Self {
        let file = File::from(memfd_create(c"image", MFdFlags::empty()).expect("a memfd"));
        let folder = Folder(world::own_path("kept"));
        let _ = std::fs::remove_dir_all(&folder.0);
        DirBuilder::new().mode(0o700).create(&folder.0).expect("a folder");
        let image = CreateQcow2 { cluster_size: CLUSTER, ..CreateQcow2::new(SIZE) };
        create_qcow2(Path::new(&world::path_of(&file)), &image).expect("an image");
        let journal = (PathBuf::new(), Vec::new());
        let (event_loop, image, kept) = (world::quiet_loop(), Vec::new(), Files::new());
        let mut world = World { event_loop, file, folder, image, journal, kept };
        let write = [2 | 64, 7, 0, 0, 0, 0];
        let (nodes, node) = world.open();
        drop((world.add(nodes, BITMAPS[0]), node));
        let (nodes, node) = world.open();
        let nodes = world.add(nodes, BITMAPS[1]);
        requests::ask(&world.event_loop, &node, &write);
        let tracking = nodes.tracking(NODE).expect("it has bitmaps");
        // What a backup has taken is behind the other bits.
        tracking.bitmap(BITMAPS[1].0).expect("it is there").bits().take();
        requests::ask(&world.event_loop, &node, &[2 | 64, 7, 0, 16, 0, 0]);
        world.image = std::fs::read(world::path_of(&world.file)).expect("it is ours");
        let (kept, mut journals): (Files, Files) =
            world.files().into_iter().partition(|(path, _)| is_kept(path));
        drop((nodes, node));
        (world.kept, world.journal) = (kept, journals.pop().expect("it has a journal"));
        world.kept.sort();
        assert_eq!(world.kept.len(), 2);
        world
    }

    /// Adds a bitmap to the image.
    fn add(&self, mut nodes: NodeRegistry, (name, granularity): (&str, u64)) -> NodeRegistry {
        let tracked = async move {
            nodes.track(NODE).await.expect("it is there");
            nodes
        };
        let nodes = self.event_loop.block_on(tracked).expect("it turns");
        let store = nodes.node(NODE).expect("it is there").bitmap_store().expect("it is qcow2");
        let bitmap = store.new_bitmap(name, SIZE, granularity, true);
        nodes.tracking(NODE).expect("it is tracked").add_bitmap(Arc::new(bitmap));
        let secured = self.event_loop.block_on(store.secure(&self.event_loop));
        secured.expect("it turns").expect("a mark");
        nodes
    }

    fn open(&self) -> (NodeRegistry, Arc<dyn BlockNode>) {
        let nodes = NodeRegistry::new().with_journals(&self.folder.0);
        let mut nodes = nodes.expect("a folder of our own");
        let node = nodes.open(&qcow2::options(world::path_of(&self.file), false));
        (nodes, node.expect("files of bitmaps do not keep an image from being opened"))
    }

    fn files(&self) -> Files {
        let files = std::fs::read_dir(&self.folder.0).expect("it is ours").map(|entry| {
            let path = entry.expect("it is there").path();
            let bytes = std::fs::read(&path).expect("it is ours");
            (path, bytes)
        });
        files.collect()
    }

    /// The state after the kill, with these files of bitmaps.
    fn put(&self, kept: &Files) {
        assert!(self.files().is_empty(), "a closed image needs no files");
        for (path, bytes) in kept.iter().chain([&self.journal]) {
            std::fs::write(path, bytes).expect("it fits");
        }
        self.file.set_len(0).expect("it is ours");
        self.file.write_all_at(&self.image, 0).expect("it fits");
    }

    /// Makes the files from the rest of the input.
    fn make(&self, how: u8, rest: &[u8]) -> Files {
        let mut files = self.kept.clone();
        if how & TWICE != 0 {
            files[1].1 = files[0].1.clone();
        }
        let mut input = Input::new(rest);
        match how >> 6 {
            0 => {
                while !input.is_empty() {
                    let (what, at) = (input.u8(), usize::from(input.u8()));
                    let value = match input.u8() {
                        255 => input.u64(),
                        254 => u64::from(input.u32()),
                        253 => 1 << (input.u8() & 63),
                        few => few.into(),
                    };
                    let file = &mut files[usize::from(what & 1)].1;
                    let at = match what >> 6 {
                        0 | 1 => (STATE + at % 7) * 8,
                        2 => NAME + at,
                        _ => BITS + at * 8,
                    };
                    let bytes = value.to_ne_bytes();
                    let bytes = if what >> 6 == 2 { &bytes[..1] } else { &bytes };
                    file.resize(file.len().max(at + bytes.len()), 0);
                    file[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
            1 => {
                let file = &mut files[usize::from(input.u8() & 1)].1;
                if let len @ 1.. = usize::from(input.u16()) {
                    file.resize(len, 0xff);
                }
                while !input.is_empty() {
                    let (at, byte) = (usize::from(input.u16()), input.u8());
                    file.get_mut(at).into_iter().for_each(|there| *there = byte);
                }
            }
            2 => {
                files[1].1.truncate(BITS);
                files[1].1.extend_from_slice(rest);
            }
            _ => files[1].1 = rest.to_vec(),
        }
        files
    }

    /// A bitmap that a file can be of, with all bits.
    fn parse(&self, file: &[u8]) -> Option<Known> {
        let len =
            usize::try_from(word(file, NAME_LEN)).ok().filter(|len| (1..1024).contains(len))?;
        let name = std::str::from_utf8(file.get(NAME..NAME + len)?).ok()?;
        let granularity = word(file, GRANULARITY);
        let is_right = file.starts_with(b"ringmill bitmap1")
            && file[MARK] == self.journal.1[MARK]
            && file.len() >= BITS
            && word(file, DEVICE) == self.file.metadata().expect("it is ours").dev()
            && word(file, DISK) == SIZE
            && granularity.is_power_of_two()
            && (512..=1 << 31).contains(&granularity)
            && !name.contains('\0');
        let parts = is_right.then(|| SIZE.div_ceil(granularity) as usize)?;
        let words = parts.div_ceil(64) * 8;
        let mut bits = file.get(BITS..BITS + words)?.to_vec();
        match word(file, STATE) {
            1 => {}
            2 => {
                let taken = &file[BITS + words..];
                bits.iter_mut().zip(taken).for_each(|(bits, taken)| *bits |= taken);
            }
            _ => return None,
        }
        bits.truncate(parts.div_ceil(8));
        if let (Some(last), rest @ 1..) = (bits.last_mut(), parts % 8) {
            *last &= (1 << rest) - 1;
        }
        Some((name.to_owned(), Some((granularity, word(file, RECORDING) == 1, bits))))
    }

    /// The bitmaps after opening the image with these files.
    fn expected(&self, files: &Files) -> Vec<Known> {
        let (in_image, of_it) = BITMAPS[0];
        let found: Vec<_> = files.iter().filter_map(|(_, file)| self.parse(file)).collect();
        let is_one = |known: &Known| found.iter().filter(|other| other.0 == known.0).count() == 1;
        let fits = |(name, bits): &Known| {
            name != in_image || bits.as_ref().is_some_and(|(granularity, ..)| *granularity == of_it)
        };
        let mut all: Vec<_> =
            found.iter().filter(|known| is_one(known) && fits(known)).cloned().collect();
        if all.iter().all(|(name, _)| name != in_image) {
            all.push((in_image.to_owned(), None));
        }
        all.sort();
        all
    }

    fn play(&self, how: u8, steps: &[u8], rest: &[u8]) {
        let files = self.make(how, rest);
        self.put(&files);
        let (nodes, node) = self.open();
        let found = known(&nodes);
        assert_eq!(found, self.expected(&files));
        requests::ask(&self.event_loop, &node, steps);
        let used = known(&nodes);
        for (before, after) in found.iter().zip(&used) {
            let (Some((.., before)), Some((.., after))) = (&before.1, &after.1) else { continue };
            let mut bits = before.iter().zip(after);
            assert!(bits.all(|(before, after)| before & !after == 0), "a bit is gone");
        }
        drop((nodes, node));
        let (nodes, node) = self.open();
        assert_eq!(known(&nodes), used, "the image has other bitmaps than it was closed with");
        drop((nodes, node));
    }
}

fn is_kept(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("bitmap-"))
}

/// The bitmaps of the image's node.
fn known(nodes: &NodeRegistry) -> Vec<Known> {
    let bitmaps = nodes.tracking(NODE).map_or_else(Vec::new, |tracking| tracking.bitmaps());
    let known = bitmaps.iter().map(|bitmap| {
        let bits = bitmap.bits();
        assert!(bits.count() <= bits.size().next_multiple_of(bits.granularity()));
        let is_right = bitmap.storage() == Storage::Image;
        let bits = (bits.granularity(), bitmap.is_recording(), bits.to_bytes());
        (bitmap.name().to_owned(), is_right.then_some(bits))
    });
    let mut known: Vec<_> = known.collect();
    known.sort();
    known
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
