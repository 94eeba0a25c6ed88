//! The flag of an entry that says whether the cluster is used once, so that it may be written in place.

use std::collections::BTreeMap;

use super::refcounts::Refcounts;
use super::walk::{Found, Leads};
use super::{Check, CheckError, Checked, Repair};
use crate::drivers::qcow2::engine::entry::{COPIED, OFFSET};
use crate::drivers::qcow2::steps::{ENTRY, number};

impl Check<'_> {
    /// Checks the flags in the tables of the disk; those of snapshots mean nothing.
    pub(super) fn check_copied(&mut self, refcounts: &Refcounts) -> Result<(), CheckError> {
        let Checked { corruptions, leaks, check_errors, .. } = self.found;
        // Flags are right as far as counts are.
        self.repairs_copied = match self.repair {
            Repair::None => false,
            Repair::Leaks => corruptions + leaks + check_errors == 0,
            Repair::All => true,
        };
        let (at, len) = self.shape.l1;
        let mut l1 = self.file.read(at, len as usize)?;
        let mut is_changed = false;
        // What the walk of each table has found that several entries lead to.
        let mut shared = BTreeMap::new();
        let mut tables: Vec<_> =
            l1.chunks_exact(ENTRY).map(|entry| number(entry) & OFFSET).collect();
        tables.sort_unstable();
        for pair in tables.windows(2) {
            if let [one, other] = pair
                && one == other
            {
                shared.insert(*one, None);
            }
        }
        drop(tables);
        for (index, entry) in l1.chunks_exact_mut(ENTRY).enumerate() {
            let raw = number(entry);
            let table = raw & OFFSET;
            if table == 0 {
                continue;
            }
            let Some(count) = refcounts.of(self.shape.number(table)) else { continue };
            if (count == 1) != (raw & COPIED != 0) {
                let what = "OFLAG_COPIED L2 cluster: l1_index=";
                let repaired =
                    self.flag(format_args!("{what}{index} l1_entry={raw:x} refcount={count}"));
                if repaired {
                    entry.copy_from_slice(&(raw ^ COPIED).to_be_bytes());
                    is_changed = true;
                }
            }
            // A table past the end of the file consists of zeroes.
            if table >= self.file.len() {
                continue;
            }
            let seen = shared.get_mut(&table);
            if let Some(Some(found)) = seen {
                Found::add_to(*found, &mut self.found);
                continue;
            }
            let before = self.found;
            self.check_copied_l2(table, refcounts)?;
            if let Some(seen) = seen {
                *seen = Some(Found::between(&before, &self.found));
            }
        }
        if is_changed {
            self.file.write(at, &l1)?;
        }
        Ok(())
    }

    fn check_copied_l2(&mut self, at: u64, refcounts: &Refcounts) -> Result<(), CheckError> {
        let mut table = self.file.read(at, self.shape.cluster() as usize)?;
        let mut is_changed = false;
        for entry in table.chunks_exact_mut(self.shape.l2_entry) {
            let raw = number(&entry[..ENTRY]);
            let Leads::To { host, .. } = self.leads(raw) else { continue };
            let count = match self.shape.has_data_file {
                true => Some(1),
                false => refcounts.of(self.shape.number(host)),
            };
            let Some(count) = count else { continue };
            if (count == 1) != (raw & COPIED != 0) {
                let what = "OFLAG_COPIED data cluster: l2_entry=";
                if self.flag(format_args!("{what}{raw:x} refcount={count}")) {
                    entry[..ENTRY].copy_from_slice(&(raw ^ COPIED).to_be_bytes());
                    is_changed = true;
                }
            }
        }
        if is_changed {
            self.file.write(at, &table)?;
        }
        Ok(())
    }

    /// Counts a wrong flag. Returns whether it is repaired.
    fn flag(&mut self, what: std::fmt::Arguments<'_>) -> bool {
        let repaired = self.repairs_copied;
        (self.tell)(format_args!("{} {what}", if repaired { "Repairing" } else { "ERROR" }));
        match repaired {
            true => self.found.corruptions_fixed += 1,
            false => self.found.corruptions += 1,
        }
        repaired
    }
}
