//! Checks and repairs of damaged images, beside `qemu-img check`.

use std::fs;
use std::path::Path;
use std::process::Command;

use block::{CheckFailure, Checked, Connections, NodeRegistry, Repair, check_qcow2};
use event_loop::{EventLoop, LoopConfig};
use fastrand::Rng;

use crate::qcow2::image::{Folder, contents, open, options, qemu_img, qemu_io};

/// Bits of an entry that hold an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The places of entries that lead somewhere: of the L1 table, of L2 tables, of the refcount table; and of counts.
fn entries(image: &[u8]) -> [Vec<usize>; 4] {
    let cluster = 1 << number(image, 20, 4);
    let used = |at: usize, len: usize| -> Vec<usize> {
        let end = (at + len).min(image.len() - 7);
        (at..end).step_by(8).filter(|at| number(image, *at, 8) != 0).collect()
    };
    let below = |tables: &[usize]| -> Vec<usize> {
        let table = |at: &usize| (number(image, *at, 8) & OFFSET) as usize;
        tables.iter().flat_map(|at| used(table(at), cluster)).collect()
    };
    let l1 = used(number(image, 40, 8) as usize, number(image, 36, 4) as usize * 8);
    let table = used(number(image, 48, 8) as usize, number(image, 56, 4) as usize * cluster);
    [l1.clone(), below(&l1), table.clone(), below(&table)]
}

/// Damages an image in memory.
fn damage(image: &mut [u8], random: &mut Rng) {
    let cluster = 1u64 << number(image, 20, 4);
    let clusters = image.len() as u64 / cluster;
    for _ in 0..*random.choice(&[1, 1, 1, 2, 4]).expect("not empty") {
        let places = entries(image);
        let kind = *random.choice(&[0, 1, 1, 1, 2, 3, 3]).expect("not empty");
        let Some(at) =
            (!places[kind].is_empty()).then(|| *random.choice(&places[kind]).expect("not empty"))
        else {
            continue;
        };
        let entry = number(image, at, 8);
        let damaged = match random.usize(..6) {
            // Not far beyond the end: QEMU makes a file as long as a refcount block's place says.
            0 => entry ^ 1 << random.usize(..20),
            1 => entry ^ 1 << 63,
            2 => (entry & !OFFSET) | ((random.u64(..) % clusters) * cluster),
            3 => 0,
            4 => entry ^ 1 << (56 + random.usize(..8)),
            _ => entry ^ 1 << random.usize(..12),
        };
        image[at..at + 8].copy_from_slice(&damaged.to_be_bytes());
    }
}

/// What `qemu-img check` says: the exit code, and a number of its JSON text.
fn theirs(
    folder: &Folder,
    image: &str,
    repair: Option<&str>,
) -> (i32, impl Fn(&str) -> u64 + use<>) {
    let mut command = Command::new("qemu-img");
    command.args(["check", "-f", "qcow2", "--output", "json", image]).current_dir(folder.path("."));
    let output = command.args(repair.into_iter().flat_map(|what| ["-r", what])).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let number = move |name: &str| {
        let of = text.split_once(&format!("\"{name}\": "));
        let digits = of.map(|(_, rest)| rest.split([',', '\n']).next().unwrap_or_default());
        digits.map_or(0, |digits| digits.trim().parse().unwrap())
    };
    (output.status.code().unwrap_or(-1), number)
}

fn ours(path: &Path, repair: Repair) -> Result<Checked, CheckFailure> {
    check_qcow2(path, repair, None, |_| {})
}

/// The exit code of `ringmill check`.
fn code(checked: &Result<Checked, CheckFailure>) -> i32 {
    match checked {
        Err(_) => 1,
        Ok(found) if found.check_errors > 0 => 1,
        Ok(found) if found.corruptions > 0 => 2,
        Ok(found) if found.leaks > 0 => 3,
        Ok(_) => 0,
    }
}

/// An image with data, compressed data, zeroes and, with `snapshot`, an internal snapshot.
fn image(folder: &Folder, name: &str, form: &str, snapshot: bool) -> Vec<u8> {
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "-o", form, name, "1M"]);
    for write in ["write -P 1 0 100k", "write -P 2 300k 40k", "write -c -P 3 512k 64k"] {
        qemu_io(folder, name, write);
    }
    if !form.contains("compat=0.10") {
        qemu_io(folder, name, "write -z 320k 64k");
    }
    if snapshot {
        qemu_img(folder, &["snapshot", "-c", "first", name]);
        qemu_io(folder, name, "write -P 4 64k 64k");
    }
    fs::read(folder.path(name)).unwrap()
}

/// The verdicts are QEMU's, and what QEMU can repair is repaired, with the same contents.
fn compare_with_qemu(name: &str, form: &str, snapshot: bool) {
    let folder = Folder::new(&format!("check-{name}"));
    let whole = image(&folder, "whole.qcow2", form, snapshot);
    let (first, second) = (folder.path("ours.qcow2"), folder.path("theirs.qcow2"));
    let mut repaired = 0;
    let seeds = if std::env::var_os("RINGMILL_LONG").is_some() { 200 } else { 20 };
    for seed in 0..seeds {
        let mut damaged = whole.clone();
        damage(&mut damaged, &mut Rng::with_seed(seed ^ whole.len() as u64));
        fs::write(&first, &damaged).unwrap();
        let (their_code, number) = theirs(&folder, "ours.qcow2", None);
        let found = ours(&first, Repair::None);
        assert_eq!(code(&found), their_code, "{form}, seed {seed}");
        if let Ok(found) = found {
            let ours = [
                found.corruptions,
                found.leaks,
                found.check_errors,
                found.image_end,
                found.allocated,
                found.compressed,
                found.fragmented,
            ];
            let names = [
                "corruptions",
                "leaks",
                "check-errors",
                "image-end-offset",
                "allocated-clusters",
                "compressed-clusters",
                "fragmented-clusters",
            ];
            assert_eq!(ours, names.map(&number), "{form}, seed {seed}");
        }
        assert!(fs::read(&first).unwrap() == damaged, "a check has written: {form}, seed {seed}");
        for (repair, word) in [(Repair::Leaks, "leaks"), (Repair::All, "all")] {
            fs::write(&first, &damaged).unwrap();
            fs::write(&second, &damaged).unwrap();
            let _ = theirs(&folder, "theirs.qcow2", Some(word));
            let _ = ours(&first, repair);
            let (their_code, _) = theirs(&folder, "theirs.qcow2", None);
            let (our_code, _) = theirs(&folder, "ours.qcow2", None);
            assert_eq!(code(&ours(&first, Repair::None)), our_code, "{form}, seed {seed}, {word}");
            // Where QEMU's repair fails, ours may do better.
            let as_good = our_code == their_code || our_code == 0 || their_code == 1;
            assert!(as_good, "{form}, seed {seed}, {word}: {our_code} instead of {their_code}");
            let readable = ["compare", "-f", "qcow2", "-F", "qcow2", "theirs.qcow2"];
            let compare = |other| {
                let mut command = Command::new("qemu-img");
                let command = command.args(readable).arg(other).current_dir(folder.path("."));
                command.output().unwrap().status.code()
            };
            if repair == Repair::All && our_code == 0 && their_code == 0 {
                let is_same = compare("ours.qcow2") == Some(0);
                // What QEMU cannot read after its repair is not compared.
                assert!(is_same || compare("theirs.qcow2") != Some(0), "{form}, seed {seed}");
                repaired += u64::from(is_same);
            }
        }
    }
    assert!(repaired > seeds / 10, "{form}: {repaired} of {seeds}");
}

#[test]
fn verdicts_and_repairs_are_those_of_qemu() {
    compare_with_qemu("4k", "cluster_size=4k,refcount_bits=1", false);
    compare_with_qemu("2k", "cluster_size=2k", true);
}

#[test]
fn verdicts_and_repairs_of_small_clusters() {
    compare_with_qemu("512", "cluster_size=512", true);
    compare_with_qemu("zstd", "cluster_size=4k,compression_type=zstd,refcount_bits=64", false);
}

#[test]
fn verdicts_and_repairs_of_version_2() {
    compare_with_qemu("v2", "compat=0.10,cluster_size=4k", false);
}

#[test]
fn verdicts_and_repairs_of_subclusters() {
    compare_with_qemu("extended", "cluster_size=16k,extended_l2=on", true);
}

/// Refcount structures that are lost are made anew, and nothing else changes.
#[test]
fn lost_refcounts_are_made_anew() {
    let folder = Folder::new("check-lost");
    for form in ["cluster_size=512", "cluster_size=64k", "cluster_size=4k,refcount_bits=32"] {
        let whole = image(&folder, "disk.qcow2", form, true);
        let path = folder.path("disk.qcow2");
        let before = contents(&open(&options(&path)));
        let mut lost = whole.clone();
        let table = number(&lost, 48, 8) as usize;
        lost[table..table + 64].fill(0);
        fs::write(&path, &lost).unwrap();
        assert_eq!(code(&ours(&path, Repair::None)), 2);
        assert!(matches!(ours(&path, Repair::Leaks), Err(CheckFailure::Io(_))));
        let repaired = ours(&path, Repair::All).unwrap();
        assert_eq!((repaired.corruptions, repaired.leaks), (0, 0));
        assert!(repaired.corruptions_fixed > 0);
        assert_eq!(theirs(&folder, "disk.qcow2", None).0, 0, "{form}");
        assert!(contents(&open(&options(&path))) == before);
        qemu_img(&folder, &["snapshot", "-a", "first", "disk.qcow2"]);
        assert_eq!(theirs(&folder, "disk.qcow2", None).0, 0, "{form}");
    }
}

/// QEMU 11.1 forgets the snapshots of such an image in a repair.
#[test]
fn a_repair_keeps_snapshots_beside_bitmaps() {
    let folder = Folder::new("check-bitmaps");
    image(&folder, "disk.qcow2", "cluster_size=4k", true);
    qemu_img(&folder, &["bitmap", "--add", "disk.qcow2", "bitmap0"]);
    let path = folder.path("disk.qcow2");
    let before = fs::read(&path).unwrap();
    let checked = ours(&path, Repair::All).unwrap();
    assert_eq!((checked.corruptions_fixed, checked.leaks_fixed), (0, 0));
    assert!(fs::read(&path).unwrap() == before);
    assert!(qemu_img(&folder, &["snapshot", "-l", "disk.qcow2"]).contains("first"));
}

/// Tables that several entries share are counted as by QEMU, though they are walked a few times only.
#[test]
fn tables_that_entries_share_are_counted_as_by_qemu() {
    let folder = Folder::new("check-shared");
    for form in ["cluster_size=4k", "cluster_size=4k,refcount_bits=8"] {
        qemu_img(&folder, &["create", "-q", "-f", "qcow2", "-o", form, "whole.qcow2", "20M"]);
        for write in ["write -P 1 0 100k", "write -c -P 3 512k 64k", "write -z 600k 64k"] {
            qemu_io(&folder, "whole.qcow2", write);
        }
        qemu_img(&folder, &["snapshot", "-c", "first", "whole.qcow2"]);
        qemu_io(&folder, "whole.qcow2", "write -P 4 64k 64k");
        let mut image = fs::read(folder.path("whole.qcow2")).unwrap();
        let l1 = number(&image, 40, 8) as usize;
        let first = image[l1..l1 + 8].to_vec();
        image[l1..l1 + 80].copy_from_slice(&first.repeat(10));
        for shift in [0, 512] {
            // A table within clusters is read as it is there.
            image[l1 + 6] ^= (shift >> 8) as u8;
            fs::write(folder.path("ours.qcow2"), &image).unwrap();
            fs::write(folder.path("theirs.qcow2"), &image).unwrap();
            let (_, number) = theirs(&folder, "ours.qcow2", None);
            let found = ours(&folder.path("ours.qcow2"), Repair::None).unwrap();
            let ours_found = [found.corruptions, found.leaks, found.allocated, found.fragmented];
            let names = ["corruptions", "leaks", "allocated-clusters", "fragmented-clusters"];
            assert_eq!(ours_found, names.map(&number), "{form}, {shift}");
            let _ = theirs(&folder, "theirs.qcow2", Some("all"));
            let _ = ours(&folder.path("ours.qcow2"), Repair::All);
            let codes = ["ours.qcow2", "theirs.qcow2"].map(|name| theirs(&folder, name, None).0);
            assert_eq!(codes[0], codes[1], "{form}, {shift}");
        }
    }
}

/// An image that is opened with the repair apart is not written to before. A repair that is given up leaves it dirty.
#[test]
fn a_dirty_image_is_repaired_apart() {
    let folder = Folder::new("check-apart");
    image(&folder, "disk.qcow2", "lazy_refcounts=on", false);
    let path = folder.path("disk.qcow2");
    let mut dirty = fs::read(&path).unwrap();
    dirty[79] = 1;
    fs::write(&path, &dirty).unwrap();
    let options = options(&path);
    let mut nodes = NodeRegistry::new();
    nodes.set_repairs_apart(true);
    let mut found = || {
        let opened = nodes.open_connected(&options, Connections::default());
        opened.map_err(|_| nodes.take_dirty_image().unwrap())
    };
    let given_up = found().unwrap_err();
    drop(given_up);
    assert!(fs::read(&path).unwrap() == dirty);
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    event_loop.block_on(found().unwrap_err().repair()).unwrap().unwrap();
    assert_eq!(fs::read(&path).unwrap()[79] & 1, 0);
    found().unwrap();
}

/// The bits that ask for a repair are cleared by a repair of everything.
#[test]
fn a_full_repair_clears_the_dirty_and_the_corrupt_bit() {
    let folder = Folder::new("check-bits");
    image(&folder, "disk.qcow2", "lazy_refcounts=on", false);
    let path = folder.path("disk.qcow2");
    for bits in [1, 2, 3] {
        let mut dirty = fs::read(&path).unwrap();
        dirty[79] = bits;
        fs::write(&path, &dirty).unwrap();
        assert_eq!(code(&ours(&path, Repair::None)), 0);
        assert_eq!(fs::read(&path).unwrap()[79], bits);
        ours(&path, Repair::All).unwrap();
        assert_eq!(fs::read(&path).unwrap()[79], 0);
    }
}

#[test]
fn other_formats_have_no_checks() {
    let folder = Folder::new("check-raw");
    let path = folder.path("disk.raw");
    fs::write(&path, vec![0; 1 << 16]).unwrap();
    assert!(matches!(ours(&path, Repair::None), Err(CheckFailure::NoChecks)));
    assert!(matches!(ours(&folder.path("none"), Repair::None), Err(CheckFailure::Open(_))));
}
