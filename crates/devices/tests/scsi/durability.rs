//! What a logical unit has said to be on the medium is there when the power is cut right then.

use std::rc::Rc;
use std::sync::Arc;

use block::node::Channel;
use block::test_util::{Format, VolatileDisk};
use devices::virtio::CacheRecord;
use devices::virtio_scsi::DeviceConfig;

use crate::scsi::rig::*;

/// The blocks that are written, from here on.
const LBA: u8 = 24;
const LEN: usize = 4096;

struct Machine {
    disk: VolatileDisk,
    rig: Rig,
    format: Format,
}

impl Machine {
    fn new(format: Format, change: impl FnOnce(&mut DeviceConfig)) -> Machine {
        let disk = VolatileDisk::new(format, SIZE as u64);
        let event_loop = disk.event_loop();
        let channel = disk.node().clone().open_channel(&event_loop).unwrap();
        let other = Disk::new();
        let channels: Vec<Rc<dyn Channel>> = vec![channel, other.clone()];
        let mut rig = Rig::on(event_loop, channels, [other.clone(), other], change);
        assert_eq!(rig.command(0, &[0], &[], 0).code(), (6, 0x29, 0), "POWER ON");
        Machine { disk, rig, format }
    }

    /// A command with data for the device.
    fn good(&mut self, cdb: &[u8], out: &[u8]) {
        let reply = self.rig.command(0, cdb, out, 0);
        assert_eq!((reply.response, reply.status), (0, 0), "{:?}, {cdb:x?}", self.format);
    }

    /// Writes `byte` over the blocks by a command; whether a power cut leaves it.
    fn write(&mut self, cdb: &[u8], byte: u8) -> bool {
        self.good(cdb, &[byte; LEN]);
        self.has(byte)
    }

    fn has(&self, byte: u8) -> bool {
        self.disk.after_cut(u64::from(LBA) * 512, LEN) == [byte; LEN]
    }

    /// The write cache, by MODE SELECT of the caching page.
    fn set_write_cache(&mut self, on: bool) {
        let mut list = vec![0, 0, 0, 0, 0x08, 18, u8::from(on) << 2];
        list.resize(24, 0);
        self.good(&[0x15, 0x10, 0, 0, 24, 0], &list);
    }
}

/// A command over the blocks, by its code, with these bits in its second byte.
fn cdb(code: u8, bits: u8) -> Vec<u8> {
    const COUNT: u8 = (LEN / 512) as u8;
    match code >> 5 {
        0 => vec![code, 0, 0, LBA, COUNT, 0],
        1 | 2 => vec![code, bits, 0, 0, 0, LBA, 0, 0, COUNT, 0],
        4 => vec![code, bits, 0, 0, 0, 0, 0, 0, 0, LBA, 0, 0, 0, COUNT, 0, 0],
        _ => vec![code, bits, 0, 0, 0, LBA, 0, 0, 0, COUNT, 0, 0],
    }
}

/// WRITE (6), (10), (12) and (16).
const WRITES: [u8; 4] = [0x0a, 0x2a, 0xaa, 0x8a];

#[test]
fn flushed_data_survives() {
    let flushes: [&[u8]; 4] = [
        &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        // IMMED: it may be answered before, and is not.
        &[0x35, 2, 0, 0, 0, 0, 0, 0, 0, 0],
        // START STOP UNIT, to stop.
        &[0x1b, 0, 0, 0, 0, 0],
    ];
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        for (byte, flush) in (1..).zip(flushes) {
            let write = cdb(0x2a, 0);
            assert!(!machine.write(&write, byte), "a cache that keeps nothing back tests nothing");
            machine.good(flush, &[]);
            assert!(machine.has(byte), "{format:?}, {flush:x?}");
        }
    }
}

#[test]
fn writes_with_forced_unit_access_survive() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        for (byte, code) in (1..).zip(&WRITES[1..]) {
            assert!(machine.write(&cdb(*code, 0x08), byte), "{format:?}, {code:#x}");
        }
        // WRITE AND VERIFY (10), (12), (16).
        for (byte, code) in (11..).zip([0x2e, 0xae, 0x8e]) {
            assert!(machine.write(&cdb(code, 0), byte), "{format:?}, {code:#x}");
        }
        for (byte, code) in (21..).zip(WRITES) {
            assert!(!machine.write(&cdb(code, 0), byte), "{format:?}, {code:#x} without");
        }
    }
}

/// WRITE SAME (10) and (16) of zeroes and of others, without and with UNMAP.
fn write_same(machine: &mut Machine) {
    for code in [0x41, 0x93] {
        for bits in [0, 0x08] {
            for byte in [5, 0] {
                machine.good(&cdb(code, bits), &[byte; 512]);
                assert!(machine.has(byte), "{:?}, {code:#x}, {bits:#x}, {byte}", machine.format);
            }
        }
    }
}

#[test]
fn with_the_cache_off_each_write_survives() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        assert!(!machine.write(&cdb(0x2a, 0), 1));
        machine.set_write_cache(false);
        assert!(machine.has(1), "{format:?}: what was in the cache has gone to the medium");
        for (byte, code) in (2..).zip(WRITES) {
            assert!(machine.write(&cdb(code, 0), byte), "{format:?}, {code:#x}");
        }
        write_same(&mut machine);
        machine.set_write_cache(true);
        assert!(!machine.write(&cdb(0x2a, 0), 6), "{format:?}: on again");
    }
}

#[test]
fn a_unit_without_a_write_cache() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |config| config.writethrough = true);
        for (byte, code) in (1..).zip(WRITES) {
            assert!(machine.write(&cdb(code, 0), byte), "{format:?}, {code:#x}");
        }
        write_same(&mut machine);
    }
}

/// A daemon is killed, and the next one is given what it has kept.
#[test]
fn with_the_cache_off_each_write_survives_after_a_restart() {
    for format in Format::ALL {
        let region = guest_memory::test_util::memfd_region(0, CacheRecord::LEN).unwrap();
        let memory = Arc::new(region.map().unwrap());
        let record = || CacheRecord::new(memory.clone(), 0);
        let mut machine = Machine::new(format, |_| {});
        machine.rig.device.keep_write_caches(record());
        machine.set_write_cache(false);
        let mut machine = Machine::new(format, |_| {});
        assert!(machine.rig.device.keep_write_caches(record()));
        assert!(machine.write(&cdb(0x2a, 0), 1), "{format:?}");
        machine.set_write_cache(true);
        let mut machine = Machine::new(format, |_| {});
        assert!(machine.rig.device.keep_write_caches(record()));
        assert!(!machine.write(&cdb(0x2a, 0), 2), "{format:?}: on again");
    }
}

/// Who was killed may have switched it off, and not have got to the flush.
#[test]
fn the_cache_is_flushed_also_when_it_was_off() {
    for format in Format::ALL {
        let region = guest_memory::test_util::memfd_region(0, CacheRecord::LEN).unwrap();
        let memory = Arc::new(region.map().unwrap());
        let mut machine = Machine::new(format, |_| {});
        assert!(!machine.write(&cdb(0x2a, 0), 1));
        let mut other = Machine::new(format, |_| {});
        other.rig.device.keep_write_caches(CacheRecord::new(memory.clone(), 0));
        other.set_write_cache(false);
        machine.rig.device.keep_write_caches(CacheRecord::new(memory, 0));
        machine.set_write_cache(false);
        assert!(machine.has(1), "{format:?}");
    }
}
