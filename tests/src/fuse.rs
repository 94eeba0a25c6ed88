//! Whether this machine mounts file systems of programs.

use std::fs::File;

use test_requirements::{Needs, untested};

/// Returns whether a FUSE export can be mounted; if not, reports the calling test as untested.
pub fn can_mount() -> bool {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    if let Err(error) = &device {
        untested(Needs::Fuse, format_args!("mounting takes /dev/fuse: {error}"));
    }
    device.is_ok()
}
