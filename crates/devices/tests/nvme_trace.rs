//! Trace events of NVMe. The log is process-wide, so the test has its own program.

use crate::nvme::rig;

use std::fs::{self, File};

use rig::{READ, Rig, command, io};
use trace::{log_events, log_to};

#[test]
fn commands_are_taken_and_answered_in_the_log() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvme-trace");
    log_to(File::create(&path).unwrap()).unwrap();
    let mut rig = Rig::ready(0);
    assert_eq!(log_events("pci_nvme_*"), 3);
    rig.ok(1, io(READ, 8, 1));
    // Beyond the end.
    assert_ne!(rig.status(1, io(READ, u64::MAX, 1)), 0);
    // Format NVM is not supported.
    assert_ne!(rig.status(0, command(0x80)), 0);
    assert_eq!(log_events("-pci_nvme_*"), 3);

    let log = fs::read_to_string(&path).unwrap();
    let expected = [
        ("pci_nvme_io_cmd", "sqid 1", "nsid 1 opcode 0x2 slba 8"),
        ("pci_nvme_enqueue_req_completion", "sqid 1", "status 0x0"),
        ("pci_nvme_io_cmd", "sqid 1", "nsid 1 opcode 0x2 slba 18446744073709551615"),
        ("pci_nvme_enqueue_req_completion", "sqid 1", "status 0x80"),
        ("pci_nvme_admin_cmd", "cid", "opcode 0x80"),
        ("pci_nvme_enqueue_req_completion", "sqid 0", "status 0x1"),
    ];
    let lines: Vec<&str> = log.lines().filter_map(|line| Some(line.split_once(':')?.1)).collect();
    assert_eq!(lines.len(), expected.len(), "{log}");
    for (line, (event, first, rest)) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("{event} s 0x")), "{event} in:\n{log}");
        assert!(line.contains(&format!(" {first} ")) && line.ends_with(rest), "{rest} in:\n{log}");
    }
}
