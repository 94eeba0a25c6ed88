//! What a drive has said to be on stable storage is there when the power is cut right then.

use block::test_util::{Format, VolatileDisk};
use devices::ahci::DriveConfig;
use vcpu::ahci::{Command, LBA};

use crate::ahci::rig::*;

/// The sectors that are written, from here on.
const FIRST: u64 = 24;
const LEN: u32 = 4096;
/// DEVICE of a queued command: forced unit access.
const FUA: u8 = 1 << 7;

struct Machine {
    rig: Rig,
    disk: VolatileDisk,
    format: Format,
}

impl Machine {
    fn new(format: Format, change: impl Fn(&mut DriveConfig)) -> Machine {
        let disk = VolatileDisk::new(format, DISK as u64);
        let event_loop = disk.event_loop();
        let channel = disk.node().clone().open_channel(&event_loop).unwrap();
        Machine { rig: Rig::on(event_loop, vec![channel], change), disk, format }
    }

    fn run(&mut self, command: &Command, len: u32) {
        let ended = self.rig.port().run(command, len);
        ended.unwrap_or_else(|error| panic!("{:?}, {command:x?}: {error}", self.format));
    }

    /// Writes `byte` over the sectors by a command; whether a power cut leaves it.
    fn write(&mut self, command: &Command, byte: u8) -> bool {
        self.rig.write_memory(area(0).data(0), &[byte; LEN as usize]);
        self.run(command, LEN);
        self.has(byte)
    }

    fn has(&self, byte: u8) -> bool {
        self.disk.after_cut(FIRST * 512, LEN as usize) == [byte; LEN as usize]
    }

    /// SET FEATURES.
    fn set_write_cache(&mut self, on: bool) {
        self.run(&Command { features: if on { 0x02 } else { 0x82 }, ..command(0xef) }, 0);
    }
}

/// A write of the sectors by its code, not a queued one.
fn plain(code: u8) -> Command {
    Command { lba: FIRST, count: (LEN / 512) as u16, write: true, ..command(code) }
}

fn queued(device: u8) -> Command {
    let queued = Command::queued(0, true, FIRST * 512, LEN);
    Command { device: LBA | device, ..queued }
}

/// Every write there is that asks for nothing more: WRITE SECTORS, MULTIPLE and DMA, all with and without
/// EXT, and WRITE FPDMA QUEUED.
fn writes() -> Vec<Command> {
    let plain = [0x30, 0x34, 0xc5, 0x39, 0xca, 0x35].map(plain);
    plain.into_iter().chain([queued(0)]).collect()
}

#[test]
fn flushed_data_survives() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        // FLUSH CACHE and FLUSH CACHE EXT; STANDBY IMMEDIATE, STANDBY and SLEEP.
        for (byte, code) in (1..).zip([0xe7, 0xea, 0xe0, 0xe2, 0xe6]) {
            let written = machine.write(&plain(0x35), byte);
            assert!(!written, "a cache that keeps nothing back tests nothing");
            machine.run(&command(code), 0);
            assert!(machine.has(byte), "{format:?}, {code:#x}");
        }
    }
}

#[test]
fn writes_with_forced_unit_access_survive() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        // WRITE DMA and WRITE MULTIPLE FUA EXT, WRITE FPDMA QUEUED.
        for (byte, write) in (1..).zip([plain(0x3d), plain(0xce), queued(FUA)]) {
            assert!(machine.write(&write, byte), "{format:?}, {write:x?}");
        }
        for (byte, write) in (11..).zip(writes()) {
            assert!(!machine.write(&write, byte), "{format:?}, {write:x?}");
        }
    }
}

#[test]
fn with_the_cache_off_each_write_survives() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |_| {});
        assert!(!machine.write(&plain(0x35), 1));
        machine.set_write_cache(false);
        assert!(machine.has(1), "{format:?}: what was in the cache has gone to stable storage");
        for (byte, write) in (2..).zip(writes()) {
            assert!(machine.write(&write, byte), "{format:?}, {write:x?}");
        }
        machine.set_write_cache(true);
        assert!(!machine.write(&queued(0), 99), "{format:?}: on again");
    }
}

#[test]
fn a_drive_without_a_write_cache() {
    for format in Format::ALL {
        let mut machine = Machine::new(format, |config| config.write_cache = false);
        for (byte, write) in (1..).zip(writes()) {
            assert!(machine.write(&write, byte), "{format:?}, {write:x?}");
        }
    }
}
