//! An image whose data file is the disk as it is: after a power cut, both the file by itself and the image on top of it have
//! what was flushed.

use std::process::Command;

use block::NodeRegistry;
use block::options::*;
use block::request::Op;
use event_loop::IoBufs;
use event_loop::LoopConfig;
use event_loop::ring::sim::{Faults, Sim};
use fastrand::Rng;

use crate::common::{Rig, TempFile, blockdev, file_options, filled, tmpfs};
use crate::power::course::NO_POLLING;
use crate::power::guest::{Change, Disk, SECTOR, sector};
use crate::power::path_of;

const CLUSTER: usize = 4096;
/// Not a whole number of clusters.
const SIZE: usize = 40 * CLUSTER + 3 * SECTOR;

/// What the disk has by the image's metadata: version 3, nothing compressed.
fn seen(image: &[u8], data: &[u8]) -> Vec<u8> {
    let number = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap());
    let size = number(24) as usize;
    let mut contents = vec![0; size];
    for (nth, place) in contents.chunks_mut(CLUSTER).enumerate() {
        let per_table = CLUSTER / 8;
        let table = number(number(40) as usize + nth / per_table * 8) & 0x00ff_ffff_ffff_fe00;
        let entry = if table == 0 { 0 } else { number(table as usize + nth % per_table * 8) };
        let is_mapped = entry >> 63 != 0 && entry & 1 == 0;
        if is_mapped {
            let host = (entry & 0x00ff_ffff_ffff_fe00) as usize;
            assert_eq!(host, nth * CLUSTER, "guest and file have the same offsets");
            let there = data.get(host..).unwrap_or_default();
            let len = there.len().min(place.len());
            place[..len].copy_from_slice(&there[..len]);
        }
    }
    contents
}

fn course(seed: u64) {
    let mut random = Rng::with_seed(seed + 1);
    let files = ["image", "data"]
        .map(|name| TempFile::new(&tmpfs(), &format!("power-raw-{seed}-{name}"), 0));
    let [image, data] = &files;
    let options = format!("cluster_size=4k,data_file={},data_file_raw=on", data.0.display());
    let create = ["create", "-q", "-f", "qcow2", "-o", &options, image.0.to_str().unwrap()];
    let made = Command::new("qemu-img").args(create).arg(SIZE.to_string()).status();
    assert!(made.expect("qemu-img (scripts/setup-tests.sh)").success());
    let sim = Sim::new(seed, Faults { latency_ns: (1_000, 20_000), ..Faults::default() });
    let [fd, data_fd] = [image, data].map(|file| sim.file(&file.contents()).unwrap());
    let below = |fd, name| {
        let file = FileOptions { locking: Locking::Off, ..file_options(&path_of(fd), None) };
        let discard = Discard::Unmap;
        let file = BlockdevOptions { discard, ..blockdev(name, Driver::file(file)) };
        BlockdevRef::Inline(Box::new(file))
    };
    let driver = Driver::from(Qcow2Options {
        file: below(&fd, "file"),
        data_file: Some(below(&data_fd, "data")),
        backing: Backing::None,
        ..Qcow2Options::default()
    });
    let options = BlockdevOptions { discard: Discard::Unmap, ..blockdev("disk", driver) };
    let node = NodeRegistry::new().open(&options).unwrap();
    let config = LoopConfig { poll: NO_POLLING, ..LoopConfig::default() };
    let mut rig = Rig::on(sim.event_loop(config).unwrap(), node);
    let mut disk = Disk::new(&[0; SIZE], false);
    for stamp in 1..60 {
        let first = random.usize(..SIZE / SECTOR);
        let longest = [1, 8, 40][random.usize(..3)];
        let range = first..(first + 1 + random.usize(..longest)).min(SIZE / SECTOR);
        let fua = random.usize(..8) == 0;
        let (op, change) = match random.usize(..8) {
            0 => (Op::Flush, None),
            1 => (Op::Discard, Some(Change::Discarded)),
            may_unmap @ 2..4 => {
                let may_unmap = may_unmap == 2;
                (Op::WriteZeroes { may_unmap, no_fallback: false, fua }, Some(Change::Zeroed))
            }
            _ => (Op::Write { fua }, Some(Change::Written(stamp))),
        };
        let bufs = match change {
            Some(Change::Written(stamp)) => {
                let sectors = range.clone().flat_map(|number| sector(stamp, number as u64));
                filled(&sectors.collect::<Vec<u8>>(), 0)
            }
            _ => IoBufs::new(),
        };
        let at = disk.now();
        if let Some(change) = change {
            disk.begin(range.clone(), change);
        }
        let (offset, len) = match change {
            Some(_) => ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64),
            None => (0, 0),
        };
        let tag = rig.submit(op, offset, len, bufs);
        loop {
            if let Some((result, _)) = rig.answer(tag) {
                result.unwrap();
                break;
            }
            rig.event_loop.run_once(sim.in_flight() > 0).unwrap();
            if random.usize(..4) == 0 {
                check(&sim, [&fd, &data_fd], &disk, &mut random, seed);
            }
        }
        match change {
            Some(_) => disk.answered(range, fua && op != Op::Discard),
            None => disk.flushed(at),
        }
        check(&sim, [&fd, &data_fd], &disk, &mut random, seed);
    }
    rig.event_loop.shut_down().unwrap();
}

/// Cuts the power, and looks at what is left.
fn check(
    sim: &Sim,
    files: [&std::sync::Arc<std::os::fd::OwnedFd>; 2],
    disk: &Disk,
    random: &mut Rng,
    seed: u64,
) {
    let [image, mut data] = files.map(|fd| sim.cut(fd, random.u64(..)).unwrap());
    data.resize(SIZE, 0);
    let checked = disk.check_cut(&seen(&image, &data));
    assert_eq!(checked, Ok(()), "seed {seed}, by the image");
    assert_eq!(disk.check_cut(&data), Ok(()), "seed {seed}, the data file by itself");
    assert_ne!(image[95] & 2, 0, "seed {seed}: the data file is not said to be raw any more");
}

#[test]
fn a_raw_data_file_has_what_was_flushed() {
    (0..30).for_each(course);
}
