//! Where a command's data is: PRP entries and lists (section 4.3), SGL descriptors (section 4.4).

use guest_memory::MemoryView;

use super::bits::PAGE;
use super::status::Status;

/// Bytes of a PRP entry and of an SGL descriptor.
const PRP: u64 = 8;
const DESCRIPTOR: usize = 16;
/// How many of each are read at once.
const PRPS_AT_ONCE: usize = 64;
const DESCRIPTORS_AT_ONCE: usize = 32;
/// The most SGL descriptors of a command.
const MAX_DESCRIPTORS: usize = 1024;

/// DPTR with PSDT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataPointer {
    /// PRP entry 1 and 2.
    Prp(u64, u64),
    /// SGL segment 1.
    Sgl([u8; DESCRIPTOR]),
}

impl DataPointer {
    /// Calls `take` with the address and the length of each piece of `len` bytes of data, in order.
    ///
    /// # Errors
    ///
    /// The status for the driver: of the list, or of `take`.
    pub(crate) fn pieces(
        &self,
        memory: &MemoryView,
        len: u64,
        mut take: impl FnMut(u64, u64) -> Result<(), Status>,
    ) -> Result<(), Status> {
        match *self {
            DataPointer::Prp(first, second) => prps(memory, first, second, len, &mut take),
            DataPointer::Sgl(descriptor) => sgl(memory, &descriptor, len, &mut take),
        }
    }

    /// Copies `bytes` to the guest.
    ///
    /// # Errors
    ///
    /// As of [`pieces`](Self::pieces), or the data pointer points to no memory.
    pub(crate) fn write(&self, memory: &MemoryView, bytes: &[u8]) -> Result<(), Status> {
        let mut rest = bytes;
        self.pieces(memory, bytes.len() as u64, |addr, len| {
            let (piece, tail) = rest.split_at_checked(len as usize).unwrap_or((rest, &[]));
            rest = tail;
            memory.write_bytes(addr, piece).map_err(|_| Status::DATA_TRANSFER_ERROR)
        })
    }

    /// Copies the guest's data to `bytes`.
    ///
    /// # Errors
    ///
    /// As of [`write`](Self::write).
    pub(crate) fn read(&self, memory: &MemoryView, bytes: &mut [u8]) -> Result<(), Status> {
        let len = bytes.len() as u64;
        let mut filled = 0;
        self.pieces(memory, len, |addr, len| {
            let end = filled + len as usize;
            let piece = bytes.get_mut(filled..end).unwrap_or_default();
            filled = end;
            memory.read_bytes(addr, piece).map_err(|_| Status::DATA_TRANSFER_ERROR)
        })
    }
}

type Take<'a> = &'a mut dyn FnMut(u64, u64) -> Result<(), Status>;

fn prps(
    memory: &MemoryView,
    first: u64,
    second: u64,
    len: u64,
    take: Take<'_>,
) -> Result<(), Status> {
    if !first.is_multiple_of(4) {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let bytes = (PAGE - first % PAGE).min(len);
    if bytes > 0 {
        take(first, bytes)?;
    }
    match len - bytes {
        0 => Ok(()),
        left @ 1..=PAGE => {
            if !second.is_multiple_of(PAGE) {
                return Err(Status::INVALID_PRP_OFFSET);
            }
            take(second, left)
        }
        left => prp_list(memory, second, left, take),
    }
}

/// A list at `at`, of `left` bytes in pages. Its last entry names the next list, if one page of entries is not enough.
/// Only the first list begins within a page, so the entries that are read are bounded by the length.
fn prp_list(memory: &MemoryView, mut at: u64, mut left: u64, take: Take<'_>) -> Result<(), Status> {
    if !at.is_multiple_of(PRP) {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    loop {
        let room = (PAGE - at % PAGE) / PRP;
        let wanted = left.div_ceil(PAGE);
        let is_last = wanted <= room;
        let mut entries = if is_last { wanted } else { room - 1 };
        while entries > 0 {
            let mut chunk = [0; PRPS_AT_ONCE * PRP as usize];
            let count = entries.min(PRPS_AT_ONCE as u64);
            let chunk = chunk.get_mut(..(count * PRP) as usize).unwrap_or_default();
            memory.read_bytes(at, chunk).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            for entry in chunk.as_chunks().0 {
                let page = u64::from_le_bytes(*entry);
                if !page.is_multiple_of(PAGE) {
                    return Err(Status::INVALID_PRP_OFFSET);
                }
                let bytes = left.min(PAGE);
                take(page, bytes)?;
                left -= bytes;
            }
            at = at.wrapping_add(count * PRP);
            entries -= count;
        }
        if is_last {
            return Ok(());
        }
        at = memory.read_u64(at).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        if !at.is_multiple_of(PAGE) {
            return Err(Status::INVALID_PRP_OFFSET);
        }
    }
}

/// An SGL descriptor, by its type.
enum Descriptor {
    Block { addr: u64, len: u64 },
    Segment { addr: u64, count: usize, is_last: bool },
}

impl Descriptor {
    fn parse(bytes: &[u8; DESCRIPTOR]) -> Result<Self, Status> {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, _, _, _, id] = *bytes;
        let addr = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        match id {
            0x00 => Ok(Descriptor::Block { addr, len: len.into() }),
            0x20 | 0x30 => {
                let len = len as usize;
                if len == 0 || !len.is_multiple_of(DESCRIPTOR) {
                    return Err(Status::INVALID_SGL_SEGMENT);
                }
                Ok(Descriptor::Segment { addr, count: len / DESCRIPTOR, is_last: id == 0x30 })
            }
            _ => Err(Status::INVALID_SGL_TYPE),
        }
    }
}

fn sgl(
    memory: &MemoryView,
    descriptor: &[u8; DESCRIPTOR],
    len: u64,
    take: Take<'_>,
) -> Result<(), Status> {
    let mut left = len;
    let mut block = |addr, len: u64| {
        left = left.checked_sub(len).ok_or(Status::INVALID_SGL_LENGTH)?;
        if len > 0 { take(addr, len) } else { Ok(()) }
    };
    let mut next = match Descriptor::parse(descriptor)? {
        Descriptor::Block { addr, len } => {
            block(addr, len)?;
            None
        }
        Descriptor::Segment { addr, count, is_last } => Some((addr, count, is_last)),
    };
    let mut read = 0;
    while let Some((mut at, mut count, is_last)) = next.take() {
        read += count;
        if read > MAX_DESCRIPTORS {
            return Err(Status::INVALID_SGL_COUNT);
        }
        while count > 0 {
            let mut chunk = [0; DESCRIPTORS_AT_ONCE * DESCRIPTOR];
            let n = count.min(DESCRIPTORS_AT_ONCE);
            let chunk = chunk.get_mut(..n * DESCRIPTOR).unwrap_or_default();
            memory.read_bytes(at, chunk).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            for descriptor in chunk.as_chunks().0 {
                count -= 1;
                match Descriptor::parse(descriptor)? {
                    Descriptor::Block { addr, len } => block(addr, len)?,
                    // Only at the end of a segment that is not the last.
                    Descriptor::Segment { addr, count: more, is_last: ends } => {
                        if is_last || count > 0 {
                            return Err(Status::INVALID_SGL_SEGMENT);
                        }
                        next = Some((addr, more, ends));
                    }
                }
            }
            at = at.wrapping_add((n * DESCRIPTOR) as u64);
        }
        if !is_last && next.is_none() {
            return Err(Status::INVALID_SGL_SEGMENT);
        }
    }
    if left == 0 { Ok(()) } else { Err(Status::INVALID_SGL_LENGTH) }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use guest_memory::test_util::memfd_memory;

    use super::*;

    fn memory() -> Rc<MemoryView> {
        MemoryView::new(memfd_memory(&[(0, 4 << 20)]).unwrap())
    }

    fn pieces(
        memory: &MemoryView,
        pointer: DataPointer,
        len: u64,
    ) -> Result<Vec<(u64, u64)>, Status> {
        let mut pieces = Vec::new();
        pointer.pieces(memory, len, |addr, len| {
            pieces.push((addr, len));
            Ok(())
        })?;
        Ok(pieces)
    }

    fn list(memory: &MemoryView, at: u64, entries: impl IntoIterator<Item = u64>) {
        for (n, entry) in (0..).zip(entries) {
            memory.write_bytes(at + 8 * n, &u64::to_le_bytes(entry)).unwrap();
        }
    }

    fn descriptor(addr: u64, len: u32, id: u8) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[15] = id;
        bytes
    }

    #[test]
    fn two_prps_are_two_pages() {
        let memory = memory();
        let prp = |first, second, len| pieces(&memory, DataPointer::Prp(first, second), len);
        assert_eq!(prp(0x1200, 0, 0xe00), Ok(vec![(0x1200, 0xe00)]));
        assert_eq!(prp(0x1200, 0x5000, 0x1000), Ok(vec![(0x1200, 0xe00), (0x5000, 0x200)]));
        assert_eq!(prp(0x1202, 0, 512), Err(Status::INVALID_PRP_OFFSET));
        assert_eq!(prp(0x1000, 0x5010, 0x2000), Err(Status::INVALID_PRP_OFFSET));
    }

    #[test]
    fn prp_lists_go_on_in_the_last_entry_of_a_page() {
        let memory = memory();
        // Two entries of the first page: a data page and the next list.
        let at = 0x4000 - 16;
        list(&memory, at, [0x10_0000, 0x8000]);
        list(&memory, 0x8000, (0..100).map(|n| 0x20_0000 + n * 0x1000));
        let found = pieces(&memory, DataPointer::Prp(0x1000, at), 102 * 4096).unwrap();
        assert_eq!(found.len(), 102);
        assert_eq!(found[..3], [(0x1000, 4096), (0x10_0000, 4096), (0x20_0000, 4096)]);
        assert_eq!(found[101], (0x20_0000 + 99 * 0x1000, 4096));
        list(&memory, 0x8000, [0x20_0008]);
        let broken = pieces(&memory, DataPointer::Prp(0x1000, at), 102 * 4096);
        assert_eq!(broken, Err(Status::INVALID_PRP_OFFSET));
        let nowhere = pieces(&memory, DataPointer::Prp(0x1000, 1 << 40), 102 * 4096);
        assert_eq!(nowhere, Err(Status::DATA_TRANSFER_ERROR));
    }

    #[test]
    fn sgls_are_as_long_as_the_data() {
        let memory = memory();
        let sgl = |first, len| pieces(&memory, DataPointer::Sgl(first), len);
        assert_eq!(sgl(descriptor(7, 512, 0), 512), Ok(vec![(7, 512)]));
        assert_eq!(sgl(descriptor(7, 511, 0), 512), Err(Status::INVALID_SGL_LENGTH));
        assert_eq!(sgl(descriptor(7, 513, 0), 512), Err(Status::INVALID_SGL_LENGTH));
        assert_eq!(sgl(descriptor(7, 512, 0x10), 512), Err(Status::INVALID_SGL_TYPE));
        assert_eq!(sgl(descriptor(0x1000, 15, 0x30), 512), Err(Status::INVALID_SGL_SEGMENT));

        // A segment with a block and the last segment, which has two, one of them empty.
        memory.write_bytes(0x1000, &descriptor(0x9000, 100, 0)).unwrap();
        memory.write_bytes(0x1010, &descriptor(0x2000, 32, 0x30)).unwrap();
        memory.write_bytes(0x2000, &descriptor(0, 0, 0)).unwrap();
        memory.write_bytes(0x2010, &descriptor(0xa000, 412, 0)).unwrap();
        let chain = descriptor(0x1000, 32, 0x20);
        assert_eq!(sgl(chain, 512), Ok(vec![(0x9000, 100), (0xa000, 412)]));
        // A segment that is the last must not name another, and one that is not must.
        assert_eq!(sgl(descriptor(0x1000, 32, 0x30), 512), Err(Status::INVALID_SGL_SEGMENT));
        assert_eq!(sgl(descriptor(0x2000, 32, 0x20), 412), Err(Status::INVALID_SGL_SEGMENT));
        // A chain that leads back to itself ends.
        memory.write_bytes(0x1000, &descriptor(0, 0, 0)).unwrap();
        memory.write_bytes(0x1010, &chain).unwrap();
        assert_eq!(sgl(chain, 512), Err(Status::INVALID_SGL_COUNT));
    }

    #[test]
    fn data_is_copied_over_pieces() {
        let memory = memory();
        let pointer = DataPointer::Prp(0x1ffc, 0x6000);
        pointer.write(&memory, &[1, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(memory.read_u32(0x1ffc), Ok(0x0403_0201));
        assert_eq!(memory.read_u16(0x6000), Ok(0x0605));
        let mut back = [0; 6];
        pointer.read(&memory, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3, 4, 5, 6]);
        let nowhere = DataPointer::Prp(1 << 40, 0);
        assert_eq!(nowhere.read(&memory, &mut back), Err(Status::DATA_TRANSFER_ERROR));
    }
}
