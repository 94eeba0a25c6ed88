//! Tables of one kind in memory, as many as there is room for.

/// No table.
const NONE: u32 = u32::MAX;

/// Tables of one kind, each by its index in the table above it.
///
/// What is changed here is also kept elsewhere before the next table is read, so any table can go at any time.
#[derive(Debug)]
pub(super) struct Tables {
    /// The slot of each index.
    of: Vec<u32>,
    slots: Vec<TableSlot>,
    /// The slot that is looked at next when one has to go.
    hand: usize,
    most: usize,
}

#[derive(Debug)]
struct TableSlot {
    index: usize,
    was_used: bool,
    bytes: Box<[u8]>,
}

impl Tables {
    /// For so many indices, with at most so many tables.
    pub(super) fn new(indices: usize, most: usize) -> Tables {
        Tables { of: vec![NONE; indices], slots: Vec::new(), hand: 0, most: most.max(1) }
    }

    /// There are so many indices from now on.
    pub(super) fn grow(&mut self, indices: usize) {
        self.of.resize(indices.max(self.of.len()), NONE);
    }

    /// The slot of a table, if it is in memory.
    pub(super) fn slot(&mut self, index: usize) -> Option<usize> {
        let slot = *self.of.get(index)?;
        let found = self.slots.get_mut(slot as usize)?;
        found.was_used = true;
        Some(slot as usize)
    }

    /// A table's bytes.
    pub(super) fn bytes(&self, slot: usize) -> &[u8] {
        self.slots.get(slot).map_or(&[], |slot| &slot.bytes)
    }

    /// The same, to be changed.
    pub(super) fn bytes_mut(&mut self, slot: usize) -> &mut [u8] {
        self.slots.get_mut(slot).map_or(&mut [], |slot| &mut slot.bytes)
    }

    /// Takes a table that was read. Others may have to go.
    pub(super) fn insert(&mut self, index: usize, bytes: Box<[u8]>) {
        if self.of.get(index).is_none_or(|slot| *slot != NONE) {
            return;
        }
        while self.slots.len() > self.most {
            if let Some(last) = self.slots.pop() {
                self.of[last.index] = NONE;
            }
        }
        if self.slots.len() < self.most {
            self.add(index, bytes);
            return;
        }
        loop {
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = &mut self.slots[self.hand];
            if !std::mem::take(&mut slot.was_used) {
                self.of[slot.index] = NONE;
                *slot = TableSlot { index, was_used: true, bytes };
                self.of[index] = self.hand as u32;
                return;
            }
        }
    }

    /// Drops the tables that were not used since the last call.
    pub(super) fn forget_unused(&mut self) {
        let slots = std::mem::take(&mut self.slots);
        for mut slot in slots {
            let was_used = std::mem::take(&mut slot.was_used);
            self.of[slot.index] = if was_used { self.slots.len() as u32 } else { NONE };
            if was_used {
                self.slots.push(slot);
            }
        }
        self.slots.shrink_to_fit();
        self.hand = 0;
    }

    /// Drops all tables.
    pub(super) fn forget_all(&mut self) {
        self.of.fill(NONE);
        (self.slots, self.hand) = (Vec::new(), 0);
    }

    /// Takes a table that is new, or another one for an index. No other goes. Returns its slot.
    pub(super) fn add(&mut self, index: usize, bytes: Box<[u8]>) -> usize {
        if let Some(slot) = self.slot(index) {
            self.slots[slot].bytes = bytes;
            return slot;
        }
        self.grow(index + 1);
        self.of[index] = self.slots.len() as u32;
        self.slots.push(TableSlot { index, was_used: true, bytes });
        self.slots.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_are_not_used_are_forgotten() {
        let mut tables = Tables::new(4, 4);
        (0..4).for_each(|index| tables.insert(index, vec![index as u8; 8].into_boxed_slice()));
        tables.forget_unused();
        let slot = tables.slot(2).unwrap();
        assert_eq!(tables.bytes(slot)[0], 2);
        tables.forget_unused();
        assert_eq!([0, 1, 3].map(|index| tables.slot(index)), [None; 3]);
        let slot = tables.slot(2).unwrap();
        assert_eq!(tables.bytes(slot)[0], 2);
        tables.insert(0, vec![9; 8].into_boxed_slice());
        assert!(tables.slot(0).is_some() && tables.slot(2).is_some());
    }

    #[test]
    fn used_tables_stay_in_memory_and_others_are_dropped() {
        let mut tables = Tables::new(4, 2);
        let table = |byte: u8| vec![byte; 8].into_boxed_slice();
        let has = |tables: &mut Tables, index| tables.slot(index).map(|slot| tables.bytes(slot)[0]);
        tables.insert(0, table(0));
        tables.insert(1, table(1));
        tables.insert(2, table(2));
        assert_eq!(has(&mut tables, 2), Some(2));
        assert_eq!(
            [0, 1].map(|index| has(&mut tables, index).is_some() as u8).iter().sum::<u8>(),
            1
        );
        // One that is new finds room at once; the next that is read makes it up.
        assert_eq!(tables.add(3, table(3)), 2);
        assert_eq!(tables.add(3, table(4)), 2);
        assert_eq!(has(&mut tables, 3), Some(4));
        tables.insert(0, table(0));
        tables.insert(1, table(1));
        let there = (0..4).filter(|index| tables.slot(*index).is_some()).count();
        assert_eq!(there, 2);
        assert_eq!(tables.slot(9), None);
    }
}
