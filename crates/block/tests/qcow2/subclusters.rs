//! Images with extended L2 entries, beside QEMU: the same requests map the same subclusters.

use block::options::{BlockdevOptions, Discard};
use block::request::Op;
use block::status::{ExtentState, extent};
use event_loop::IoBufs;
use fastrand::Rng;

use crate::common::{Rig, memory};
use crate::qcow2::image::{Folder, contents, judge, open, options, qemu_img, run};
use crate::qcow2::resize::resize;

/// Bytes of the disk.
const SIZE: u64 = 6 << 20;

/// A request, as `qemu-io` is told of it and as it is here.
enum Ask {
    Write(u8),
    Zeroes { unmap: bool },
    Discard,
}

/// Requests with ranges: whole subclusters if zeroes are written, whole clusters of a discard.
fn requests(cluster: u64, random: &mut Rng) -> Vec<(Ask, u64, u64)> {
    let unit = cluster / 32;
    let mut requests = Vec::new();
    for _ in 0..60 {
        let (ask, align) = match random.usize(..8) {
            0 => (Ask::Zeroes { unmap: false }, unit),
            1 => (Ask::Zeroes { unmap: true }, unit),
            2 => (Ask::Discard, cluster),
            _ => (Ask::Write(random.usize(..255) as u8), 512),
        };
        let first = random.usize(..(SIZE / align) as usize) as u64 * align;
        let most = [4 * unit, cluster, 3 * cluster][random.usize(..3)].max(align);
        let len = (1 + random.usize(..(most / align) as usize) as u64) * align;
        requests.push((ask, first, len.min(SIZE - first)));
    }
    requests
}

/// Has `qemu-io` carry them out.
fn theirs(folder: &Folder, image: &str, requests: &[(Ask, u64, u64)]) {
    let mut args = vec!["-f".to_owned(), "qcow2".into(), "-d".into(), "unmap".into()];
    for (ask, at, len) in requests {
        let command = match ask {
            Ask::Write(fill) => format!("write -P {fill} {at} {len}"),
            Ask::Zeroes { unmap: false } => format!("write -z {at} {len}"),
            Ask::Zeroes { unmap: true } => format!("write -z -u {at} {len}"),
            Ask::Discard => format!("discard {at} {len}"),
        };
        args.extend(["-c".into(), command]);
    }
    args.push(image.into());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (content, said) = run(folder, "qemu-io", &args);
    assert!(content && !said.contains("failed"), "{said}");
}

/// Carries them out, and returns what the disk has, and what its extents are: first byte, and whether it is data.
fn ours(options: &BlockdevOptions, requests: &[(Ask, u64, u64)]) -> (Vec<u8>, Vec<(u64, bool)>) {
    let node = open(options);
    let mut rig = Rig::new(node.clone());
    for (ask, at, len) in requests {
        match ask {
            Ask::Write(fill) => rig.write(*at, &vec![*fill; *len as usize], 0).unwrap(),
            Ask::Zeroes { unmap } => {
                let op = Op::WriteZeroes { may_unmap: *unmap, no_fallback: true, fua: false };
                rig.op(op, *at, *len).unwrap();
            }
            Ask::Discard => rig.op(Op::Discard, *at, *len).unwrap(),
        }
    }
    let tag = rig.submit(Op::BlockStatus, 0, SIZE, memory(1 << 20, 16));
    let (result, told) = rig.wait(tag);
    result.unwrap();
    let (mut at, mut extents) = (0, Vec::new());
    for index in 0.. {
        let Some(found) = extent(&told, index) else { break };
        add(&mut extents, at, found.state == ExtentState::Data);
        at += found.len;
    }
    assert_eq!(at, SIZE);
    (contents(&node), extents)
}

fn add(extents: &mut Vec<(u64, bool)>, at: u64, is_data: bool) {
    if extents.last().is_none_or(|(_, before)| *before != is_data) {
        extents.push((at, is_data));
    }
}

/// What `qemu-img map` tells of an image, without places in the file: an extent's first byte, and its state in JSON.
fn map(folder: &Folder, image: &str) -> Vec<(u64, String)> {
    let text = qemu_img(folder, &["map", "-f", "qcow2", "--output", "json", image]);
    let mut map: Vec<(u64, String)> = Vec::new();
    for line in text.lines() {
        let number = |name: &str| line.split(name).nth(1).unwrap().split(',').next().unwrap();
        let (_, state) = line.split_once("\"depth\"").unwrap();
        let state = state.split(", \"compressed\"").next().unwrap();
        // Data may lie in holes of the file.
        let is_data = state.contains("\"data\": true");
        let state = if is_data {
            state.replace("\"zero\": true", "\"zero\": false")
        } else {
            state.to_owned()
        };
        // Extents are parted where the file is.
        if map.last().is_none_or(|(_, before)| *before != state) {
            map.push((number("\"start\": ").parse().unwrap(), state));
        }
    }
    map
}

/// The extents of a map.
fn extents(map: &[(u64, String)]) -> Vec<(u64, bool)> {
    let mut extents = Vec::new();
    map.iter().for_each(|(at, state)| add(&mut extents, *at, state.contains("\"data\": true")));
    extents
}

#[test]
fn the_same_requests_map_the_same() {
    for (cluster, backed) in [(16u64, false), (16, true), (64, true), (256, true), (2048, true)] {
        let folder = Folder::new(&format!("subclusters-{cluster}-{backed}"));
        let base: Vec<u8> = (0..SIZE * 3 / 4).map(|at| (at / 512) as u8 | 1).collect();
        std::fs::write(folder.path("base.raw"), &base).unwrap();
        for seed in 1..4 {
            let (size, form) =
                (SIZE.to_string(), format!("cluster_size={cluster}k,extended_l2=on"));
            for name in ["ours.qcow2", "theirs.qcow2"] {
                let create = ["create", "-q", "-f", "qcow2", "-o", &form];
                let behind: &[&str] = if backed { &["-F", "raw", "-b", "base.raw"] } else { &[] };
                qemu_img(&folder, &[&create[..], behind, &[name, &size]].concat());
            }
            let requests = requests(cluster << 10, &mut Rng::with_seed(seed * 7 + cluster));
            theirs(&folder, "theirs.qcow2", &requests);
            let (found, told) = ours(&options(&folder.path("ours.qcow2")), &requests);
            judge(&folder, "ours.qcow2", &found);
            qemu_img(&folder, &["compare", "-q", "ours.qcow2", "theirs.qcow2"]);
            let (first, second) = (map(&folder, "ours.qcow2"), map(&folder, "theirs.qcow2"));
            match backed {
                true => assert_eq!(first, second, "{form}, seed {seed}"),
                // QEMU maps zeroes also where nothing else would show.
                false => assert_eq!(extents(&first), extents(&second), "{form}, seed {seed}"),
            }
            assert_eq!(told, extents(&first), "{form}, backed: {backed}, seed {seed}");
            // And QEMU's image is read.
            let options = options(&folder.path("theirs.qcow2"));
            let node = open(&BlockdevOptions { read_only: true, ..options });
            assert!(contents(&node) == found);
        }
    }
}

/// An internal snapshot has the clusters too: data moves before it is written, and that of other subclusters with it.
#[test]
fn a_snapshot_keeps_its_subclusters() {
    let folder = Folder::new("subclusters-snapshot");
    let base: Vec<u8> = (0..SIZE).map(|at| (at / 512) as u8 | 1).collect();
    std::fs::write(folder.path("base.raw"), &base).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-o", "extended_l2=on", "-F", "raw", "-b"];
    qemu_img(&folder, &[&create[..], &["base.raw", "disk.qcow2"]].concat());
    let before = requests(64 << 10, &mut Rng::with_seed(3));
    let (found, _) = ours(&options(&folder.path("disk.qcow2")), &before);
    qemu_img(&folder, &["snapshot", "-c", "before", "disk.qcow2"]);
    let after = requests(64 << 10, &mut Rng::with_seed(4));
    let (all, _) = ours(&options(&folder.path("disk.qcow2")), &after);
    judge(&folder, "disk.qcow2", &all);
    assert!(all != found);
    qemu_img(&folder, &["snapshot", "-a", "before", "disk.qcow2"]);
    judge(&folder, "disk.qcow2", &found);
}

/// A subcluster that is said to have data and to be zeroes, or data without a place, is damage; bits of a compressed cluster
/// mean nothing. As in QEMU.
#[test]
fn wrong_bitmaps_are_damage() {
    let folder = Folder::new("subclusters-damage");
    let number = |bytes: &[u8]| u64::from_be_bytes(bytes[..8].try_into().unwrap());
    for (name, descriptor, bitmap, is_damage) in [
        ("both", None, 1u64 << 32 | 0xff, true),
        ("no place", Some(0), 0xff, true),
        ("neither", None, 1 << 40 | 0xff, false),
        ("the bit of zeroes", Some(1), 0xff, false),
        ("compressed", None, 1 << 40 | 0xff, false),
    ] {
        let create = ["create", "-q", "-f", "qcow2", "-o", "extended_l2=on", "disk.qcow2", "1M"];
        qemu_img(&folder, &create);
        let write = if name == "compressed" { "write -c -P 3 0 64k" } else { "write -P 3 0 16k" };
        crate::qcow2::image::qemu_io(&folder, "disk.qcow2", write);
        let path = folder.path("disk.qcow2");
        let mut image = std::fs::read(&path).unwrap();
        let l1 = number(&image[40..]) as usize;
        let l2 = (number(&image[l1..]) & 0x00ff_ffff_ffff_fe00) as usize;
        let new = match descriptor {
            None => number(&image[l2..]),
            Some(0) => 0,
            Some(bits) => number(&image[l2..]) | bits,
        };
        image[l2..l2 + 8].copy_from_slice(&new.to_be_bytes());
        image[l2 + 8..l2 + 16].copy_from_slice(&bitmap.to_be_bytes());
        std::fs::write(&path, &image).unwrap();
        let command = "read -P 3 0 4k";
        let (content, said) =
            run(&folder, "qemu-io", &["-r", "-f", "qcow2", "-c", command, "disk.qcow2"]);
        assert_eq!(content && !said.contains("failed"), !is_damage, "{name}: {said}");
        let node = open(&BlockdevOptions { discard: Discard::Ignore, ..options(&path) });
        let mut rig = Rig::new(node.clone());
        let tag = rig.submit(Op::Read, 0, 4096, memory(4096, 512));
        let (result, bufs) = rig.wait(tag);
        assert_eq!(result.is_err(), is_damage, "{name}");
        if !is_damage {
            assert!(crate::common::bytes(&bufs) == [3; 4096], "{name}");
            rig.write(4096, &[5; 4096], 0).unwrap();
            assert_eq!(rig.read(0, 4096, 0).unwrap(), [3; 4096], "{name}");
            assert_eq!(rig.read(4096, 4096, 0).unwrap(), [5; 4096], "{name}");
        }
        let _: IoBufs = bufs;
        drop((rig, node));
        // Marked as corrupt, if it is damaged.
        let marked = std::fs::read(&path).unwrap()[79] & 2 != 0;
        assert_eq!(marked, is_damage, "{name}");
    }
}

/// A disk that shrinks within a cluster keeps what the cluster has past the end. That goes when the disk shrinks again:
/// nothing comes back when it grows.
#[test]
fn what_is_cut_off_in_steps_does_not_come_back() {
    const SECTOR: usize = 512;
    const ALL: usize = 600;
    let folder = Folder::new("subclusters-cut-off");
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=16k,extended_l2=on"];
    for seed in 0..20 {
        qemu_img(&folder, &[&create[..], &["disk.qcow2", &(ALL * SECTOR).to_string()]].concat());
        let node = open(&options(&folder.path("disk.qcow2")));
        let mut rig = Rig::new(node.clone());
        let mut random = Rng::with_seed(seed);
        let mut model = vec![0; ALL * SECTOR];
        for round in 1..6 {
            // Sector 117 is in the cluster from 96 to 128.
            let (first, sizes) = match seed {
                0 => (117, [110, 12, ALL]),
                _ => {
                    let size = 2 + random.usize(..ALL - 2);
                    let cluster = size - size % 32;
                    let first = (cluster + random.usize(..32)).min(ALL - 1);
                    (first, [size, 1 + random.usize(..size), ALL])
                }
            };
            let data = [round; SECTOR];
            rig.write((first * SECTOR) as u64, &data, 0).unwrap();
            model[first * SECTOR..][..SECTOR].copy_from_slice(&data);
            for size in sizes {
                assert_eq!(resize(&node, size * SECTOR), Ok(()));
                model.resize(size * SECTOR, 0);
                let found = contents(&node);
                let wrong =
                    found.iter().zip(&model).position(|(found, expected)| found != expected);
                let wrong = wrong.map(|at| at / SECTOR);
                assert_eq!(wrong, None, "wrong sector, seed {seed}, {first} in {sizes:?}, {size}");
            }
        }
        drop((rig, node));
        judge(&folder, "disk.qcow2", &model);
    }
}
