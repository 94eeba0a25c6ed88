//! Commands that do something, and the ways in which they do not.

use std::rc::Rc;

use block::node::Channel;
use block::request::Op;
use event_loop::{EventLoop, LoopConfig};
use guest_memory::test_util::memfd_memory;
use nix::errno::Errno;
use queue::Inflight;

use crate::scsi::rig::{BLOCKS, Disk, ENTRIES, Rig};

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 9, 0, 0, 2, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 9, 0, 0, 2, 0];

fn ops(rig: &Rig) -> Vec<(Op, u64, u64)> {
    rig.disks[0].log.take()
}

#[test]
fn data_may_be_split_in_any_way() {
    let mut rig = Rig::new();
    let data: Vec<u8> = (0..1024u32).map(|n| (n % 255) as u8).collect();
    for cut in [19, 53, 108, 512, u32::MAX] {
        rig.disks[0].data.borrow_mut().fill(0);
        let lun = [1, 0, 0x40, 0, 0, 0, 0, 0];
        let slot = rig.add(2, lun, 1, &WRITE, &data, 0, cut);
        rig.publish(2);
        let (_, written) = rig.reap(2);
        let reply = rig.reply(slot, 0, written);
        assert_eq!((reply.response, reply.status, written), (0, 0, 108), "cut by {cut}");
        assert_eq!(rig.disks[0].data.borrow()[9 * 512..11 * 512], data);
        let slot = rig.add(3, lun, 2, &READ, &[], 1024, cut);
        rig.publish(3);
        let (_, written) = rig.reap(3);
        assert_eq!(rig.reply(slot, 1024, written).good(), data, "cut by {cut}");
    }
}

#[test]
fn the_buffer_and_the_cdb_may_disagree() {
    let mut rig = Rig::new();
    let reply = rig.command(0, &READ, &[], 1000);
    assert_eq!((reply.response, reply.residual, reply.written), (1, 1000, 108), "OVERRUN");
    let reply = rig.command(0, &WRITE, &[0; 1023], 0);
    assert_eq!((reply.response, reply.residual), (1, 1023));
    let reply = rig.command(0, &READ, &[], 1500);
    assert_eq!((reply.response, reply.status, reply.residual), (0, 0, 476));
    assert_eq!((reply.written, reply.data[1024]), (108 + 1024, 0xee));
    let reply = rig.command(0, &WRITE, &[1; 1030], 0);
    assert_eq!((reply.response, reply.status, reply.residual), (0, 0, 6));
    let reply = rig.command(0, &READ, &[0; 8], 1024);
    assert_eq!(reply.response, 9, "data both ways: FAILURE");
    let nothing = [0x28, 0, 0, 0, 0, 9, 0, 0, 0, 0];
    let reply = rig.command(0, &nothing, &[], 0);
    assert_eq!((reply.response, reply.status), (0, 0), "no blocks is no error");
}

#[test]
fn blocks_beyond_the_end_are_out_of_range() {
    let mut rig = Rig::new();
    for (lba, count, ok) in [
        (u64::from(BLOCKS) - 1, 1, true),
        (u64::from(BLOCKS), 0, true),
        (u64::from(BLOCKS), 1, false),
        (u64::from(BLOCKS) - 1, 2, false),
        (u64::MAX, 1, false),
        (u64::MAX, 0, false),
    ] {
        for opcode in [0x88, 0x8a, 0x8f, 0x91] {
            let mut cdb = [0; 16];
            cdb[0] = opcode;
            cdb[2..10].copy_from_slice(&lba.to_be_bytes());
            cdb[13] = count;
            let len = u32::from(count) * 512;
            let reply = match opcode {
                0x88 => rig.command(0, &cdb, &[], len),
                0x8a => rig.command(0, &cdb, &vec![0; len as usize], 0),
                _ => rig.command(0, &cdb, &[], 0),
            };
            if ok {
                assert_eq!((reply.response, reply.status), (0, 0), "{opcode:x} {lba} {count}");
            } else {
                assert_eq!(reply.code(), (5, 0x21, 0), "{opcode:x} {lba} {count}");
                assert_eq!(reply.residual, if opcode < 0x8f { len } else { 0 });
            }
        }
    }
}

#[test]
fn the_write_cache_is_switched_and_writes_follow() {
    let mut rig = Rig::new();
    assert_eq!(rig.command(0, &WRITE, &[1; 1024], 0).status, 0);
    assert_eq!(ops(&rig), [(Op::Write { fua: false }, 9 * 512, 1024)]);
    let mut forced = WRITE;
    forced[1] = 0x08;
    assert_eq!(rig.command(0, &forced, &[1; 1024], 0).status, 0);
    assert_eq!(ops(&rig), [(Op::Write { fua: true }, 9 * 512, 1024)]);
    assert_eq!(rig.command(0, &[0x35], &[], 0).status, 0);
    assert_eq!(rig.command(0, &[0x1b, 0, 0, 0, 0, 0], &[], 0).status, 0, "stopping flushes");
    assert_eq!(rig.command(0, &[0x1b, 0, 0, 0, 1, 0], &[], 0).status, 0, "starting does not");
    assert_eq!(ops(&rig), [(Op::Flush, 0, 0); 2]);

    let mut list = vec![0, 0, 0, 0, 0x08, 18];
    list.resize(24, 0);
    let select = [0x15, 0x10, 0, 0, 24, 0];
    assert_eq!(rig.command(0, &select, &list, 0).status, 0, "WCE off");
    assert_eq!(ops(&rig), [(Op::Flush, 0, 0)], "what is in the cache goes first");
    assert_eq!(rig.command(0, &WRITE, &[1; 1024], 0).status, 0);
    assert_eq!(ops(&rig), [(Op::Write { fua: true }, 9 * 512, 1024)]);
    assert_eq!(rig.command(0, &[0x1a, 8, 0x08, 0, 24, 0], &[], 24).good()[6], 0);
    list[6] = 0x04;
    assert_eq!(rig.command(0, &select, &list, 0).status, 0, "WCE on");
    assert_eq!(rig.command(0, &WRITE, &[1; 1024], 0).status, 0);
    assert_eq!(ops(&rig), [(Op::Write { fua: false }, 9 * 512, 1024)]);

    list[6] = 0x05;
    let reply = rig.command(0, &select, &list, 0);
    assert_eq!(reply.code(), (5, 0x26, 0), "INVALID FIELD IN PARAMETER LIST: RCD");
    assert_eq!(reply.sense[15..], [0x80, 0, 6]);
    assert_eq!(rig.command(0, &[0x15, 0x10, 0, 0, 10, 0], &list, 0).code(), (5, 0x1a, 0));
    assert_eq!(rig.command(0, &[0x15, 0x10, 0, 0, 0, 0], &[], 0).status, 0, "no list");
}

#[test]
fn space_is_given_back() {
    let mut rig = Rig::new();
    let mut list = vec![0, 38, 0, 32, 0, 0, 0, 0];
    for (lba, count) in [(8u64, 8u32), (64, 1)] {
        list.extend(lba.to_be_bytes());
        list.extend(count.to_be_bytes());
        list.extend([0; 4]);
    }
    let unmap = |len: u8| [0x42, 0, 0, 0, 0, 0, 0, 0, len, 0];
    assert_eq!(rig.command(0, &unmap(40), &list, 0).status, 0);
    assert_eq!(ops(&rig), [(Op::Discard, 4096, 4096), (Op::Discard, 64 * 512, 512)]);
    assert_eq!(rig.command(0, &unmap(0), &[], 0).status, 0, "no list");
    assert_eq!(rig.command(0, &unmap(8), &[0; 8], 0).status, 0, "no descriptors");
    assert_eq!(rig.command(0, &unmap(7), &[0; 7], 0).code(), (5, 0x1a, 0));
    list[24..32].copy_from_slice(&u64::from(BLOCKS).to_be_bytes());
    assert_eq!(rig.command(0, &unmap(40), &list, 0).code(), (5, 0x21, 0));
    assert_eq!(ops(&rig), [], "none, if one is wrong");
    list[2..4].copy_from_slice(&(65u16 * 16).to_be_bytes());
    assert_eq!(rig.command(0, &unmap(40), &list, 0).code(), (5, 0x26, 0), "too many");
}

#[test]
fn the_same_block_is_written_again_and_again() {
    let mut rig = Rig::new();
    let same = |flags: u8, count: u16| {
        let [high, low] = count.to_be_bytes();
        [0x41, flags, 0, 0, 0, 3, 0, high, low, 0]
    };
    let zeroes = |may_unmap| Op::WriteZeroes { may_unmap, no_fallback: false, fua: false };
    assert_eq!(rig.command(0, &same(0, 8), &[0; 512], 0).status, 0);
    assert_eq!(rig.command(0, &same(8, 8), &[0; 512], 0).status, 0);
    let (at, len) = (3 * 512, 8 * 512);
    assert_eq!(ops(&rig), [(zeroes(false), at, len), (zeroes(true), at, len)]);
    let no_data = [0x93, 9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0];
    assert_eq!(rig.command(0, &no_data, &[], 0).status, 0, "NDOB");
    assert_eq!(ops(&rig), [(zeroes(true), at, len)]);

    // More than fits into one write, of something else than zeroes.
    let block: Vec<u8> = (0..512u32).map(|n| (n % 7) as u8).collect();
    let count = 2000;
    assert_eq!(rig.command(0, &same(8, count), &block, 0).status, 0);
    let written = rig.disks[0].data.borrow();
    let end = 3 + usize::from(count);
    assert!(written[3 * 512..end * 512].chunks(512).all(|chunk| chunk == block));
    assert_ne!(written[end * 512..][..512], block[..], "and no more");
    drop(written);
    assert_eq!(ops(&rig).len(), 2);
    assert_eq!(rig.command(0, &same(0, 8), &[0; 511], 0).response, 1, "OVERRUN");

    rig.disks[0].fails.set(Some(Errno::EIO));
    assert_eq!(rig.command(0, &same(0, count), &block, 0).code(), (3, 0x0c, 0));
    assert_eq!(ops(&rig).len(), 1, "an error ends it");
}

#[test]
fn errors_of_the_disk_keep_their_meaning() {
    let mut rig = Rig::new();
    for (errno, read, write) in [
        (Errno::EIO, (3, 0x11, 0), (3, 0x0c, 0)),
        (Errno::ENOSPC, (7, 0x27, 7), (7, 0x27, 7)),
        (Errno::EROFS, (7, 0x27, 0), (7, 0x27, 0)),
        (Errno::EOPNOTSUPP, (5, 0x20, 0), (5, 0x20, 0)),
        (Errno::ENOMEM, (4, 0x44, 0), (4, 0x44, 0)),
    ] {
        rig.disks[0].fails.set(Some(errno));
        let reply = rig.command(0, &READ, &[], 1024);
        assert_eq!((reply.code(), reply.residual, reply.written), (read, 1024, 108));
        assert_eq!(rig.command(0, &WRITE, &[0; 1024], 0).code(), write);
    }
}

#[test]
fn blocks_of_another_size() {
    let mut rig = Rig::with(|config| config.logical_block_size = 4096);
    rig.command(0, &[0], &[], 0).code();
    let read = [0x28, 0, 0, 0, 0, 2, 0, 0, 1, 0];
    assert_eq!(rig.command(0, &read, &[], 4096).good()[..512], [16; 512]);
    assert_eq!(ops(&rig), [(Op::Read, 8192, 4096)]);
    let end = [0x28, 0, 0, 0, 1, 0, 0, 0, 1, 0];
    assert_eq!(rig.command(0, &end, &[], 4096).code(), (5, 0x21, 0));
}

#[test]
fn a_chain_without_room_for_a_response_breaks_its_queue_only() {
    let mut rig = Rig::new();
    let slot = rig.slot();
    let request = queue::Segment { addr: slot, len: 51 };
    let response = queue::Segment { addr: slot + 512, len: 107 };
    rig.drivers[2].add(&[request], &[response]).unwrap();
    rig.publish(2);
    assert_eq!(rig.reap(2).1, 0, "it goes back");
    let lun = [1, 0, 0x40, 0, 0, 0, 0, 0];
    rig.add(2, lun, 1, &[0], &[], 0, u32::MAX);
    rig.publish(2);
    assert!(rig.nothing_comes(2), "a broken queue takes nothing");
    rig.add(3, lun, 1, &[0], &[], 0, u32::MAX);
    rig.publish(3);
    assert_eq!(rig.reap(3).1, 108, "the other one does");
    assert!(rig.stop(2).get(), "and it can be stopped");
}

/// Discards and repeated blocks are more to do than the bytes of their chains.
#[test]
fn a_ring_of_unmaps_is_taken_bit_by_bit() {
    let ranges: Vec<u8> = (0..64u64)
        .flat_map(|n| [&n.to_be_bytes()[..], &1u32.to_be_bytes(), &[0; 4]].concat())
        .collect();
    let len = ranges.len() as u16;
    let header = [(len + 6).to_be_bytes(), len.to_be_bytes(), [0; 2], [0; 2]].concat();
    let list = [header, ranges].concat();
    let [high, low] = (len + 8).to_be_bytes();
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, high, low, 0];
    // WRITE SAME (10) of 1024 blocks: 512 KiB.
    let same = [0x41, 0, 0, 0, 0, 0, 0, 4, 0, 0];
    for (cdb, out, most) in [(unmap, &list[..], 4 * 64), (same, &[1; 512][..], 3)] {
        let mut rig = Rig::new();
        for id in 0..16 {
            rig.add(2, [1, 0, 0x40, 0, 0, 0, 0, 0], id, &cdb, out, 0, u32::MAX);
        }
        rig.publish(2);
        let begun = rig.disks[0].log.borrow().len();
        assert!((1..=most).contains(&begun), "{begun} requests of {cdb:?} in one turn");
        for _ in 0..16 {
            rig.reap(2);
        }
    }
}

/// A disk may say so at any time. When the loop has ended it means that nothing was done.
#[test]
fn requests_cancelled_with_their_loop_are_left_in_the_record() {
    let memory = memfd_memory(&[(0, Inflight::region_len(ENTRIES) as u64)]).unwrap();
    let record = || Inflight::new(&memory, memory.regions()[0].user_addr(), ENTRIES).ok();
    for (ends, has_record) in [(false, true), (true, false), (true, true)] {
        let disks = [Disk::new(), Disk::new()];
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
        let record = if has_record { record() } else { None };
        let mut rig = Rig::on_with(event_loop, channels, disks, |_| {}, record);
        assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x29, 0), "POWER ON");
        rig.disks[0].holds.set(true);
        rig.disks[0].fails.set(Some(Errno::ECANCELED));
        rig.add(2, [1, 0, 0x40, 0, 0, 0, 0, 0], 1, &WRITE, &[1; 1024], 0, u32::MAX);
        rig.publish(2);
        if ends {
            rig.event_loop.shut_down().unwrap();
        }
        rig.disks[0].release();
        let is_answered = rig.drivers[2].reap().is_some();
        assert_eq!(is_answered, !(ends && has_record), "ends: {ends}, record: {has_record}");
    }
}
