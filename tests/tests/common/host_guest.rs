//! A guest as a host: the daemon runs in it, beside the kernel's modules for block devices.

use std::process::Command;

use integration::{Guest, Initramfs, Scratch, daemon, tool};

use super::replaced::times;

/// Runs a job, which says in the end that all is well. The guest has the daemon, the programs that `add` adds, and an empty
/// qcow2 image of 64 MiB. Under load, the job kills its daemons `$kills` times and upgrades them `$upgrades` times: an
/// eighth of `RINGMILL_KILLS`, and a tenth of `RINGMILL_UPGRADES`.
pub fn run(add: impl FnOnce(&mut Initramfs), job: &str) {
    let mut files = Initramfs::new("/");
    files.program("/bin/ringmill", daemon());
    add(&mut files);
    let scratch = Scratch::new();
    let image = scratch.path("empty.qcow2");
    let mut create = Command::new(tool("qemu-img"));
    create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("64M");
    assert!(create.status().expect("qemu-img runs").success());
    files.file("/empty.qcow2", &std::fs::read(image).expect("an image"));
    let (kills, upgrades) = (times("RINGMILL_KILLS") / 8, times("RINGMILL_UPGRADES") / 10);
    let counts = format!("kills={kills} upgrades={upgrades}\n");
    let job = [&counts, include_str!("../../guest/host.sh"), job].concat();
    let lines = Guest::new().of_host(files).run(&job);
    assert_eq!(lines.last().map(String::as_str), Some("all is well"), "{lines:?}");
}
