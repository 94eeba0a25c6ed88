//! `auto-read-only` for images that cannot be written: readers are served, writers are refused with the reason.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use integration::nbd::{nbd_export, nbd_server};
use integration::{Image, Scratch, ServerCommand, tool};
use test_requirements::{Needs, untested};

/// An image that even root cannot write.
struct Unwritable(PathBuf);

impl Unwritable {
    fn new(scratch: &Scratch) -> Option<Unwritable> {
        let image = Image::filled(scratch, "disk.img", 1);
        fs::set_permissions(image.path(), Permissions::from_mode(0o444)).expect("our file");
        let unwritable = Unwritable(image.path().to_owned());
        if nix::unistd::geteuid().is_root() && !unwritable.immutable("+i") {
            untested(Needs::Immutable, "chattr +i fails here");
            return None;
        }
        Some(unwritable)
    }

    fn immutable(&self, how: &str) -> bool {
        Command::new(tool("chattr")).arg(how).arg(&self.0).status().expect("chattr").success()
    }
}

impl Drop for Unwritable {
    fn drop(&mut self) {
        if nix::unistd::geteuid().is_root() {
            self.immutable("-i");
        }
    }
}

#[test]
fn a_writable_export_is_refused_over_each_protocol() {
    let scratch = Scratch::new();
    let Some(image) = Unwritable::new(&scratch) else { return };
    let path = image.0.display();
    let file = format!("file,node-name=f,filename={path},auto-read-only=on");
    // The node below inherits `auto-read-only`.
    let nested = format!("raw,node-name=n,auto-read-only=on,file.driver=file,file.filename={path}");
    for node in ["f", "r", "n"] {
        for writable in [true, false] {
            for is_nbd in [true, false] {
                let options = if writable { ",writable=on" } else { "" };
                let first = if node == "n" { &nested } else { &file };
                let mut command = ServerCommand::new(&scratch).arg("--blockdev").arg(first);
                if node == "r" {
                    command = command.args(["--blockdev", "raw,node-name=r,file=f"]);
                }
                let command = if is_nbd {
                    nbd_export(nbd_server(command, &scratch, ""), node, options)
                } else {
                    let socket = scratch.path("disk.sock");
                    command.arg("--export").arg(format!(
                        "vhost-user-blk,id=e,node-name={node},addr.type=unix,addr.path={}{options}",
                        socket.display()
                    ))
                };
                if !writable {
                    command.start().stop();
                    continue;
                }
                let (status, said) = command.run();
                assert_eq!(status.code(), Some(1), "{said}");
                let why = ["Operation not permitted", "Permission denied"];
                let why = why.map(|why| format!("Could not open '{path}': {why}"));
                assert!(why.iter().any(|why| said.contains(why)), "{said}");
            }
        }
    }
}
