//! Sense data: why a command was not carried out (SPC-4, 4.5), in the fixed format.

use block::request::Op;
use nix::errno::Errno;

/// Status codes (SAM-5, 5.3.1).
pub(crate) const GOOD: u8 = 0x00;
pub(crate) const CHECK_CONDITION: u8 = 0x02;

/// Bytes of sense data in the fixed format.
pub(crate) const SIZE: usize = 18;

/// Sense keys (SPC-4, table 48).
const NO_SENSE: u8 = 0x0;
const MEDIUM_ERROR: u8 = 0x3;
const HARDWARE_ERROR: u8 = 0x4;
const ILLEGAL_REQUEST: u8 = 0x5;
const UNIT_ATTENTION: u8 = 0x6;
const DATA_PROTECT: u8 = 0x7;

/// Why a command was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sense {
    key: u8,
    /// The additional sense code and its qualifier.
    code: [u8; 2],
    /// Which byte is wrong, and whether of the CDB or of the parameter list.
    field: Option<(Place, u16)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Cdb,
    Parameters,
}

impl Sense {
    /// Nothing is wrong.
    pub(crate) const NONE: Sense = Sense::new(NO_SENSE, 0x00, 0x00);
    /// INVALID COMMAND OPERATION CODE.
    pub(crate) const INVALID_OPCODE: Sense = Sense::new(ILLEGAL_REQUEST, 0x20, 0x00);
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    pub(crate) const LBA_OUT_OF_RANGE: Sense = Sense::new(ILLEGAL_REQUEST, 0x21, 0x00);
    /// LOGICAL UNIT NOT SUPPORTED.
    pub(crate) const LUN_NOT_SUPPORTED: Sense = Sense::new(ILLEGAL_REQUEST, 0x25, 0x00);
    /// PARAMETER LIST LENGTH ERROR.
    pub(crate) const PARAMETER_LIST_LENGTH: Sense = Sense::new(ILLEGAL_REQUEST, 0x1a, 0x00);
    /// SAVING PARAMETERS NOT SUPPORTED.
    pub(crate) const NO_SAVING: Sense = Sense::new(ILLEGAL_REQUEST, 0x39, 0x00);
    /// WRITE PROTECTED.
    pub(crate) const WRITE_PROTECTED: Sense = Sense::new(DATA_PROTECT, 0x27, 0x00);
    /// SPACE ALLOCATION FAILED WRITE PROTECT.
    pub(crate) const NO_SPACE: Sense = Sense::new(DATA_PROTECT, 0x27, 0x07);
    /// INTERNAL TARGET FAILURE.
    pub(crate) const TARGET_FAILURE: Sense = Sense::new(HARDWARE_ERROR, 0x44, 0x00);
    /// UNRECOVERED READ ERROR.
    pub(crate) const READ_ERROR: Sense = Sense::new(MEDIUM_ERROR, 0x11, 0x00);
    /// WRITE ERROR.
    pub(crate) const WRITE_ERROR: Sense = Sense::new(MEDIUM_ERROR, 0x0c, 0x00);

    const fn new(key: u8, code: u8, qualifier: u8) -> Self {
        Sense { key, code: [code, qualifier], field: None }
    }

    /// INVALID FIELD IN CDB, with the byte that is wrong.
    pub(crate) const fn invalid_field(byte: u16) -> Self {
        let field = Some((Place::Cdb, byte));
        Sense { field, ..Sense::new(ILLEGAL_REQUEST, 0x24, 0x00) }
    }

    /// INVALID FIELD IN PARAMETER LIST, with the byte that is wrong.
    pub(crate) const fn invalid_parameter(byte: u16) -> Self {
        let field = Some((Place::Parameters, byte));
        Sense { field, ..Sense::new(ILLEGAL_REQUEST, 0x26, 0x00) }
    }

    /// A unit attention condition.
    pub(crate) const fn attention(code: u8, qualifier: u8) -> Self {
        Sense::new(UNIT_ATTENTION, code, qualifier)
    }

    /// What a failure of the block layer is to a driver.
    pub(crate) fn of_errno(op: Op, errno: Errno) -> Self {
        match errno {
            Errno::EOPNOTSUPP => Sense::INVALID_OPCODE,
            Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => Sense::NO_SPACE,
            Errno::EROFS | Errno::EACCES | Errno::EPERM => Sense::WRITE_PROTECTED,
            Errno::ENOMEM | Errno::EAGAIN => Sense::TARGET_FAILURE,
            _ if op == Op::Read => Sense::READ_ERROR,
            _ => Sense::WRITE_ERROR,
        }
    }

    /// Fixed format sense data, of a current error (SPC-4, 4.5.3).
    pub(crate) fn to_bytes(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[0] = 0x70;
        bytes[2] = self.key;
        bytes[7] = (SIZE - 8) as u8;
        bytes[12..14].copy_from_slice(&self.code);
        if let Some((place, byte)) = self.field {
            // SKSV, and C/D: 1 for the CDB. No bit is pointed to.
            bytes[15] = if place == Place::Cdb { 0xc0 } else { 0x80 };
            bytes[16..].copy_from_slice(&byte.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_errors_map_to_sense_data() {
        let write = Op::Write { fua: false };
        for (op, errno, key, code) in [
            (write, Errno::ENOSPC, 0x07, [0x27, 0x07]),
            (Op::Discard, Errno::EDQUOT, 0x07, [0x27, 0x07]),
            (Op::Flush, Errno::ENOSPC, 0x07, [0x27, 0x07]),
            (write, Errno::EROFS, 0x07, [0x27, 0x00]),
            (Op::Read, Errno::EIO, 0x03, [0x11, 0x00]),
            (write, Errno::EIO, 0x03, [0x0c, 0x00]),
            (Op::Flush, Errno::EIO, 0x03, [0x0c, 0x00]),
        ] {
            let bytes = Sense::of_errno(op, errno).to_bytes();
            assert_eq!((bytes[2], &bytes[12..14]), (key, &code[..]), "{op:?} {errno}");
        }
    }
}
