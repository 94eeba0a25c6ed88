//! Data that virtio-blk has reported as stable survives an immediate power cut (virtio 1.2, 5.2.6.2).

use crate::rig;

use std::sync::Arc;

use block::test_util::{Format, VolatileDisk};
use devices::virtio::CacheRecord;
use devices::virtio_blk::DeviceConfig;
use rig::*;

const SIZE: u64 = 1 << 20;
/// `VIRTIO_BLK_F_FLUSH`, `VIRTIO_BLK_F_CONFIG_WCE`.
const F_FLUSH: u64 = 1 << 9;
const F_CONFIG_WCE: u64 = 1 << 11;
/// Offset of `writeback` in the configuration space.
const WRITEBACK: u32 = 32;

struct Machine {
    disk: VolatileDisk,
    rig: Rig,
}

impl Machine {
    fn new(format: Format, change: impl FnOnce(&mut DeviceConfig)) -> Machine {
        let disk = VolatileDisk::new(format, SIZE);
        let rig = Rig::on(disk.event_loop(), disk.node(), 64, change);
        Machine { disk, rig }
    }

    /// Writes 8 KiB of `byte` at sector 24. Returns whether a power cut keeps the data.
    fn write(&mut self, byte: u8) -> bool {
        assert_eq!(self.rig.request(OUT, 24, &[byte; 8192], 0), OK);
        self.has(byte)
    }

    fn has(&self, byte: u8) -> bool {
        self.disk.after_cut(24 * 512, 8192) == [byte; 8192]
    }

    fn without(&self, features: u64) {
        self.rig.device.set_features(self.rig.device.features() & !features);
    }
}

#[test]
fn flushed_data_survives() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        assert!(!machine.write(1), "{format:?}: a cache that keeps nothing back tests nothing");
        assert_eq!(machine.rig.request(FLUSH, 0, &[], 0), OK);
        assert!(machine.has(1), "{format:?}");
        // Write zeroes over it, with the space kept and deallocated.
        for unmap in [0, 1] {
            machine.write(1);
            assert_eq!(machine.rig.request(FLUSH, 0, &[], 0), OK);
            assert_eq!(machine.rig.request(WRITE_ZEROES, 0, &range(24, 16, unmap), 0), OK);
            assert!(!machine.has(0), "{format:?}");
            assert_eq!(machine.rig.request(FLUSH, 0, &[], 0), OK);
            assert!(machine.has(0), "{format:?}, {unmap}");
        }
    }
}

#[test]
fn a_flush_covers_all_requests_answered_before() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        for sector in 0..8 {
            machine.rig.add(OUT, sector, &[sector as u8 + 1; 512], 0);
        }
        machine.rig.publish();
        machine.rig.reap(8);
        // Other requests run in parallel.
        machine.rig.add(FLUSH, 0, &[], 0);
        machine.rig.add(OUT, 100, &[9; 512], 0);
        machine.rig.publish();
        machine.rig.reap(2);
        for sector in 0..8 {
            let left = machine.disk.after_cut(sector * 512, 512);
            assert_eq!(left, [sector as u8 + 1; 512], "{format:?}, {sector}");
        }
    }
}

#[test]
fn with_the_cache_off_each_write_survives() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        machine.rig.device.write_config(WRITEBACK, &[0]).unwrap();
        assert!(machine.write(1), "{format:?}");
        for unmap in [0, 1] {
            assert!(machine.write(1), "{format:?}");
            assert_eq!(machine.rig.request(WRITE_ZEROES, 0, &range(24, 16, unmap), 0), OK);
            assert!(machine.has(0), "{format:?}, {unmap}");
        }
        machine.rig.device.write_config(WRITEBACK, &[1]).unwrap();
        assert!(!machine.write(2), "{format:?}: on again");
    }
}

/// The device starts in write-through mode, and stays there with a driver that does not change it.
#[test]
fn a_device_without_a_write_cache() {
    for format in Format::ALL {
        for unknown in [0, F_CONFIG_WCE, F_FLUSH | F_CONFIG_WCE] {
            let mut machine = Machine::new(format, |config| config.writethrough = true);
            machine.without(unknown);
            assert!(machine.write(1), "{format:?}, {unknown:#x}");
        }
    }
}

#[test]
fn a_driver_without_flush_gets_write_through() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        machine.without(F_FLUSH | F_CONFIG_WCE);
        assert!(machine.write(1), "{format:?}");
        machine.without(F_CONFIG_WCE);
        assert!(!machine.write(2), "{format:?}: one that does");
    }
}

/// A daemon is killed, and the next one receives the record. The driver negotiates again without setting the
/// write cache mode.
#[test]
fn with_the_cache_off_each_write_survives_after_a_restart() {
    let region = guest_memory::test_util::memfd_region(0, CacheRecord::LEN).unwrap();
    let memory = Arc::new(region.map().unwrap());
    let record = || CacheRecord::new(memory.clone(), 0);
    for format in Format::ALL {
        let machine = Machine::new(format, |_| {});
        machine.rig.device.keep_write_cache(record());
        machine.rig.device.write_config(WRITEBACK, &[0]).unwrap();
        let mut machine = Machine::new(format, |_| {});
        assert!(machine.rig.device.keep_write_cache(record()));
        assert!(machine.write(1), "{format:?}");
        machine.rig.device.write_config(WRITEBACK, &[1]).unwrap();
        machine.rig.device.write_cache_is_known();
        let mut machine = Machine::new(format, |_| {});
        assert!(machine.rig.device.keep_write_cache(record()));
        assert!(!machine.write(2), "{format:?}: on again");
        // The end of the driver ends its choice.
        machine.rig.device.write_config(WRITEBACK, &[0]).unwrap();
        machine.rig.device.reset();
        machine.rig.device.write_cache_is_known();
        let mut machine = Machine::new(format, |_| {});
        assert!(machine.rig.device.keep_write_cache(record()));
        assert!(!machine.write(3), "{format:?}: reset");
        // The operator's choice stays.
        let mut machine = Machine::new(format, |config| config.writethrough = true);
        assert!(machine.rig.device.keep_write_cache(record()));
        assert!(machine.write(4), "{format:?}: by the configuration");
        machine.rig.device.set_writeback(true);
    }
}
