//! Why an image cannot be given another size.

use std::fmt;

use nix::errno::Errno;

/// The largest size, bytes: QEMU's.
const MAX_SIZE: u64 = i64::MAX.unsigned_abs() - (i64::MAX.unsigned_abs() % (1 << 30));

/// An image that keeps its size. `Display` is in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeError {
    /// Nobody may write to it.
    ReadOnly,
    /// So many bytes are too many for any image.
    TooLarge(u64),
    /// Its driver cannot.
    NotSupported,
    /// Its options say its size.
    FixedSize,
    /// It begins too far within the node below.
    Offset,
    /// A device is as large as it is.
    Device,
    /// The graph is being changed there.
    Busy,
    /// Its format cannot; why, in words.
    Format(&'static str),
    /// It takes long, and is still under way: a cluster does not answer, or waits for another client.
    Slow,
    /// A system call failed.
    Os {
        /// Of what, in words.
        what: &'static str,
        /// Why.
        errno: Errno,
    },
}

impl ResizeError {
    /// Checks a new size in bytes by the rules of all drivers.
    ///
    /// # Errors
    ///
    /// [`ReadOnly`](Self::ReadOnly), [`TooLarge`](Self::TooLarge).
    pub fn check(size: u64, read_only: bool) -> Result<(), ResizeError> {
        match () {
            () if read_only => Err(ResizeError::ReadOnly),
            () if size > MAX_SIZE => Err(ResizeError::TooLarge(size)),
            () => Ok(()),
        }
    }
}

impl fmt::Display for ResizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ResizeError::ReadOnly => f.write_str("Image is read-only"),
            ResizeError::TooLarge(size) => {
                write!(f, "offset({size}) exceeds maximum({MAX_SIZE})")
            }
            ResizeError::NotSupported => f.write_str("Image format driver does not support resize"),
            ResizeError::FixedSize => f.write_str("Cannot resize fixed-size raw disks"),
            ResizeError::Offset => f.write_str("Disk size too large for the chosen offset"),
            ResizeError::Device => f.write_str("Cannot grow device files"),
            ResizeError::Busy => f.write_str("Node is in use by a change of the block graph"),
            ResizeError::Format(why) => f.write_str(why),
            ResizeError::Slow => f.write_str(
                "failed to resize: no answer from the cluster yet; the library is still at it",
            ),
            ResizeError::Os { what, errno } => write!(f, "{what}: {}", errno.desc()),
        }
    }
}

impl std::error::Error for ResizeError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_size_is_qemus() {
        assert_eq!(MAX_SIZE, 9_223_372_035_781_033_984);
    }
}
