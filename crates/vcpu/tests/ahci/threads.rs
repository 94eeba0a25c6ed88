//! Doorbells from several threads at once, on one I/O thread.

use std::time::{Duration, Instant};

use event_loop::IoThreadConfig;
use guest_memory::test_util::memfd_memory;
use vcpu::ahci::{AhciDevice, Command, PortDriver, ata, reg};
use vcpu::machine::{Machine, MachineConfig, null_co, on_loop};

use crate::ahci::rig::{MEMORY, area, long_list};

const THREADS: u8 = 4;
const ROUNDS: u32 = 200;
/// Time limit of a wait.
const LOST: Duration = Duration::from_secs(60);

/// A machine with one port on its I/O thread. Dropped in order, the machine last.
fn start() -> (Machine, AhciDevice, PortDriver) {
    let machine = Machine::new(MachineConfig {
        memory: MEMORY,
        io_threads: vec![IoThreadConfig::default()],
        disk: null_co(1 << 30),
    })
    .unwrap();
    let device = AhciDevice::start(&machine, &[machine.disk().clone()]).unwrap();
    let driver = PortDriver::bring_up(device.controller(), machine.memory(), 0, area(0)).unwrap();
    (machine, device, driver)
}

#[test]
fn doorbells_from_several_threads() {
    let (_machine, device, mut driver) = start();
    for slot in 0..32 {
        let command = Command::queued(slot, false, 4096 * u64::from(slot), 4096);
        driver.prepare(slot, &command, 4096).unwrap();
    }
    let before = device.controller().ahci.stats().commands.get();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let ahci = &device.controller().ahci;
            scope.spawn(move || {
                // Each thread uses different slots; all write the same registers.
                let ours = 0xffu64 << (thread * 8);
                let limit = Instant::now() + LOST;
                for _ in 0..ROUNDS {
                    ahci.mmio_write(0x100 + reg::PX_SACT, 4, ours);
                    ahci.mmio_write(0x100 + reg::PX_CI, 4, ours);
                    let running = || {
                        ahci.mmio_read(0x100 + reg::PX_SACT, 4)
                            | ahci.mmio_read(0x100 + reg::PX_CI, 4)
                    };
                    while running() & ours != 0 {
                        assert!(Instant::now() < limit, "commands do not end");
                        ahci.mmio_write(0x100 + reg::PX_IS, 4, u32::MAX.into());
                        ahci.mmio_write(reg::IS, 4, 1);
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    let done = device.controller().ahci.stats().commands.get() - before;
    assert_eq!(done, u64::from(THREADS) * 8 * u64::from(ROUNDS));
    driver.write(reg::PX_IS, u32::MAX);
    driver.write_generic(reg::IS, 1);
    assert!(!device.controller().line.is_up());
}

/// The line goes up and down on two threads at once, and the last reported level is right.
#[test]
fn the_line_is_never_left_at_a_wrong_level() {
    let (_machine, _device, mut driver) = start();
    for round in 0..500u32 {
        driver.prepare(0, &Command::queued(0, false, 0, 512), 512).unwrap();
        driver.ring(1);
        // A lost interrupt would take the whole limit.
        let began = Instant::now();
        while driver.issued() != 0 {
            driver.wait(2 * LOST).unwrap();
        }
        assert!(began.elapsed() < LOST, "round {round}");
    }
    drop(driver);
}

#[test]
fn memory_is_exchanged() {
    let (machine, device, mut driver) = start();
    let identify = Command { command: ata::IDENTIFY_DEVICE, ..Command::default() };
    driver.prepare(0, &identify, 512).unwrap();
    let other = memfd_memory(&[(0, MEMORY)]).unwrap();
    let mut bytes = vec![0; 1 << 20];
    machine.memory().read_bytes(0, &mut bytes).unwrap();
    other.write_bytes(0, &bytes).unwrap();
    device.controller().ahci.set_memory(other.clone());
    driver.ring(1);
    driver.finish(1).unwrap();
    assert_eq!(driver.data(0, 512).unwrap(), [0; 512], "the driver looks at the old memory");
    let mut page = [0; 512];
    other.read_bytes(area(0).data(0), &mut page).unwrap();
    assert_eq!(page[0], 0x40);
}

/// One vCPU stops the list while another is within a doorbell with long lists: the commands read belong to an earlier life.
#[test]
fn a_list_is_stopped_while_a_doorbell_is_read() {
    let (machine, device, mut driver) = start();
    (0..32).for_each(|slot| long_list(machine.memory(), slot));
    let ahci = &device.controller().ahci;
    for _ in 0..5 {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| ahci.mmio_write(0x100 + reg::PX_CI, 4, u32::MAX.into()));
            while driver.read(reg::PX_CI) == 0 && !other.is_finished() {
                std::thread::yield_now();
            }
            driver.stop_list().unwrap();
            driver.write(reg::PX_IS, u32::MAX);
        });
        // The other vCPU's doorbell has ended, without an effect.
        driver.start_list();
        for _ in 0..3 {
            on_loop(machine.io_threads()[0].handle(), |_| ()).unwrap();
        }
        assert_eq!((driver.read(reg::PX_CI), driver.read(reg::PX_IS)), (0, 0));
        driver.identify().unwrap();
        driver.recover().unwrap();
    }
}
