//! A guest as a host: the daemon runs in it, beside the kernel's modules for block devices.

use std::process::Command;

use integration::{Guest, Initramfs, Scratch, daemon, tool};

/// Runs a job, which says in the end that all is well. The guest has the daemon, the programs that `add` adds, and an empty
/// qcow2 image of 64 MiB.
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
    let job = [include_str!("../../guest/host.sh"), job].concat();
    let lines = Guest::new().of_host(files).run(&job);
    assert_eq!(lines.last().map(String::as_str), Some("all is well"), "{lines:?}");
}
