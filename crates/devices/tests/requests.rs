//! Valid and invalid requests get the answers that the specification requires.

use crate::rig;

use block::options::{BlockdevOptions, Driver, FileOptions, Locking};
use std::cell::RefCell;
use std::rc::Rc;

use devices::virtio::Held;
use queue::Segment;
use rig::*;
use stats::Kind;

const SECTORS: u64 = (1 << 30) / 512;

fn null(size: u16) -> Rig {
    Rig::new(&null_options(), size, 0)
}

/// A disk of 1 MiB in a file.
fn file(name: &str) -> (Rig, std::path::PathBuf) {
    let path = std::env::temp_dir().join(format!("virtio-blk-{name}-{}", std::process::id()));
    std::fs::write(&path, vec![0x55; 1 << 20]).unwrap();
    let file = FileOptions { filename: path.clone(), aio: None, locking: Locking::Off };
    let options = BlockdevOptions { driver: Driver::file(file), ..null_options() };
    (Rig::new(&options, 64, 0), path)
}

#[test]
fn data_goes_to_the_image_and_back() {
    let (mut rig, path) = file("data");
    let data: Vec<u8> = (0..8192u32).map(|n| (n % 251) as u8).collect();
    assert_eq!(rig.request(OUT, 8, &data, 0), OK);
    assert_eq!(rig.request(FLUSH, 0, &[], 0), OK);
    assert_eq!(&std::fs::read(&path).unwrap()[4096..4096 + 8192], &data[..]);
    assert_eq!(rig.request(IN, 8, &[], 8192), OK);
    assert_eq!(rig.reply(8192), data);
    assert_eq!(rig.request(IN, 0, &[], 512), OK);
    assert_eq!(rig.reply(512), [0x55; 512]);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let (mut rig, path) = file("ranges");
    let two: Vec<u8> = [range(8, 8, 1), range(64, 8, 0)].concat();
    assert_eq!(rig.request(WRITE_ZEROES, 0, &two, 0), OK);
    let image = std::fs::read(&path).unwrap();
    assert!(image[4096..8192].iter().chain(&image[32768..36864]).all(|&b| b == 0));
    assert!(image[8192..32768].iter().all(|&b| b == 0x55));
    assert_eq!(rig.request(DISCARD, 0, &range(16, 8, 0), 0), OK);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_id_is_the_serial_number_padded_with_zeroes() {
    let mut rig = null(8);
    assert_eq!(rig.request(GET_ID, 0, &[], 20), OK);
    assert_eq!(rig.reply(20), *b"ringmill-test\0\0\0\0\0\0\0");
    assert_eq!(rig.request(GET_ID, 0, &[], 8), OK, "a short buffer gets what fits");
    assert_eq!(rig.reply(8), *b"ringmill");
}

#[test]
fn requests_beyond_the_end_or_across_blocks_are_io_errors() {
    let mut rig = null(8);
    let data = [0; 512];
    assert_eq!(rig.request(IN, SECTORS - 1, &[], 512), OK);
    assert_eq!(rig.request(IN, SECTORS, &[], 512), IOERR);
    assert_eq!(rig.request(IN, SECTORS - 1, &[], 1024), IOERR);
    assert_eq!(rig.request(IN, u64::MAX, &[], 512), IOERR, "the offset overflows");
    assert_eq!(rig.request(IN, u64::MAX / 512, &[], 512), IOERR, "the end overflows");
    assert_eq!(rig.request(OUT, SECTORS, &data, 0), IOERR);
    assert_eq!(rig.request(OUT, 0, &data[..100], 0), IOERR);
    assert_eq!(rig.request(IN, 0, &[], 511), IOERR);
    assert_eq!(rig.stats.errors(), 7);
}

#[test]
fn blocks_larger_than_sectors_are_kept_to() {
    let mut rig = Rig::with(&null_options(), 8, 0, |config| config.logical_block_size = 4096);
    assert_eq!(rig.request(IN, 8, &[], 4096), OK);
    assert_eq!(rig.request(IN, 1, &[], 4096), IOERR);
    assert_eq!(rig.request(IN, 8, &[], 512), IOERR);
}

#[test]
fn a_read_only_disk_takes_no_writes() {
    let mut rig = Rig::with(&null_options(), 8, 0, |config| config.writable = false);
    assert_eq!(rig.request(IN, 0, &[], 512), OK);
    assert_eq!(rig.request(FLUSH, 0, &[], 0), OK);
    assert_eq!(rig.request(OUT, 0, &[0; 512], 0), IOERR);
    assert_eq!(rig.request(DISCARD, 0, &range(0, 8, 0), 0), IOERR);
    assert_eq!(rig.request(WRITE_ZEROES, 0, &range(0, 8, 0), 0), IOERR);
}

#[test]
fn unknown_requests_are_unsupported() {
    let mut rig = null(8);
    for unknown in [2, 3, 5, 9, 10, 12, 14, 15, 0x8000_0000, u32::MAX] {
        assert_eq!(rig.request(unknown, 0, &[], 512), UNSUPP, "type {unknown}");
    }
}

#[test]
fn ranges_with_wrong_flags_counts_or_bounds_are_refused() {
    let mut rig = null(8);
    assert_eq!(rig.request(DISCARD, 0, &range(0, 8, 0), 0), OK);
    assert_eq!(rig.request(DISCARD, 0, &range(0, 8, 1), 0), UNSUPP, "unmap on a discard");
    assert_eq!(rig.request(WRITE_ZEROES, 0, &range(0, 8, 1), 0), OK);
    assert_eq!(rig.request(WRITE_ZEROES, 0, &range(0, 8, 2), 0), UNSUPP, "a reserved flag");
    assert_eq!(rig.request(DISCARD, 0, &[], 0), UNSUPP, "no range");
    assert_eq!(rig.request(DISCARD, 0, &[0; 15], 0), UNSUPP, "half a range");
    assert_eq!(rig.request(DISCARD, 0, &[0; 16 * 17], 0), UNSUPP, "more than max_discard_seg");
    assert_eq!(rig.request(DISCARD, 0, &range(SECTORS, 1, 0), 0), IOERR);
    assert_eq!(rig.request(DISCARD, 0, &range(u64::MAX, u32::MAX, 0), 0), IOERR);
    assert_eq!(rig.request(DISCARD, 0, &range(0, (1 << 21) + 1, 0), 0), IOERR, "too long");
    let bad_second: Vec<u8> = [range(0, 8, 0), range(SECTORS, 8, 0)].concat();
    assert_eq!(rig.request(DISCARD, 0, &bad_second, 0), IOERR);
}

/// Other sources of the loop run between two turns, without another kick.
#[test]
fn a_ring_of_large_requests_is_taken_bit_by_bit() {
    let mut rig = null(256);
    let (count, len) = (64, 48 << 10);
    for _ in 0..count {
        rig.add(IN, 0, &[], len);
    }
    rig.publish();
    let mut turns = 0;
    while rig.stats.done(Kind::Read) < count {
        let before = rig.stats.done(Kind::Read);
        rig.event_loop.run_once(true).unwrap();
        let bytes = (rig.stats.done(Kind::Read) - before) * u64::from(len);
        assert!(bytes <= (1 << 20) + u64::from(len), "{bytes} bytes in one turn");
        turns += 1;
    }
    assert!(turns >= 3, "{turns}");
}

/// The maximum number of requests taken per turn, and the number of turns.
fn turns(rig: &mut Rig, count: u64) -> (u64, u32) {
    rig.publish();
    let (mut most, mut turns) = (0, 0);
    while rig.stats.taken.get() < count {
        let before = rig.stats.taken.get();
        rig.event_loop.run_once(true).unwrap();
        let taken = rig.stats.taken.get() - before;
        most = most.max(taken);
        turns += u32::from(taken > 0);
    }
    (most, turns)
}

/// Each descriptor has a cost, as it has to be read, checked and translated.
#[test]
fn a_ring_of_requests_in_crumbs_is_taken_bit_by_bit() {
    let mut rig = null(64);
    let at = 1 << 20;
    rig.memory.write_bytes(at, &[0; 16]).unwrap();
    let header = queue::Segment { addr: at, len: 16 };
    let crumb = |i: u64| queue::Segment { addr: at + 4096 + i, len: 1 };
    // 512 bytes to be read, and the status; in an indirect table.
    let crumbs: Vec<_> = (0..513).map(crumb).collect();
    for _ in 0..16 {
        rig.driver.add_indirect(at + (64 << 10), &[header], &crumbs).unwrap().unwrap();
    }
    let (most, _) = turns(&mut rig, 16);
    assert!(most <= 3, "{most} requests of 514 segments in one turn");
}

#[test]
fn a_ring_of_discards_is_taken_bit_by_bit() {
    for kind in [DISCARD, WRITE_ZEROES] {
        let mut rig = null(256);
        let ranges: Vec<u8> = (0..16).flat_map(|n| range(n * 8, 8, 0)).collect();
        for _ in 0..64 {
            rig.add(kind, 0, &ranges, 0);
        }
        let (most, _) = turns(&mut rig, 64);
        assert!(most <= 16, "{most} requests of 16 ranges in one turn");
    }
}

/// Common requests fill a whole turn.
#[test]
fn a_ring_of_ordinary_requests_is_taken_at_once() {
    let mut rig = null(1024);
    for _ in 0..256 {
        rig.add(IN, 0, &[], 4096);
    }
    assert_eq!(turns(&mut rig, 256), (256, 1));
}

#[test]
fn a_short_header_is_answered_and_breaks_nothing() {
    let mut rig = null(8);
    let [header, status] =
        [(1 << 20, 15), ((1 << 20) + 64, 1)].map(|(addr, len)| Segment { addr, len });
    rig.memory.write_bytes(status.addr, &[0xff]).unwrap();
    rig.driver.add(&[header], &[status]).unwrap();
    rig.publish();
    rig.reap(1);
    assert_eq!(rig.memory.read_u8(status.addr).unwrap(), IOERR);
    assert_eq!(rig.request(IN, 0, &[], 512), OK);
}

#[test]
fn deviations_of_a_driver_and_its_breaking_a_queue_are_reported_with_the_queue() {
    let mut rig = null(8);
    let reports = Rc::<RefCell<Vec<String>>>::default();
    let told = reports.clone();
    rig.handler.set_report(Rc::new(move |text| told.borrow_mut().push(text)));
    let [header, empty, status] =
        [(1 << 20, 16), (1 << 20, 0), ((1 << 20) + 64, 1)].map(|(addr, len)| Segment { addr, len });
    for _ in 0..2 {
        rig.driver.add(&[header], &[empty, status]).unwrap();
        rig.publish();
        rig.reap(1);
    }
    assert_eq!(
        *reports.borrow(),
        [
            "the driver of virtio-blk queue 0 sends buffers of no bytes, which are ignored; served all the same"
        ]
    );
    rig.driver.add(&[header], &[]).unwrap();
    rig.publish();
    while !rig.handler_is_broken() {
        rig.event_loop.run_once(true).unwrap();
    }
    let reports = reports.borrow();
    assert!(reports[1].starts_with("virtio-blk queue 0 stops, its driver broke the rules: "));
}

#[test]
fn a_chain_without_room_for_a_status_breaks_its_queue_only() {
    let mut rig = null(8);
    let header = queue::Segment { addr: 1 << 20, len: 16 };
    rig.driver.add(&[header], &[]).unwrap();
    rig.publish();
    while !rig.handler_is_broken() {
        rig.event_loop.run_once(true).unwrap();
    }
    rig.add(IN, 0, &[], 512);
    rig.publish();
    for _ in 0..10 {
        rig.event_loop.run_once(false).unwrap();
    }
    assert_eq!(rig.stats.done(Kind::Read), 0, "a broken queue takes nothing");
    let base = std::rc::Rc::new(std::cell::Cell::new(None));
    let out = base.clone();
    rig.handler.stop(Held::Left, Box::new(move |next| out.set(Some(next))));
    assert!(base.get().is_some(), "and can be stopped");
}

impl Rig {
    fn handler_is_broken(&self) -> bool {
        format!("{:?}", self.handler).contains("broken: Cell { value: true }")
    }
}

#[test]
fn the_write_cache_follows_the_toggle_and_the_features() {
    let rig = null(8);
    assert_eq!(rig.device.config_space()[32], 1, "write-back at first");
    rig.device.write_config(32, &[0]).unwrap();
    assert_eq!(rig.device.config_space()[32], 0);
    // As QEMU's device: any value but 0 is on, and bytes that are not the driver's are ignored.
    rig.device.write_config(32, &[2]).unwrap();
    assert_eq!(rig.device.config_space()[32], 1);
    let before = rig.device.config_space();
    assert!(rig.device.write_config(0, &[0; 8]).is_err(), "the capacity is not the driver's");
    assert!(rig.device.write_config(u32::MAX, &[0; 8]).is_err());
    assert_eq!(rig.device.config_space(), before);
    assert!(rig.device.write_config(31, &[9, 0]).is_err(), "is told of the ignored byte");
    assert_eq!(rig.device.config_space()[31..33], [before[31], 0]);
    rig.device.reset();
    assert_eq!(rig.device.config_space()[32], 1);
}
