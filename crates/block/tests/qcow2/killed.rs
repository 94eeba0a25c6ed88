//! A process that is killed while it uses an image: whatever it had answered is there afterwards, flushed or
//! not, and QEMU finds the image whole.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{BlockdevOptions, BlockdevRef, Qcow2Options};
use block::request::Op;
use event_loop::IoBufs;
use fastrand::Rng;

use crate::common::{Rig, blockdev, filled};
use crate::qcow2::image::{Folder, check, contents, judge, options, qemu_img, qemu_io};
use crate::qcow2::model::SIZE;

/// Environment variables of the process to be killed: the image, and its journals if it has them.
const IMAGE: &str = "RINGMILL_TEST_KILLED_IMAGE";
const JOURNALS: &str = "RINGMILL_TEST_KILLED_JOURNALS";
const SECTOR: usize = 512;
/// Number of loops. Each writes its own stripes, but loops share clusters.
const LOOPS: usize = 2;
const STRIPE: usize = 16;

fn registry(journals: Option<&Path>) -> NodeRegistry {
    match journals {
        Some(journals) => NodeRegistry::new().with_journals(journals).unwrap(),
        None => NodeRegistry::new(),
    }
}

/// The expected contents of a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Start,
    Zeroes,
    Stamp(u32),
    Anything,
}

impl Value {
    fn is(self, sector: &[u8], start: &[u8]) -> bool {
        match self {
            Value::Start => sector == start,
            Value::Zeroes => sector.iter().all(|byte| *byte == 0),
            Value::Stamp(stamp) => sector.chunks_exact(4).all(|word| word == stamp.to_le_bytes()),
            Value::Anything => true,
        }
    }
}

/// Returns the contents after a request, from its letter and its stamp.
fn value(kind: &str, stamp: u32) -> Value {
    match kind {
        "w" => Value::Stamp(stamp),
        "z" => Value::Zeroes,
        _ => Value::Anything,
    }
}

/// Submits requests until the process is killed. Prints each request before it begins and after its answer.
fn work(node: &Arc<dyn BlockNode>, part: usize) {
    let mut random = Rng::with_seed((u64::from(std::process::id()) << 8) + part as u64 + 1);
    let mut rig = Rig::new(node.clone());
    let mut stamp = part as u32 + 1;
    let tell = |line: String| std::io::stdout().write_all(line.as_bytes()).unwrap();
    let stripes = SIZE / SECTOR / STRIPE / LOOPS;
    loop {
        let mut waiting = Vec::new();
        let mut taken = Vec::new();
        for _ in 0..random.usize(..8) + 1 {
            let stripe = random.usize(..stripes) * LOOPS + part;
            if taken.contains(&stripe) {
                continue;
            }
            taken.push(stripe);
            let first = stripe * STRIPE + random.usize(..STRIPE / 2);
            let count = random.usize(..STRIPE / 2) + 1;
            let (offset, len) = ((first * SECTOR) as u64, (count * SECTOR) as u64);
            stamp += LOOPS as u32;
            let write = Op::Write { fua: random.usize(..32) == 0 };
            let zero = Op::WriteZeroes {
                may_unmap: random.usize(..2) == 0,
                no_fallback: false,
                fua: false,
            };
            let (kind, op) = match random.usize(..16) {
                0 => ("z", zero),
                1 => ("x", Op::Discard),
                2 if random.usize(..8) == 0 => ("f", Op::Flush),
                _ => ("w", write),
            };
            tell(format!("begun {kind} {first} {count} {stamp}\n"));
            let tag = match kind {
                "w" => {
                    let data = stamp.to_le_bytes().repeat(count * SECTOR / 4);
                    rig.submit(op, offset, len, filled(&data, 0))
                }
                "f" => rig.submit(op, 0, 0, IoBufs::new()),
                _ => rig.submit(op, offset, len, IoBufs::new()),
            };
            waiting.push((tag, format!("done {kind} {first} {count} {stamp}\n")));
        }
        for (tag, done) in waiting {
            rig.wait(tag).0.unwrap();
            tell(done);
        }
    }
}

/// Does not return in the process that is to be killed.
fn be_killed() {
    let Some(image) = std::env::var_os(IMAGE) else { return };
    // On one CPU the test harness has begun a line with the test's name.
    println!();
    let journals = std::env::var_os(JOURNALS).map(PathBuf::from);
    let node = registry(journals.as_deref()).open(&options(Path::new(&image))).unwrap();
    std::thread::scope(|scope| {
        for part in 0..LOOPS {
            let node = &node;
            scope.spawn(move || work(node, part));
        }
    });
}

/// Kills a process that uses the image after it has printed `after` lines about requests. Returns the values
/// that each sector may have.
fn kill(test: &str, image: &Path, journals: Option<&Path>, after: usize) -> Vec<[Value; 2]> {
    kill_later(test, image, journals, after, || {})
}

/// Like [`kill`], and calls `half_way` in the middle.
fn kill_later(
    test: &str,
    image: &Path,
    journals: Option<&Path>,
    after: usize,
    half_way: impl Fn(),
) -> Vec<[Value; 2]> {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(IMAGE, image).stdout(Stdio::piped());
    if let Some(journals) = journals {
        child.env(JOURNALS, journals);
    }
    let mut child = child.spawn().unwrap();
    let mut may = vec![[Value::Start; 2]; SIZE.div_ceil(SECTOR)];
    let mut told = 0;
    // What it told before it was killed comes, too.
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let [what @ ("begun" | "done"), kind, rest @ ..] = &words[..] else { continue };
        let Ok([first, count, stamp]) = <[&str; 3]>::try_from(rest) else { continue };
        let Ok(stamp) = stamp.parse() else { continue };
        let (first, count): (usize, usize) = (first.parse().unwrap(), count.parse().unwrap());
        if *kind != "f" {
            for sector in &mut may[first..first + count] {
                let value = value(kind, stamp);
                *sector = if *what == "begun" { [sector[0], value] } else { [value, value] };
            }
        }
        told += 1;
        if told == after / 2 {
            half_way();
        }
        if told == after {
            child.kill().unwrap();
        }
    }
    assert!(!child.wait().unwrap().success() && told >= after, "it was killed");
    wait_for_the_kernel(image);
    may
}

/// Waits until the last requests of a process that was killed are done: until then the image is locked.
fn wait_for_the_kernel(image: &Path) {
    let until = Instant::now() + Duration::from_secs(60);
    let file = blockdev("file", crate::common::file(image, None));
    while let Err(error) = NodeRegistry::new().open(&file) {
        assert!(Instant::now() < until, "{error}");
        std::thread::yield_now();
    }
}

fn assert_kept(may: &[[Value; 2]], found: &[u8], start: &[u8], what: &str) {
    let sectors = found.chunks(SECTOR).zip(start.chunks(SECTOR));
    for (number, ((found, start), may)) in sectors.zip(may).enumerate() {
        let is_one = may.iter().any(|value| value.is(found, start));
        assert!(is_one, "{what}: sector {number} is not one of {may:?}: {:?}", &found[..8]);
    }
}

/// Without a journal, a kill between two steps of a flush leaves unused clusters with a reference.
fn repair_leaks(folder: &Folder) {
    qemu_img(folder, &["check", "-q", "-r", "leaks", "-f", "qcow2", "disk.qcow2"]);
}

fn names(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Kills a process again and again. `make` makes an image, of which `start` is then what it holds.
fn kill_often(test: &str, journals: bool, start: &[u8], make: impl Fn(&Folder)) {
    be_killed();
    let folder = Folder::new(&test.replace(':', "-"));
    let journals = journals.then(|| folder.path("journals"));
    let image = folder.path("disk.qcow2");
    for after in [2, 30, 100, 300, 700] {
        make(&folder);
        // Version 2 has no bit that says that the image is to be repaired, so no journal could be trusted.
        let is_journaled = std::fs::read(&image).unwrap()[7] == 3;
        let may = kill(test, &image, journals.as_deref(), after);
        let open = |read_only| {
            let options = BlockdevOptions { read_only, ..options(&image) };
            registry(journals.as_deref()).open(&options).unwrap()
        };
        // Read only, what was left is seen and stays where it is.
        let seen = contents(&open(true));
        assert_kept(&may, &seen, start, "read only");
        let node = open(false);
        let found = contents(&node);
        assert!(found == seen, "what is seen read only is there");
        drop(node);
        if journals.is_none() || !is_journaled {
            repair_leaks(&folder);
        }
        judge(&folder, "disk.qcow2", &found);
        assert!(journals.as_ref().is_none_or(|journals| names(journals).is_empty()));
    }
}

/// An image that a process with a journal is killed over.
struct Case {
    test: &'static str,
    folder: Folder,
    journals: PathBuf,
    image: PathBuf,
}

impl Case {
    /// For the test of that name, which runs in the process that is to be killed as well.
    fn new(test: &'static str) -> Case {
        be_killed();
        let folder = Folder::new(&test.replace(':', "-"));
        create(&folder, "cluster_size=64k");
        let (journals, image) = (folder.path("journals"), folder.path("disk.qcow2"));
        Case { test, folder, journals, image }
    }

    /// Returns what each sector may hold.
    fn kill(&self, after: usize) -> Vec<[Value; 2]> {
        kill(self.test, &self.image, Some(&self.journals), after)
    }

    fn open(&self, journals: Option<&Path>) -> Arc<dyn BlockNode> {
        registry(journals).open(&options(&self.image)).unwrap()
    }

    fn open_with_journals(&self) -> Arc<dyn BlockNode> {
        self.open(Some(&self.journals))
    }

    /// Has QEMU judge the image once the node is closed, and returns what it holds.
    fn judge(&self, node: Arc<dyn BlockNode>) -> Vec<u8> {
        let found = contents(&node);
        drop(node);
        repair_leaks(&self.folder);
        judge(&self.folder, "disk.qcow2", &found);
        found
    }
}

fn create(folder: &Folder, kind: &str) {
    let size = SIZE.to_string();
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "-o", kind, "disk.qcow2", &size]);
}

#[test]
fn nothing_is_lost_with_a_journal() {
    kill_often("qcow2::killed::nothing_is_lost_with_a_journal", true, &[0; SIZE], |folder| {
        create(folder, "cluster_size=64k");
    });
}

#[test]
fn nothing_is_lost_of_small_clusters() {
    kill_often("qcow2::killed::nothing_is_lost_of_small_clusters", true, &[0; SIZE], |folder| {
        create(folder, "cluster_size=4k,refcount_bits=1");
    });
}

#[test]
fn nothing_is_lost_of_subclusters() {
    kill_often("qcow2::killed::nothing_is_lost_of_subclusters", true, &[0; SIZE], |folder| {
        create(folder, "cluster_size=16k,extended_l2=on");
    });
}

#[test]
fn nothing_is_lost_of_subclusters_with_a_file_behind() {
    let mut start: Vec<u8> = (0..1_500_160).map(|i| (i / 512) as u8 | 1).collect();
    let base = start.clone();
    start.resize(SIZE, 0);
    let name = "qcow2::killed::nothing_is_lost_of_subclusters_with_a_file_behind";
    kill_often(name, true, &start, |folder| {
        std::fs::write(folder.path("base.raw"), &base).unwrap();
        let size = SIZE.to_string();
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "-o"];
        qemu_img(folder, &[&create[..], &["extended_l2=on", "disk.qcow2", &size]].concat());
    });
}

#[test]
fn nothing_is_lost_of_version_2() {
    kill_often("qcow2::killed::nothing_is_lost_of_version_2", true, &[0; SIZE], |folder| {
        create(folder, "compat=0.10,cluster_size=4k");
    });
}

#[test]
fn nothing_is_lost_without_a_journal() {
    kill_often("qcow2::killed::nothing_is_lost_without_a_journal", false, &[0; SIZE], |folder| {
        create(folder, "cluster_size=64k");
    });
}

/// With a backing image and an external data file.
#[test]
fn nothing_is_lost_with_files_behind() {
    let mut start: Vec<u8> = (0..1_500_160).map(|i| (i / 512) as u8 | 1).collect();
    let base = start.clone();
    start.resize(SIZE, 0);
    kill_often("qcow2::killed::nothing_is_lost_with_files_behind", true, &start, |folder| {
        std::fs::write(folder.path("base.raw"), &base).unwrap();
        let size = SIZE.to_string();
        let _ = std::fs::remove_file(folder.path("data"));
        let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "-o"];
        qemu_img(folder, &[&create[..], &["data_file=DIR/data", "disk.qcow2", &size]].concat());
    });
}

#[test]
fn nothing_is_lost_with_a_raw_data_file() {
    kill_often("qcow2::killed::nothing_is_lost_with_a_raw_data_file", true, &[0; SIZE], |folder| {
        let _ = std::fs::remove_file(folder.path("data"));
        create(folder, "data_file=DIR/data,data_file_raw=on");
    });
}

/// QEMU has written to the image in between: what was left is not for that image any more.
#[test]
fn a_journal_is_not_used_after_another_program_has_changed_the_image() {
    let case = Case::new(
        "qcow2::killed::a_journal_is_not_used_after_another_program_has_changed_the_image",
    );
    case.kill(50);
    qemu_io(&case.folder, "disk.qcow2", "write -P 7 0 3M");
    let node = case.open_with_journals();
    let found = contents(&node);
    assert!(found[..3 << 20].iter().all(|byte| *byte == 7));
    drop(node);
    // QEMU has repaired it: there are no leaks.
    judge(&case.folder, "disk.qcow2", &found);
}

/// The machine has been started anew, or the journal was deleted: what was flushed is there, and the image is whole.
#[test]
fn an_image_whose_journal_is_gone_is_whole() {
    let case = Case::new("qcow2::killed::an_image_whose_journal_is_gone_is_whole");
    case.kill(50);
    std::fs::remove_dir_all(&case.journals).unwrap();
    let node = case.open_with_journals();
    let mut rig = Rig::new(node.clone());
    rig.write(0, &[5; 65536], 0).unwrap();
    drop(rig);
    case.judge(node);
}

/// The journal is removed from outside: from then on the image itself is written to before each answer.
#[test]
fn nothing_is_lost_after_a_journal_was_removed() {
    let case = Case::new("qcow2::killed::nothing_is_lost_after_a_journal_was_removed");
    let remove = || std::fs::remove_dir_all(&case.journals).unwrap();
    let may = kill_later(case.test, &case.image, Some(&case.journals), 1000, remove);
    assert_kept(&may, &case.judge(case.open_with_journals()), &[0; SIZE], "after a kill");
}

/// Opened and changed where there are no journals, the image is not one any more that was left.
#[test]
fn a_journal_is_not_used_after_the_image_was_opened_without_it() {
    let case =
        Case::new("qcow2::killed::a_journal_is_not_used_after_the_image_was_opened_without_it");
    case.kill(50);
    let node = case.open(None);
    let mut rig = Rig::new(node.clone());
    rig.write(0, &[5; 3 << 20], 0).unwrap();
    drop((rig, node));
    let found = case.judge(case.open_with_journals());
    assert!(found[..3 << 20].iter().all(|byte| *byte == 5));
}

/// A copy that was made before, and comes back: the journal is not that of its state.
#[test]
fn a_journal_is_not_used_for_an_older_state_of_the_image() {
    let case = Case::new("qcow2::killed::a_journal_is_not_used_for_an_older_state_of_the_image");
    let mut older = None;
    // The second of two processes continues the journal of the first.
    for _ in 0..2 {
        case.kill(50);
        older.get_or_insert_with(|| std::fs::read(&case.image).unwrap());
    }
    std::fs::write(&case.image, older.unwrap()).unwrap();
    case.judge(case.open_with_journals());
}

/// A copy that was made afterwards, and opened first: what is left stays for the image.
#[test]
fn a_copy_of_the_image_leaves_the_journal_usable() {
    let case = Case::new("qcow2::killed::a_copy_of_the_image_leaves_the_journal_usable");
    let may = case.kill(50);
    let copy = case.folder.path("copy.qcow2");
    std::fs::copy(&case.image, &copy).unwrap();
    let open = |read_only| {
        let options = BlockdevOptions { read_only, ..options(&copy) };
        registry(Some(&case.journals)).open(&options)
    };
    let refused = open(false).err().unwrap().to_string();
    assert!(refused.contains("a copy"), "{refused}");
    drop(open(true).unwrap());
    assert_kept(&may, &case.judge(case.open_with_journals()), &[0; SIZE], "the image");
}

/// A journal that has rotted: a header that leads nowhere is not followed, and the image stays as it is.
#[test]
fn a_header_that_is_left_is_judged_before_it_is_written() {
    let case = Case::new("qcow2::killed::a_header_that_is_left_is_judged_before_it_is_written");
    case.kill(50);
    let left = std::fs::read(&case.image).unwrap();
    let journal = case.journals.join(&names(&case.journals)[0]);
    let mut rotten = std::fs::read(&journal).unwrap();
    for slot in rotten[4096..].chunks_exact_mut(16 + SECTOR) {
        slot[..8].fill(0);
        slot[16..].copy_from_slice(&left[..SECTOR]);
        // Where the L1 table is.
        slot[16 + 40..16 + 48].fill(0xff);
    }
    std::fs::write(&journal, rotten).unwrap();
    let opened = registry(Some(&case.journals)).open(&options(&case.image));
    let refused = opened.err().unwrap().to_string();
    assert!(refused.contains("wrong header"), "{refused}");
    assert!(std::fs::read(&case.image).unwrap() == left);
}

/// Several readers at once, each in a separate process.
#[test]
fn read_only_users_see_the_contents_of_the_journal() {
    let case = Case::new("qcow2::killed::read_only_users_see_the_contents_of_the_journal");
    let may = case.kill(50);
    let look = || {
        let mut options = BlockdevOptions { read_only: true, ..options(&case.image) };
        let qcow2: &mut Qcow2Options = options.driver.downcast_mut().unwrap();
        let BlockdevRef::Inline(file) = &mut qcow2.file else { unreachable!() };
        // They share it.
        file.read_only = true;
        let node = registry(Some(&case.journals)).open(&options).unwrap();
        assert_kept(&may, &contents(&node), &[0; SIZE], "who looks");
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..5).for_each(|_| look()));
        }
    });
}

/// Nobody else gets at what another process uses, and a check finds nothing missing meanwhile.
#[test]
fn an_image_in_use_is_marked_and_one_that_was_closed_is_not() {
    let folder = Folder::new("killed-marked");
    let (journals, image) = (folder.path("journals"), folder.path("disk.qcow2"));
    create(&folder, "cluster_size=64k");
    let before = std::fs::read(&image).unwrap();
    let open = || registry(Some(&journals)).open(&options(&image)).unwrap();
    drop(open());
    assert!(std::fs::read(&image).unwrap() == before, "one that is not written to stays as it was");
    let node = open();
    let mut rig = Rig::new(node.clone());
    rig.write(0, &[5; 4096], 0).unwrap();
    let info = qemu_img(&folder, &["info", "-U", "disk.qcow2"]);
    assert!(info.contains("cleanly shut down: no"), "{info}");
    drop((rig, node));
    let info = qemu_img(&folder, &["info", "disk.qcow2"]);
    assert!(!info.contains("cleanly shut down: no"), "{info}");
    assert!(names(&journals).is_empty());
    check(&folder, "disk.qcow2");
}
