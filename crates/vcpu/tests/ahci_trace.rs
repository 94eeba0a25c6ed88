//! Trace events of a command. A test binary of its own, as the log is process-wide.

use std::fs::{self, File};

use event_loop::IoThreadConfig;
use trace::{log_events, log_to};
use vcpu::ahci::{AhciDevice, Command, PortArea, PortDriver};
use vcpu::machine::{Machine, MachineConfig, null_co};

const AREA: PortArea = PortArea { base: 0x10000, request_size: 64 << 10 };

#[test]
fn a_command_begins_and_ends_in_the_log() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("ahci-trace");
    log_to(File::create(&path).unwrap()).unwrap();
    let machine = Machine::new(MachineConfig {
        memory: AREA.end(),
        io_threads: vec![IoThreadConfig::default()],
        disk: null_co(1 << 20),
    })
    .unwrap();
    let device = AhciDevice::start(&machine, &[machine.disk().clone()]).unwrap();
    let mut driver = PortDriver::bring_up(device.controller(), machine.memory(), 0, AREA).unwrap();
    assert_eq!(log_events("ahci_*"), 3);
    driver.run(&Command::queued(0, true, 8192, 4096), 4096).unwrap();
    let beyond = Command::queued(0, false, 1 << 20, 4096);
    driver.run(&beyond, 4096).unwrap_err();
    assert_eq!(log_events("-ahci_*"), 3);

    let log = fs::read_to_string(&path).unwrap();
    let s = std::sync::Arc::as_ptr(&device.controller().ahci).addr();
    let line = |event: &str, rest: &str| format!("{event} s {s:#x} port 0 {rest}");
    let expected = [
        // PxSACT, PxCI.
        line("ahci_port_write", "offset 0x34 val 0x1"),
        line("ahci_port_write", "offset 0x38 val 0x1"),
        line("ahci_cmd_begin", "slot 0 op write offset 8192 bytes 4096"),
        line("ahci_cmd_end", "slot 0 error 0"),
        line("ahci_cmd_begin", "slot 0 op refused offset 0 bytes 0"),
        // IDNF.
        line("ahci_cmd_end", "slot 0 error 16"),
    ];
    let mut lines = log.lines().filter_map(|line| Some(line.split_once(':')?.1));
    for wanted in &expected {
        assert!(lines.any(|line| line == wanted), "no {wanted}, there, in:\n{log}");
    }
}
