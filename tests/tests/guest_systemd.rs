//! The units of `packaging/systemd` under a systemd that is process 1: this machine's, in a guest.
//!
//! In short a daemon for one disk is started by its first front end, reloaded under load and stopped, and one for many disks
//! is started. With `RINGMILL_LONG` the first is also killed; the other one gets a typo in its options, and is ended by the
//! watchdog.

use std::fs;
use std::path::Path;

use integration::{Guest, Initramfs, Scratch, daemon, tool};

/// Where a package puts them.
const INSTALLED: [(&str, &str); 6] = [
    ("ringmill.service", "/lib/systemd/system/ringmill.service"),
    ("ringmill.socket", "/lib/systemd/system/ringmill.socket"),
    ("ringmill@.service", "/lib/systemd/system/ringmill@.service"),
    ("ringmill@.socket", "/lib/systemd/system/ringmill@.socket"),
    ("ringmill.sysusers", "/lib/sysusers.d/ringmill.conf"),
    ("ringmill.tmpfiles", "/lib/tmpfiles.d/ringmill.conf"),
];

#[test]
fn systemd_starts_reloads_watches_and_stops_the_daemon() {
    let scratch = Scratch::new();
    let mut files = Initramfs::new("/system");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    for (unit, at) in INSTALLED {
        files.file(at, &fs::read(folder.join(unit)).expect("a unit file"));
    }
    files.file("/etc/ringmill/ringmill.conf", b"");
    files.program("/usr/bin/ringmill", daemon());
    files.program("/usr/bin/systemd-tmpfiles", &tool("systemd-tmpfiles"));
    files.program("/usr/bin/disk-load", Path::new(env!("CARGO_BIN_EXE_disk-load")));
    let long = if std::env::var_os("RINGMILL_LONG").is_some() { "long=1\n" } else { "long=\n" };
    let job = [long, include_str!("../guest/systemd-job.sh")].concat();
    let lines = Guest::new().with_systemd(files).run(&job);
    assert_eq!(lines.last().map(String::as_str), Some("all is well"), "{lines:?}");
    drop(scratch);
}
