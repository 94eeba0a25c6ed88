//! Sockets that the process was started with, as options name them.

use std::fmt;
use std::os::fd::RawFd;

use crate::error::OptionError;

/// A descriptor that was inherited, by number or by name.
///
/// Options: `addr.str` of an address of type `fd`, and `fd` of a character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FdName {
    /// Its number, not negative.
    Number(RawFd),
    /// The name that the service manager gave it in `LISTEN_FDNAMES`, sd_listen_fds(3): printable ASCII
    /// without a colon, and no number.
    Name(String),
}

impl fmt::Display for FdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FdName::Number(number) => write!(f, "{number}"),
            FdName::Name(name) => f.write_str(name),
        }
    }
}

impl FdName {
    /// Reads one.
    ///
    /// # Errors
    ///
    /// It is negative, or can be no name; in QSD's words.
    pub fn read(text: &str) -> Result<Self, OptionError> {
        match text.parse::<RawFd>() {
            Ok(number) if number >= 0 => Ok(FdName::Number(number)),
            Ok(number) => {
                Err(OptionError::new(format!("File descriptor '{number}' is not a socket")))
            }
            Err(_) if is_name(text) => Ok(FdName::Name(text.to_owned())),
            Err(_) => Err(OptionError::new(format!("Unable to parse FD number {text}"))),
        }
    }
}

/// Whether a service manager could have given a descriptor this name: FileDescriptorName= in
/// systemd.socket(5).
fn is_name(text: &str) -> bool {
    let printable = |byte: u8| (byte.is_ascii_graphic() || byte == b' ') && byte != b':';
    (1..=255).contains(&text.len()) && text.bytes().all(printable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_names_and_neither() {
        let read = |text: &str| FdName::read(text).map_err(|error| error.message);
        assert_eq!(read("0"), Ok(FdName::Number(0)));
        assert_eq!(read("3"), Ok(FdName::Number(3)));
        assert_eq!(read("disk-0.socket"), Ok(FdName::Name("disk-0.socket".into())));
        assert_eq!(read("3a"), Ok(FdName::Name("3a".into())));
        assert_eq!(read("-1"), Err("File descriptor '-1' is not a socket".into()));
        for text in ["", "a:b", "a\nb", "\u{e9}", &"x".repeat(256)] {
            assert_eq!(read(text), Err(format!("Unable to parse FD number {text}")));
        }
    }
}
