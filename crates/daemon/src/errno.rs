//! The system's description of an error, as in QEMU's messages.

use std::io;

use nix::errno::Errno;

/// Returns strerror(3)'s text. [`Errno::desc`] has other texts for some errors, such as `EIO`.
pub fn strerror(errno: Errno) -> String {
    let text = io::Error::from(errno).to_string();
    // The standard library adds the number.
    text.split_once(" (os error ").map_or(text.clone(), |(words, _)| words.to_owned())
}

/// Returns an error's text, without the number that the standard library adds.
pub fn words(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(errno) => strerror(Errno::from_raw(errno)),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_those_of_qemu() {
        assert_eq!(strerror(Errno::EIO), "Input/output error");
        assert_eq!(words(&io::Error::from_raw_os_error(28)), "No space left on device");
    }
}
