//! Which places in a ring's table of registered buffers are taken.

/// `IORING_MAX_REG_BUFFERS`. Sparse: an unused place costs 8 bytes in the kernel, so all of them
/// 128 KiB, once there is a table.
pub(super) const PLACES: u32 = 1 << 14;

/// The table's places. Control plane: looked through from the beginning.
pub(super) struct BufferTable {
    taken: Vec<bool>,
}

impl BufferTable {
    pub(super) fn new() -> Self {
        BufferTable { taken: vec![false; PLACES as usize] }
    }

    /// Takes `count` places in a row; the first of them, where there are so many.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        let mut free = 0;
        let end = self.taken.iter().position(|&taken| {
            free = if taken { 0 } else { free + 1 };
            free >= count
        })?;
        let first = (end + 1).checked_sub(count as usize)?;
        self.taken[first..=end].fill(true);
        Some(first as u32)
    }

    pub(super) fn give_back(&mut self, index: u32) {
        if let Some(taken) = self.taken.get_mut(index as usize) {
            *taken = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_a_row_are_found_where_they_are_free() {
        let mut table = BufferTable::new();
        assert_eq!((table.take(3), table.take(2)), (Some(0), Some(3)));
        table.give_back(1);
        table.give_back(2);
        assert_eq!((table.take(3), table.take(2), table.take(1)), (Some(5), Some(1), Some(8)));
        assert_eq!(table.take(PLACES), None);
        assert_eq!(table.take(PLACES - 9), Some(9));
        assert_eq!(table.take(1), None);
        table.give_back(PLACES - 1);
        assert_eq!(table.take(1), Some(PLACES - 1));
    }
}
