//! Trace events of virtio-scsi. A test binary of its own, as the log is process-wide.

use crate::scsi::rig;

use std::fs::{self, File};

use rig::Rig;
use trace::{log_events, log_to};

#[test]
fn commands_and_task_management_begin_and_end_in_the_log() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("scsi-trace");
    log_to(File::create(&path).unwrap()).unwrap();
    let mut rig = Rig::new();
    assert_eq!(log_events("virtio_scsi_*"), 5);
    rig.command(1, &[0x28, 0, 0, 0, 0, 8, 0, 0, 8, 0], &[], 4096).good();
    // A command that does not exist.
    assert_eq!(rig.command(0, &[0xff], &[], 0).code(), (5, 0x20, 0));
    // A logical unit that does not exist.
    assert_ne!(rig.command(9, &[0], &[], 0).status, 0);
    // LOGICAL UNIT RESET of unit 0, which ignores the tag.
    let mut reset = vec![0; 24];
    reset[4] = 5;
    reset[8..11].copy_from_slice(&[1, 0, 0x40]);
    reset[16] = 0x2a;
    assert_eq!(rig.control(&reset, 1), [0]);
    assert_eq!(log_events("-virtio_scsi_*"), 5);

    let log = fs::read_to_string(&path).unwrap();
    let expected = [
        ("virtio_scsi_cmd_req", "queue 0", "lun 1 tag 0x7 cmd 0x28"),
        ("virtio_scsi_cmd_resp", "queue 0", "tag 0x7 response 0 status 0"),
        ("virtio_scsi_cmd_req", "queue 0", "lun 0 tag 0x7 cmd 0xff"),
        ("virtio_scsi_cmd_resp", "queue 0", "tag 0x7 response 0 status 2"),
        ("virtio_scsi_cmd_req", "queue 0", "lun 9 tag 0x7 cmd 0x0"),
        ("virtio_scsi_cmd_resp", "queue 0", "tag 0x7 response 0 status 2"),
        ("virtio_scsi_tmf_req", "tag 0x2a", "subtype 5"),
        ("virtio_scsi_tmf_resp", "tag 0x2a", "response 0"),
    ];
    let lines: Vec<&str> = log.lines().filter_map(|line| Some(line.split_once(':')?.1)).collect();
    assert_eq!(lines.len(), expected.len(), "{log}");
    for (line, (event, first, rest)) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("{event} dev test {first}")), "{event} in:\n{log}");
        assert!(line.ends_with(rest), "{rest} in:\n{log}");
    }
}
