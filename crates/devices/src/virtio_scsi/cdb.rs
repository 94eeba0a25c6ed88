//! Parses a CDB into a command that is valid as far as the CDB alone shows (SPC-4, SBC-3).

use super::sense::Sense;
use super::wire::CDB_SIZE;

/// Operation codes.
pub(crate) mod opcode {
    pub(crate) const TEST_UNIT_READY: u8 = 0x00;
    pub(crate) const REQUEST_SENSE: u8 = 0x03;
    pub(crate) const READ_6: u8 = 0x08;
    pub(crate) const WRITE_6: u8 = 0x0a;
    pub(crate) const INQUIRY: u8 = 0x12;
    pub(crate) const MODE_SELECT_6: u8 = 0x15;
    pub(crate) const MODE_SENSE_6: u8 = 0x1a;
    pub(crate) const START_STOP_UNIT: u8 = 0x1b;
    pub(crate) const READ_CAPACITY_10: u8 = 0x25;
    pub(crate) const READ_10: u8 = 0x28;
    pub(crate) const WRITE_10: u8 = 0x2a;
    pub(crate) const WRITE_AND_VERIFY_10: u8 = 0x2e;
    pub(crate) const VERIFY_10: u8 = 0x2f;
    pub(crate) const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub(crate) const WRITE_SAME_10: u8 = 0x41;
    pub(crate) const UNMAP: u8 = 0x42;
    pub(crate) const MODE_SELECT_10: u8 = 0x55;
    pub(crate) const MODE_SENSE_10: u8 = 0x5a;
    pub(crate) const READ_16: u8 = 0x88;
    pub(crate) const WRITE_16: u8 = 0x8a;
    pub(crate) const WRITE_AND_VERIFY_16: u8 = 0x8e;
    pub(crate) const VERIFY_16: u8 = 0x8f;
    pub(crate) const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub(crate) const WRITE_SAME_16: u8 = 0x93;
    pub(crate) const SERVICE_ACTION_IN_16: u8 = 0x9e;
    pub(crate) const REPORT_LUNS: u8 = 0xa0;
    pub(crate) const MAINTENANCE_IN: u8 = 0xa3;
    pub(crate) const READ_12: u8 = 0xa8;
    pub(crate) const WRITE_12: u8 = 0xaa;
    pub(crate) const WRITE_AND_VERIFY_12: u8 = 0xae;
    pub(crate) const VERIFY_12: u8 = 0xaf;
}

/// Service actions of the two operation codes that have them.
pub(crate) const READ_CAPACITY_16: u8 = 0x10;
pub(crate) const REPORT_SUPPORTED_OPERATION_CODES: u8 = 0x0c;

/// A range of logical blocks. Whether the medium has them is checked later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) lba: u64,
    pub(crate) count: u32,
}

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Read(Blocks),
    Write {
        blocks: Blocks,
        /// Force unit access: the data reaches the medium before the answer.
        fua: bool,
    },
    /// SYNCHRONIZE CACHE. A count of 0 means the rest of the medium. The range is checked, then everything flushed.
    SynchronizeCache(Blocks),
    /// VERIFY without a data transfer.
    Verify(Blocks),
    WriteSame {
        /// One block or more.
        blocks: Blocks,
        /// Whether the space may be deallocated if the block is zeroes.
        unmap: bool,
        /// The block is zeroes and not in the data buffer.
        no_data: bool,
    },
    Unmap {
        /// Length of the parameter list, bytes.
        len: u16,
    },
    TestUnitReady,
    StartStopUnit {
        /// Flush before the answer.
        flush: bool,
    },
    Inquiry {
        /// A page of vital product data; `None` for standard data.
        page: Option<u8>,
        allocation: u16,
    },
    RequestSense {
        allocation: u8,
    },
    ModeSense(ModeSense),
    ModeSelect {
        /// With the header of the 10-byte command.
        long: bool,
        /// Length of the parameter list, bytes.
        len: u16,
    },
    ReadCapacity10,
    ReadCapacity16 {
        allocation: u32,
    },
    ReportLuns {
        select: u8,
        allocation: u32,
    },
    ReportOpcodes {
        what: Reported,
        /// With command timeouts descriptors.
        timeouts: bool,
        allocation: u32,
    },
}

/// MODE SENSE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModeSense {
    /// With the header of the 10-byte command.
    pub(crate) long: bool,
    /// With a block descriptor.
    pub(crate) descriptor: bool,
    /// The block descriptor is the long one, with 64-bit addresses.
    pub(crate) long_lba: bool,
    pub(crate) control: PageControl,
    pub(crate) page: u8,
    pub(crate) subpage: u8,
    pub(crate) allocation: u16,
}

/// The values that MODE SENSE requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageControl {
    Current,
    /// A mask of the bits that MODE SELECT can change.
    Changeable,
    Default,
}

/// The commands that REPORT SUPPORTED OPERATION CODES requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reported {
    All,
    /// One command; its operation code has no service actions.
    Opcode(u8),
    /// One command; its operation code has service actions.
    Action(u8, u16),
    /// One command, with or without a service action.
    Either(u8, u16),
}

/// Reads a big-endian field of `len` bytes.
fn field(cdb: &[u8; CDB_SIZE], at: usize, len: usize) -> u64 {
    cdb.iter().skip(at).take(len).fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Refuses a CDB with one of these bits set.
fn none_of(cdb: &[u8; CDB_SIZE], byte: u16, bits: u8) -> Result<(), Sense> {
    match cdb.get(usize::from(byte)) {
        Some(value) if value & bits != 0 => Err(Sense::invalid_field(byte)),
        _ => Ok(()),
    }
}

/// Length of a CDB by its group code (SPC-4, 4.2.5.1). Service actions do not change it.
fn length(opcode: u8) -> u16 {
    match opcode >> 5 {
        0 => 6,
        1 | 2 => 10,
        4 => 16,
        _ => 12,
    }
}

/// Reads address and count of a command of 6, 10, 12 or 16 bytes.
fn blocks(cdb: &[u8; CDB_SIZE]) -> Blocks {
    let (lba, count) = match cdb[0] >> 5 {
        0 => {
            let count = if cdb[4] == 0 { 256 } else { cdb[4].into() };
            (field(cdb, 1, 3) & 0x1f_ffff, count)
        }
        1 | 2 => (field(cdb, 2, 4), field(cdb, 7, 2)),
        4 => (field(cdb, 2, 8), field(cdb, 10, 4)),
        _ => (field(cdb, 2, 4), field(cdb, 6, 4)),
    };
    Blocks { lba, count: count as u32 }
}

/// Refuses requests for protection information: RDPROTECT, WRPROTECT and VRPROTECT must be 0.
fn unprotected(cdb: &[u8; CDB_SIZE]) -> Result<(), Sense> {
    none_of(cdb, 1, 0xe0)
}

/// Parses a CDB. Reserved fields and hints (DPO, the group number, IMMED) are ignored, as SPC-4 permits. Bits
/// that would change the meaning are refused.
pub(crate) fn parse(cdb: &[u8; CDB_SIZE]) -> Result<Command, Sense> {
    let command = match cdb[0] {
        opcode::READ_6 => Command::Read(blocks(cdb)),
        opcode::READ_10 | opcode::READ_12 | opcode::READ_16 => {
            unprotected(cdb)?;
            Command::Read(blocks(cdb))
        }
        opcode::WRITE_6 => Command::Write { blocks: blocks(cdb), fua: false },
        opcode::WRITE_10 | opcode::WRITE_12 | opcode::WRITE_16 => {
            unprotected(cdb)?;
            Command::Write { blocks: blocks(cdb), fua: cdb[1] & 0x08 != 0 }
        }
        opcode::WRITE_AND_VERIFY_10 | opcode::WRITE_AND_VERIFY_12 | opcode::WRITE_AND_VERIFY_16 => {
            unprotected(cdb)?;
            // BYTCHK, as below.
            none_of(cdb, 1, 0x06)?;
            // Force unit access, as verified data has to be on the medium.
            Command::Write { blocks: blocks(cdb), fua: true }
        }
        opcode::SYNCHRONIZE_CACHE_10 | opcode::SYNCHRONIZE_CACHE_16 => {
            Command::SynchronizeCache(blocks(cdb))
        }
        opcode::VERIFY_10 | opcode::VERIFY_12 | opcode::VERIFY_16 => {
            unprotected(cdb)?;
            // BYTCHK: compare with the data buffer.
            none_of(cdb, 1, 0x06)?;
            Command::Verify(blocks(cdb))
        }
        opcode::WRITE_SAME_10 => write_same(cdb, false)?,
        opcode::WRITE_SAME_16 => write_same(cdb, cdb[1] & 0x01 != 0)?,
        opcode::UNMAP => {
            // ANCHOR: keep the space.
            none_of(cdb, 1, 0x01)?;
            Command::Unmap { len: field(cdb, 7, 2) as u16 }
        }
        opcode::TEST_UNIT_READY => Command::TestUnitReady,
        opcode::START_STOP_UNIT => start_stop_unit(cdb)?,
        opcode::INQUIRY => {
            // CMDDT, which is obsolete.
            none_of(cdb, 1, 0x02)?;
            let vital = cdb[1] & 0x01 != 0;
            if !vital {
                none_of(cdb, 2, 0xff)?;
            }
            Command::Inquiry { page: vital.then_some(cdb[2]), allocation: field(cdb, 3, 2) as u16 }
        }
        opcode::REQUEST_SENSE => {
            // DESC: the descriptor format.
            none_of(cdb, 1, 0x01)?;
            Command::RequestSense { allocation: cdb[4] }
        }
        opcode::MODE_SENSE_6 => mode_sense(cdb, false, cdb[4].into())?,
        opcode::MODE_SENSE_10 => mode_sense(cdb, true, field(cdb, 7, 2) as u16)?,
        opcode::MODE_SELECT_6 => mode_select(cdb, false, cdb[4].into())?,
        opcode::MODE_SELECT_10 => mode_select(cdb, true, field(cdb, 7, 2) as u16)?,
        opcode::READ_CAPACITY_10 => Command::ReadCapacity10,
        opcode::SERVICE_ACTION_IN_16 => {
            if cdb[1] & 0x1f != READ_CAPACITY_16 {
                return Err(Sense::invalid_field(1));
            }
            Command::ReadCapacity16 { allocation: field(cdb, 10, 4) as u32 }
        }
        opcode::REPORT_LUNS => {
            Command::ReportLuns { select: cdb[2], allocation: field(cdb, 6, 4) as u32 }
        }
        opcode::MAINTENANCE_IN => {
            if cdb[1] & 0x1f != REPORT_SUPPORTED_OPERATION_CODES {
                return Err(Sense::invalid_field(1));
            }
            let (code, action) = (cdb[3], field(cdb, 4, 2) as u16);
            let what = match cdb[2] & 0x07 {
                0 => Reported::All,
                1 => Reported::Opcode(code),
                2 => Reported::Action(code, action),
                3 => Reported::Either(code, action),
                _ => return Err(Sense::invalid_field(2)),
            };
            let timeouts = cdb[2] & 0x80 != 0;
            Command::ReportOpcodes { what, timeouts, allocation: field(cdb, 6, 4) as u32 }
        }
        _ => return Err(Sense::INVALID_OPCODE),
    };
    // NACA in the control byte, unsupported according to the standard INQUIRY data.
    none_of(cdb, length(cdb[0]) - 1, 0x04)?;
    Ok(command)
}

fn write_same(cdb: &[u8; CDB_SIZE], no_data: bool) -> Result<Command, Sense> {
    // Protection; ANCHOR; PBDATA and LBDATA, which are obsolete.
    none_of(cdb, 1, 0xe0 | 0x10 | 0x06)?;
    let blocks = blocks(cdb);
    if blocks.count == 0 {
        // WSNZ in the block limits page: a count of 0 is not supported.
        return Err(Sense::invalid_field(if cdb[0] == opcode::WRITE_SAME_10 { 7 } else { 10 }));
    }
    Ok(Command::WriteSame { blocks, unmap: cdb[1] & 0x08 != 0, no_data })
}

fn start_stop_unit(cdb: &[u8; CDB_SIZE]) -> Result<Command, Sense> {
    let power_condition = cdb[4] & 0xf0 != 0;
    // LOEJ: the medium cannot be loaded or ejected.
    if !power_condition {
        none_of(cdb, 4, 0x02)?;
    }
    let (no_flush, start) = (cdb[4] & 0x04 != 0, cdb[4] & 0x01 != 0);
    Ok(Command::StartStopUnit { flush: (power_condition || !start) && !no_flush })
}

fn mode_sense(cdb: &[u8; CDB_SIZE], long: bool, allocation: u16) -> Result<Command, Sense> {
    let control = match cdb[2] >> 6 {
        0 => PageControl::Current,
        1 => PageControl::Changeable,
        2 => PageControl::Default,
        _ => return Err(Sense::NO_SAVING),
    };
    Ok(Command::ModeSense(ModeSense {
        long,
        descriptor: cdb[1] & 0x08 == 0,
        long_lba: long && cdb[1] & 0x10 != 0,
        control,
        page: cdb[2] & 0x3f,
        subpage: cdb[3],
        allocation,
    }))
}

fn mode_select(cdb: &[u8; CDB_SIZE], long: bool, len: u16) -> Result<Command, Sense> {
    // SP: values cannot be saved. PF: pages as the standard has them.
    none_of(cdb, 1, 0x01)?;
    if cdb[1] & 0x10 == 0 {
        return Err(Sense::invalid_field(1));
    }
    Ok(Command::ModeSelect { long, len })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cdb(bytes: &[u8]) -> [u8; CDB_SIZE] {
        let mut cdb = [0; CDB_SIZE];
        cdb[..bytes.len()].copy_from_slice(bytes);
        cdb
    }

    #[test]
    fn addresses_and_counts_are_where_the_standard_has_them() {
        let read = |bytes: &[u8]| match parse(&cdb(bytes)) {
            Ok(Command::Read(Blocks { lba, count })) => (lba, count),
            other => panic!("{other:?}"),
        };
        assert_eq!(read(&[0x08, 0xff, 0x23, 0x45, 7, 0]), (0x1f_2345, 7));
        assert_eq!(read(&[0x08, 0, 0, 0, 0, 0]), (0, 256), "0 is 256 in READ(6) alone");
        assert_eq!(read(&[0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0]), (0x0102_0304, 0x0506));
        assert_eq!(read(&[0x28, 0, 1, 2, 3, 4, 0, 0, 0, 0]), (0x0102_0304, 0));
        assert_eq!(read(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]), (0x0102_0304, 0x0506_0708));
        assert_eq!(
            read(&[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (0x0102_0304_0506_0708, 0x090a_0b0c)
        );
    }

    #[test]
    fn force_unit_access_is_parsed() {
        let fua = |bytes: &[u8]| match parse(&cdb(bytes)) {
            Ok(Command::Write { fua, .. }) => fua,
            other => panic!("{other:?}"),
        };
        assert!(!fua(&[0x0a, 0x08]), "an address bit there");
        for opcode in [0x2a, 0xaa, 0x8a] {
            assert!(fua(&[opcode, 0x18]));
            assert!(!fua(&[opcode, 0x10]), "DPO");
            assert_eq!(parse(&cdb(&[opcode, 0x20])), Err(Sense::invalid_field(1)), "WRPROTECT");
        }
    }

    #[test]
    fn refusals_name_the_byte() {
        for (bytes, sense) in [
            (&[0x12, 0, 0x80][..], Sense::invalid_field(2)),
            (&[0x12, 2], Sense::invalid_field(1)),
            (&[0x03, 1], Sense::invalid_field(1)),
            (&[0x1a, 0, 0xc8], Sense::NO_SAVING),
            (&[0x15, 0x11], Sense::invalid_field(1)),
            (&[0x15, 0x00], Sense::invalid_field(1)),
            (&[0x1b, 0, 0, 0, 2], Sense::invalid_field(4)),
            (&[0x2f, 2], Sense::invalid_field(1)),
            (&[0x41, 0, 0, 0, 0, 0, 0, 0, 0], Sense::invalid_field(7)),
            (&[0x42, 1], Sense::invalid_field(1)),
            (&[0x93, 0x10], Sense::invalid_field(1)),
            (&[0x9e, 0x12], Sense::invalid_field(1)),
            (&[0xa3, 0x0c, 4], Sense::invalid_field(2)),
            (&[0xa3, 0x0d], Sense::invalid_field(1)),
            (&[0x00, 0, 0, 0, 0, 4], Sense::invalid_field(5)),
            (&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 4], Sense::invalid_field(9)),
            // Reservations are not supported.
            (&[0x5e, 0], Sense::INVALID_OPCODE),
            (&[0x5f, 0], Sense::INVALID_OPCODE),
            (&[0x16, 0], Sense::INVALID_OPCODE),
            (&[0x17, 0], Sense::INVALID_OPCODE),
            (&[0x7f, 0], Sense::INVALID_OPCODE),
        ] {
            assert_eq!(parse(&cdb(bytes)), Err(sense), "{bytes:x?}");
        }
    }

    proptest! {
        /// Every field is parsed from its place, whatever else is in the CDB.
        #[test]
        fn ranges_survive(lba: u64, count: u32, rest: [u8; CDB_SIZE], which in 0..3usize) {
            let mut cdb = rest;
            cdb[0] = [0x28, 0xa8, 0x88][which];
            cdb[1] &= 0x1f;
            let (lba, count) = match which {
                0 => (lba & 0xffff_ffff, count & 0xffff),
                1 => (lba & 0xffff_ffff, count),
                _ => (lba, count),
            };
            let control = [9, 11, 15][which];
            cdb[control] &= !4;
            match which {
                0 => {
                    cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
                    cdb[7..9].copy_from_slice(&(count as u16).to_be_bytes());
                }
                1 => {
                    cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
                    cdb[6..10].copy_from_slice(&count.to_be_bytes());
                }
                _ => {
                    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
                    cdb[10..14].copy_from_slice(&count.to_be_bytes());
                }
            }
            prop_assert_eq!(parse(&cdb), Ok(Command::Read(Blocks { lba, count })));
        }

        /// Any bytes are parsed or refused. WRITE SAME with a count of 0 is always refused.
        #[test]
        fn every_cdb_has_an_answer(cdb: [u8; CDB_SIZE]) {
            if let Ok(Command::WriteSame { blocks, .. }) = parse(&cdb) {
                prop_assert!(blocks.count > 0);
            }
        }
    }
}
