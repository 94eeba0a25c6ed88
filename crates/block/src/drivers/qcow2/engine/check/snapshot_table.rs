//! A new snapshot table, in place of one with entries that lack data.

use std::io;
use std::ops::Range;

use super::refcounts::Refcounts;
use super::{Check, CheckError};
use crate::drivers::qcow2::steps::SECTOR;

/// Where the header has the table's first byte. The number of entries stays as it is.
const TABLE_AT: Range<usize> = 64..72;

impl Check<'_> {
    /// Writes the completed table into unused clusters, has the header lead to it, and releases the clusters of the
    /// incomplete one. `refcounts` are repaired.
    pub(super) fn replace_snapshot_table(
        &mut self,
        refcounts: &mut Refcounts,
    ) -> Result<(), CheckError> {
        let (shape, places) = (self.shape, self.places);
        let clusters = (places.completed_table.len() as u64).div_ceil(shape.cluster());
        // With corruptions that are left, something may lie in the file uncounted.
        let is_sound = self.found.corruptions == 0 && self.found.check_errors == 0;
        let first = if is_sound { 0 } else { self.clusters() };
        let Some(new) = refcounts.unused(first, clusters) else {
            let why = "no room for a new snapshot table: 'qemu-img check -r all' makes room";
            return Err(CheckError::Io(io::Error::other(why)));
        };
        let mut bytes = places.completed_table.clone();
        bytes.resize((clusters << shape.cluster_bits) as usize, 0);
        let at = new << shape.cluster_bits;
        self.file.write(at, &bytes)?;
        (new..new + clusters).for_each(|cluster| refcounts.set(cluster, 1));
        refcounts.store(self.file)?;
        self.file.sync()?;
        let mut header = self.file.read(0, SECTOR)?;
        header[TABLE_AT].copy_from_slice(&at.to_be_bytes());
        self.file.write(0, &header)?;
        self.file.sync()?;
        let old = &places.snapshot_table;
        let old = shape.number(old.start)..=shape.number(old.end - 1);
        if !is_sound {
            self.found.leaks += old.count() as u64;
            return Ok(());
        }
        for cluster in old {
            if let Some(count) = refcounts.of(cluster) {
                refcounts.set(cluster, count.saturating_sub(1));
            }
        }
        refcounts.store(self.file)?;
        self.found.image_end = refcounts.end() << shape.cluster_bits;
        Ok(())
    }
}
