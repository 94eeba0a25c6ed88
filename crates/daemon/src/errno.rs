//! The system's description of an error, as in QEMU's messages.

use std::io;

use nix::errno::Errno;

/// Returns an error's text, without the number that the standard library adds.
pub fn words(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(errno) => Errno::from_raw(errno).desc().to_owned(),
        None => error.to_string(),
    }
}
