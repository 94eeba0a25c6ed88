//! The parameter list of UNMAP (SBC-3, 5.28).

use super::cdb::Blocks;
use super::lun::Lun;
use super::sense::Sense;

/// Most descriptors in a list; block limits say so.
pub(crate) const MAX_DESCRIPTORS: usize = 64;
/// Bytes of the list's header, and of a descriptor.
const HEADER: usize = 8;
const DESCRIPTOR: usize = 16;
/// Most bytes of a list that are looked at.
pub(crate) const MAX_LIST: usize = HEADER + DESCRIPTOR * MAX_DESCRIPTORS;

/// The ranges of a list, in bytes.
#[derive(Debug)]
pub(crate) struct Ranges {
    count: usize,
    list: [(u64, u64); MAX_DESCRIPTORS],
}

impl Ranges {
    /// Checks a list, of which `list` is all, or its first [`MAX_LIST`] bytes. All ranges are checked
    /// before one is unmapped.
    pub(crate) fn parse(lun: &Lun, list: &[u8]) -> Result<Self, Sense> {
        let mut ranges = Ranges { count: 0, list: [(0, 0); MAX_DESCRIPTORS] };
        let Some((header, descriptors)) = list.split_at_checked(HEADER) else {
            // Nothing is to be unmapped, and that is no error; half a header is one.
            return if list.is_empty() { Ok(ranges) } else { Err(Sense::PARAMETER_LIST_LENGTH) };
        };
        let len = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if len / DESCRIPTOR > MAX_DESCRIPTORS {
            return Err(Sense::invalid_parameter(2));
        }
        // A list that ends in the middle of a descriptor, or before the header says, is taken as far
        // as it has whole ones.
        let (descriptors, _) = descriptors.as_chunks::<DESCRIPTOR>();
        for (i, bytes) in descriptors.iter().take(len / DESCRIPTOR).enumerate() {
            let [a, b, c, d, e, f, g, h, i0, i1, i2, i3, ..] = *bytes;
            let lba = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
            let count = u32::from_be_bytes([i0, i1, i2, i3]);
            if count > lun.max_range() {
                return Err(Sense::invalid_parameter((HEADER + DESCRIPTOR * i + 8) as u16));
            }
            let range = lun.range(Blocks { lba, count })?;
            if count > 0
                && let Some(place) = ranges.list.get_mut(ranges.count)
            {
                *place = range;
                ranges.count += 1;
            }
        }
        Ok(ranges)
    }

    /// Offsets and lengths, none of them empty.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.list.iter().take(self.count).copied()
    }
}
