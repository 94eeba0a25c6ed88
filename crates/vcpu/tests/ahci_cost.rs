//! What a request costs on AHCI, counted: allocations on both threads, wake-ups, interrupts.

use std::time::Duration;

use event_loop::counting::allocations;
use event_loop::{IoThreadConfig, LoopConfig, PollParams};
use vcpu::ahci::{AhciDevice, Command, PortArea, PortDriver};
use vcpu::machine::{Machine, MachineConfig, direct, null_co, on_loop};

const AREA: PortArea = PortArea { base: 0x10000, request_size: 64 << 10 };
const ROUNDS: u64 = 60;

fn round(driver: &mut PortDriver, round: u64, depth: u8, queued: bool) {
    for slot in 0..depth {
        let (write, offset) = (slot % 2 == 1, (round % 16 * 32 + u64::from(slot)) * 4096);
        let command = if queued {
            Command::queued(slot, write, offset, 4096)
        } else {
            Command::dma(write, offset, 4096)
        };
        driver.prepare(slot, &command, 4096).unwrap();
    }
    driver.ring(u32::MAX >> (32 - depth));
    while driver.issued() != 0 {
        driver.wait(Duration::from_secs(20)).unwrap();
    }
}

#[test]
fn steady_state_allocates_nothing_on_either_thread() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("ahci-cost");
    std::fs::write(&path, vec![0x77; 4 << 20]).unwrap();
    for disk in [null_co(1 << 30), direct(&path).unwrap()] {
        for (depth, queued, max_ns) in
            [(1, false, 0), (8, false, 0), (32, true, 0), (32, true, 32768)]
        {
            let poll = PollParams { max_ns, ..PollParams::default() };
            let event_loop = LoopConfig { poll, ..LoopConfig::default() };
            let machine = Machine::new(MachineConfig {
                memory: AREA.end(),
                io_threads: vec![IoThreadConfig { event_loop, ..IoThreadConfig::default() }],
                disk: disk.clone(),
            })
            .unwrap();
            let device = AhciDevice::start(&machine, &[machine.disk().clone()]).unwrap();
            let mut driver =
                PortDriver::bring_up(device.controller(), machine.memory(), 0, AREA).unwrap();
            let handle = machine.io_threads()[0].handle();
            let on_the_loop = || on_loop(handle, |_| allocations()).unwrap();
            for n in 0..ROUNDS {
                round(&mut driver, n, depth, queued);
            }
            // Asking costs something itself.
            let asking = on_the_loop();
            let asking = on_the_loop() - asking;
            let (ours, theirs) = (allocations(), on_the_loop());
            let ours_asking = allocations() - ours;
            let ours = allocations();
            let stats = device.controller().ahci.stats();
            let before = (stats.commands.get(), stats.batches.get(), stats.interrupts.get());
            let wakes = handle.stats().wakes.get();
            for n in 0..ROUNDS {
                round(&mut driver, n, depth, queued);
            }
            assert_eq!(allocations() - ours, 0, "on the vCPU's thread ({ours_asking} to ask)");
            assert_eq!(on_the_loop() - theirs - asking, 0, "on the loop");
            let commands = stats.commands.get() - before.0;
            assert_eq!(commands, ROUNDS * u64::from(depth));
            let (batches, interrupts) =
                (stats.batches.get() - before.1, stats.interrupts.get() - before.2);
            assert!(interrupts <= batches && batches <= commands, "{interrupts} for {batches}");
            let wakes = handle.stats().wakes.get() - wakes;
            assert!(wakes <= ROUNDS + 4, "{wakes} wake-ups for {ROUNDS} doorbells");
        }
    }
}
