//! The result of the negotiation with a server.

use nbd_wire::flag;
use nbd_wire::reply::ReplyMode;

/// The server's description of an export, and the negotiated options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Size in bytes.
    pub(crate) size: u64,
    /// Transmission flags.
    pub(crate) flags: u16,
    /// Form of its replies.
    pub(crate) mode: ReplyMode,
    /// The number of the context `base:allocation`, if the server has it.
    pub(crate) allocation: Option<u32>,
    /// Offsets and lengths are multiples of it: a power of two, at most 64 KiB.
    pub(crate) minimum: u32,
    /// Multiples of it are fast: a power of two, not less than the minimum.
    pub(crate) preferred: u32,
    /// Most bytes of a read, write or write-zeroes: a multiple of the minimum, at most 32 MiB.
    pub(crate) maximum: u32,
}

impl Agreed {
    /// Whether the export can do this; see [`flag`].
    pub(crate) fn has(&self, bit: u16) -> bool {
        self.flags & bit != 0
    }

    /// Whether a connection to `self` can replace one to an export that was described as `before`.
    /// The error is the difference.
    pub(crate) fn continues(&self, before: &Agreed) -> Result<(), String> {
        const FEATURES: [(u16, &str); 5] = [
            (flag::SEND_FLUSH, "flush"),
            (flag::SEND_FUA, "FUA"),
            (flag::SEND_TRIM, "trim"),
            (flag::SEND_WRITE_ZEROES, "write-zeroes"),
            (flag::CAN_MULTI_CONN, "several connections"),
        ];
        if self.size != before.size {
            return Err(format!("its size was {}, and is {} now", before.size, self.size));
        }
        if self.has(flag::READ_ONLY) && !before.has(flag::READ_ONLY) {
            return Err("it was writable, and is read-only now".into());
        }
        if let Some((_, lost)) =
            FEATURES.iter().find(|(bit, _)| before.has(*bit) && !self.has(*bit))
        {
            return Err(format!("it could do {lost}, and cannot any more"));
        }
        if self.minimum > before.minimum {
            let (was, is) = (before.minimum, self.minimum);
            return Err(format!("its smallest block was {was}, and is {is} now"));
        }
        Ok(())
    }
}
