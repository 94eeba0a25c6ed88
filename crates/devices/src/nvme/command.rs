//! From an entry of a submission queue to a command that is within limits (section 4.2).

use super::bits::{BLOCK, BLOCK_SHIFT, MAX_TRANSFER, SUBMISSION};
use super::data::DataPointer;
use super::namespace::Namespace;
use super::status::Status;
use stats::Kind;

/// A submission queue entry, in its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) opcode: u8,
    /// FUSE and PSDT with the reserved bits between them.
    flags: u8,
    pub(crate) cid: u16,
    pub(crate) nsid: u32,
    pointer: [u8; 16],
    /// Command dwords 10 to 15.
    pub(crate) dwords: [u32; 6],
}

impl Entry {
    pub(crate) fn parse(bytes: &[u8; SUBMISSION as usize]) -> Self {
        let mut words = [0; SUBMISSION as usize / 4];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let [w0, nsid, _, _, _, _, p0, p1, p2, p3, dwords @ ..] = words;
        let [opcode, flags, c0, c1] = w0.to_le_bytes();
        let mut pointer = [0; 16];
        for (bytes, word) in pointer.as_chunks_mut().0.iter_mut().zip([p0, p1, p2, p3]) {
            *bytes = u32::to_le_bytes(word);
        }
        Entry { opcode, flags, cid: u16::from_le_bytes([c0, c1]), nsid, pointer, dwords }
    }

    /// The starting LBA of commands that have one.
    pub(crate) fn slba(&self) -> u64 {
        let [low, high, ..] = self.dwords;
        u64::from(low) | u64::from(high) << 32
    }

    /// Where the data of an I/O command is.
    ///
    /// # Errors
    ///
    /// Fused commands and reserved values are not supported.
    pub(crate) fn data(&self) -> Result<DataPointer, Status> {
        match self.flags {
            0 => Ok(self.prps()),
            0x40 | 0x80 => Ok(DataPointer::Sgl(self.pointer)),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Where the data of an admin command is, which is told by PRPs always (section 4.3).
    pub(crate) fn admin_data(&self) -> Result<DataPointer, Status> {
        if self.flags == 0 { Ok(self.prps()) } else { Err(Status::INVALID_FIELD) }
    }

    fn prps(&self) -> DataPointer {
        let (first, second) = self.prp_entries();
        DataPointer::Prp(first, second)
    }

    /// PRP entry 1 and 2.
    pub(crate) fn prp_entries(&self) -> (u64, u64) {
        let pointer = u128::from_le_bytes(self.pointer);
        (pointer as u64, (pointer >> 64) as u64)
    }
}

/// Opcodes of the NVM command set.
const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const COMPARE: u8 = 0x05;
const WRITE_ZEROES: u8 = 0x08;
const DATASET_MANAGEMENT: u8 = 0x09;
const VERIFY: u8 = 0x0c;

/// Dword 12.
const FUA: u32 = 1 << 30;
/// Of Write Zeroes.
const DEALLOCATE: u32 = 1 << 25;
/// Dword 11 of Dataset Management: AD.
const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;

/// Bytes of a range of Dataset Management, and the most of them.
pub(crate) const DSM_RANGE: usize = 16;
pub(crate) const MAX_DSM_RANGES: usize = 256;

/// NSID of all namespaces.
pub(crate) const ALL_NAMESPACES: u32 = u32::MAX;

/// Bytes of a namespace: within its size, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ByteRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl ByteRange {
    /// The range of `blocks` from `first` on.
    ///
    /// # Errors
    ///
    /// Some of it is beyond the end.
    pub(crate) fn new(first: u64, blocks: u64, namespace: &Namespace) -> Result<Self, Status> {
        match first.checked_add(blocks) {
            Some(end) if end <= namespace.blocks() => {
                Ok(ByteRange { offset: first << BLOCK_SHIFT, len: blocks << BLOCK_SHIFT })
            }
            Some(_) | None => Err(Status::LBA_OUT_OF_RANGE),
        }
    }
}

/// What an I/O command asks of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoCommand {
    Read {
        range: ByteRange,
        data: DataPointer,
    },
    Write {
        range: ByteRange,
        data: DataPointer,
        fua: bool,
    },
    WriteZeroes {
        range: ByteRange,
        may_unmap: bool,
        fua: bool,
    },
    Compare {
        range: ByteRange,
        data: DataPointer,
    },
    Verify {
        range: ByteRange,
    },
    Flush,
    /// The ranges are in the data: so many.
    Deallocate {
        count: usize,
        data: DataPointer,
    },
    /// A hint that means nothing here.
    Hint,
}

impl IoCommand {
    /// What an entry asks of the namespace that it names.
    ///
    /// # Errors
    ///
    /// The status for the driver.
    pub(crate) fn parse(entry: &Entry, namespace: &Namespace) -> Result<Self, Status> {
        let [low, high, dword12, ..] = entry.dwords;
        let data = entry.data()?;
        let range = || {
            let first = u64::from(low) | u64::from(high) << 32;
            ByteRange::new(first, u64::from(dword12 as u16) + 1, namespace)
        };
        // A range whose data is transferred.
        let transfer = || match range()? {
            range if range.len > MAX_TRANSFER => Err(Status::INVALID_FIELD),
            range => Ok(range),
        };
        let writable = || if namespace.read_only { Err(Status::READ_ONLY) } else { Ok(()) };
        let fua = dword12 & FUA != 0;
        Ok(match entry.opcode {
            FLUSH => IoCommand::Flush,
            READ => IoCommand::Read { range: transfer()?, data },
            WRITE => {
                writable()?;
                IoCommand::Write { range: transfer()?, data, fua }
            }
            COMPARE => IoCommand::Compare { range: transfer()?, data },
            VERIFY => IoCommand::Verify { range: range()? },
            WRITE_ZEROES => {
                writable()?;
                let may_unmap = dword12 & DEALLOCATE != 0;
                IoCommand::WriteZeroes { range: range()?, may_unmap, fua }
            }
            DATASET_MANAGEMENT if high & ATTRIBUTE_DEALLOCATE == 0 => IoCommand::Hint,
            DATASET_MANAGEMENT => {
                writable()?;
                IoCommand::Deallocate { count: usize::from(low as u8) + 1, data }
            }
            _ => return Err(Status::INVALID_OPCODE),
        })
    }

    /// Whether an entry is a flush of all namespaces.
    pub(crate) fn is_broadcast_flush(entry: &Entry) -> bool {
        (entry.opcode, entry.nsid) == (FLUSH, ALL_NAMESPACES)
    }

    /// What an entry is counted as, whether it is valid or not.
    pub(crate) fn kind_of(entry: &Entry) -> Kind {
        match entry.opcode {
            READ => Kind::Read,
            WRITE => Kind::Write,
            FLUSH => Kind::Flush,
            WRITE_ZEROES => Kind::WriteZeroes,
            DATASET_MANAGEMENT => Kind::Discard,
            _ => Kind::Other,
        }
    }
}

/// The range in 16 bytes of Dataset Management's data (section 6.7).
///
/// # Errors
///
/// Some of it is beyond the end.
pub(crate) fn dsm_range(
    bytes: &[u8; DSM_RANGE],
    namespace: &Namespace,
) -> Result<ByteRange, Status> {
    let [_, _, _, _, b0, b1, b2, b3, first @ ..] = *bytes;
    let blocks = u32::from_le_bytes([b0, b1, b2, b3]);
    ByteRange::new(u64::from_le_bytes(first), blocks.into(), namespace)
}

const _: () = assert!(MAX_TRANSFER.is_multiple_of(BLOCK));

#[cfg(test)]
mod tests {
    use block::node::Geometry;

    use super::super::namespace::NamespaceConfig;
    use super::*;

    fn namespace(writable: bool) -> Namespace {
        let geometry = Geometry {
            size: 1 << 30,
            read_only: false,
            physical_block_size: 512,
            request_alignment: 1,
            discard: true,
            discard_granularity: 4096,
            write_zeroes: true,
            write_cache: true,
        };
        Namespace::new(&NamespaceConfig { geometry, writable })
    }

    fn entry(opcode: u8, first: u64, dword12: u32) -> Entry {
        let dwords = [first as u32, (first >> 32) as u32, dword12, 0, 0, 0];
        Entry { opcode, flags: 0, cid: 1, nsid: 1, pointer: [0; 16], dwords }
    }

    #[test]
    fn entries_are_read_in_their_fields() {
        let bytes: [u8; 64] = std::array::from_fn(|n| n as u8);
        let entry = Entry::parse(&bytes);
        assert_eq!((entry.opcode, entry.flags, entry.cid, entry.nsid), (0, 1, 0x302, 0x0706_0504));
        assert_eq!(entry.prp_entries(), (0x1f1e_1d1c_1b1a_1918, 0x2726_2524_2322_2120));
        assert_eq!(entry.dwords[0], 0x2b2a_2928);
        assert_eq!(entry.dwords[5], 0x3f3e_3d3c);
        assert_eq!(entry.data(), Err(Status::INVALID_FIELD), "fused");
    }

    #[test]
    fn ranges_end_with_the_namespace() {
        let (namespace, blocks) = (namespace(true), 1 << 21);
        let parse = |entry: Entry| IoCommand::parse(&entry, &namespace);
        assert!(parse(entry(READ, blocks - 1, 0)).is_ok());
        assert_eq!(parse(entry(READ, blocks - 1, 1)), Err(Status::LBA_OUT_OF_RANGE));
        assert_eq!(parse(entry(VERIFY, u64::MAX, 0)), Err(Status::LBA_OUT_OF_RANGE));
        assert_eq!(parse(entry(READ, 0, 2048)), Err(Status::INVALID_FIELD), "beyond MDTS");
        let zeroes = parse(entry(WRITE_ZEROES, 0, FUA | DEALLOCATE | 0xffff));
        let range = ByteRange { offset: 0, len: 32 << 20 };
        assert_eq!(zeroes, Ok(IoCommand::WriteZeroes { range, may_unmap: true, fua: true }));
        assert_eq!(parse(entry(0x11, 0, 0)), Err(Status::INVALID_OPCODE));
        let hint = parse(entry(DATASET_MANAGEMENT, 0, 0));
        assert_eq!(hint, Ok(IoCommand::Hint));
    }

    #[test]
    fn a_read_only_namespace_takes_no_writes() {
        let namespace = namespace(false);
        for opcode in [WRITE, WRITE_ZEROES, DATASET_MANAGEMENT] {
            let first = u64::from(ATTRIBUTE_DEALLOCATE) << 32;
            let parsed = IoCommand::parse(&entry(opcode, first, 0), &namespace);
            assert_eq!(parsed, Err(Status::READ_ONLY), "{opcode:#x}");
        }
        assert!(IoCommand::parse(&entry(READ, 0, 0), &namespace).is_ok());
    }
}
