//! The AHCI controller and its driver, over a real loop.

use std::time::Duration;

use event_loop::{IoThreadConfig, LoopConfig};
use vcpu::ahci::*;
use vcpu::machine::{Machine, MachineConfig, direct, null_co};

const AREA: PortArea = PortArea { base: 0x10000, request_size: 128 << 10 };

#[test]
fn the_drive_comes_up_and_identifies_itself() {
    let machine = Machine::new(MachineConfig {
        memory: AREA.end(),
        io_threads: vec![IoThreadConfig::default()],
        disk: null_co(1 << 30),
    })
    .unwrap();
    let device = AhciDevice::start(&machine, &[machine.disk().clone()]).unwrap();
    let mut port = PortDriver::bring_up(device.controller(), machine.memory(), 0, AREA).unwrap();
    let page = port.identify().unwrap();
    assert_eq!(u32::from_le_bytes(page[120..124].try_into().unwrap()), 1 << 21);
    assert_eq!(page.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)), 0);
}

fn image(name: &str, len: usize) -> std::path::PathBuf {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let bytes: Vec<u8> = (0..len).map(|i| (i ^ (i >> 9)) as u8).collect();
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn batches_of_reads_through_a_file() {
    let path = image("ahci-reads", 16 << 20);
    let machine = Machine::new(MachineConfig {
        memory: AREA.end(),
        io_threads: vec![IoThreadConfig {
            event_loop: LoopConfig::default(),
            ..Default::default()
        }],
        disk: direct(&path).unwrap(),
    })
    .unwrap();
    let device = AhciDevice::start(&machine, &[machine.disk().clone()]).unwrap();
    let mut port = PortDriver::bring_up(device.controller(), machine.memory(), 0, AREA).unwrap();
    let expected = std::fs::read(&path).unwrap();
    let size = AREA.request_size;
    for queued in [false, true] {
        for batch in 0..8u64 {
            for slot in 0..16u8 {
                let offset = (batch * 16 + u64::from(slot)) * u64::from(size);
                let command = if queued {
                    Command::queued(slot, false, offset, size)
                } else {
                    Command::dma(false, offset, size)
                };
                port.prepare(slot, &command, size).unwrap();
            }
            port.ring(0xffff);
            let mut ended = 0;
            while ended != 0xffff {
                ended |= port.wait(Duration::from_secs(20)).unwrap();
            }
            for slot in 0..16u8 {
                let offset = (batch as usize * 16 + usize::from(slot)) * size as usize;
                let data = port.data(slot, size as usize).unwrap();
                assert!(data == expected[offset..offset + size as usize], "slot {slot}");
            }
        }
    }
    assert!(device.controller().ahci.stats().commands.get() >= 256);
}
