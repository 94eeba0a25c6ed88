//! Checks and repairs the metadata of an image that is not in use, as `qemu-img check` does.
//!
//! The check counts what refers to each cluster of the file and compares the numbers with the reference counts of the file.
//! It does no I/O itself: it reads and writes a [`CheckedFile`].
//!
//! Order of a repair: L2 entries without a place, reference counts, the snapshot table, `COPIED` flags. Counts that are
//! raised are in the file before a flag says that a cluster is used once. New refcount structures and snapshot tables lie in
//! unused clusters, and on stable storage, before the header refers to them.

mod copied;
mod refcounts;
mod references;
mod snapshot_table;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;

use self::refcounts::Refcounts;
use self::references::References;
use self::walk::SharedTable;
use crate::drivers::qcow2::header::Header;

/// Most clusters of a file, as in QEMU.
const MOST_CLUSTERS: u64 = i32::MAX as u64;

/// The file of an image, and what it has of the image beside tables.
pub(in crate::drivers::qcow2) trait CheckedFile {
    /// The length of the file in bytes.
    fn len(&self) -> u64;
    /// Reads; zeroes past the end.
    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>>;
    /// Writes. The file grows if needed.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// What was written is on stable storage on return.
    fn sync(&mut self) -> io::Result<()>;
}

/// What a check repairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Nothing.
    None,
    /// Clusters that are counted and not used.
    Leaks,
    /// All that can be.
    All,
}

impl Repair {
    fn leaks(self) -> bool {
        self != Repair::None
    }

    fn errors(self) -> bool {
        self == Repair::All
    }
}

/// What a check has found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// Number of errors of the metadata that endanger data.
    pub corruptions: u64,
    /// Number of clusters that are counted more often than they are used.
    pub leaks: u64,
    /// Number of parts of the metadata that could not be checked.
    pub check_errors: u64,
    /// Number of [`corruptions`](Self::corruptions) that were repaired.
    pub corruptions_fixed: u64,
    /// Number of [`leaks`](Self::leaks) that were repaired.
    pub leaks_fixed: u64,
    /// End of the last cluster in use, bytes of the file.
    pub image_end: u64,
    /// Number of clusters of the disk.
    pub total: u64,
    /// Number of clusters of the disk with a place in the file.
    pub allocated: u64,
    /// Number of clusters of the disk that are compressed.
    pub compressed: u64,
    /// Number of clusters of the disk that do not follow the one before in the file.
    pub fragmented: u64,
}

/// Where metadata of an image lies that its tables do not lead to.
#[derive(Debug, Default)]
pub(in crate::drivers::qcow2) struct Places {
    /// The bytes of the snapshot table.
    pub(in crate::drivers::qcow2) snapshot_table: Range<u64>,
    /// The L1 table of each internal snapshot: the snapshot's id and name, first byte, entries.
    pub(in crate::drivers::qcow2) snapshots: Vec<(String, u64, u64)>,
    /// What the persistent dirty bitmaps take, bytes: directory and tables.
    pub(in crate::drivers::qcow2) bitmaps: Vec<Range<u64>>,
    /// The bytes of the LUKS header of an encrypted image.
    pub(in crate::drivers::qcow2) luks: Option<Range<u64>>,
    /// Errors that were found on the way to the places, one line each.
    pub(in crate::drivers::qcow2) errors: Vec<String>,
    /// The indices of entries of the snapshot table that lack data which version 3 of the format demands.
    pub(in crate::drivers::qcow2) incomplete: Vec<usize>,
    /// The snapshot table with that data, if there are such entries.
    pub(in crate::drivers::qcow2) completed_table: Vec<u8>,
}

/// Why a check ended early.
#[derive(Debug)]
pub(in crate::drivers::qcow2) enum CheckError {
    /// The file cannot be read or written.
    Io(io::Error),
    /// Leaks cannot be repaired alone: the refcount structures are damaged.
    NeedsRebuild,
    /// The file is larger than a check can take.
    TooLarge,
}

impl From<io::Error> for CheckError {
    fn from(error: io::Error) -> CheckError {
        CheckError::Io(error)
    }
}

/// A check under way.
pub(in crate::drivers::qcow2) struct Check<'a> {
    file: &'a mut dyn CheckedFile,
    /// Receives a line for each finding.
    tell: Box<dyn FnMut(fmt::Arguments<'_>) + 'a>,
    repair: Repair,
    shape: Shape,
    places: &'a Places,
    /// The place of the refcount table: first byte and number of bytes.
    refcount_table: (u64, u64),
    found: Checked,
    /// Tables that were walked twice, by their places.
    shared: BTreeMap<u64, SharedTable>,
    /// The refcount structures cannot be repaired in place.
    rebuild: bool,
    /// `COPIED` flags are repaired.
    repairs_copied: bool,
}

/// The form of an image's tables.
#[derive(Debug, Clone, Copy)]
struct Shape {
    cluster_bits: u32,
    refcount_order: u32,
    /// Bytes of an entry of an L2 table.
    l2_entry: usize,
    has_data_file: bool,
    /// The L1 table: first byte and number of bytes.
    l1: (u64, u64),
    /// The largest reference count.
    most: u64,
}

impl Shape {
    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn number(&self, at: u64) -> u64 {
        at >> self.cluster_bits
    }

    fn is_aligned(&self, at: u64) -> bool {
        at.is_multiple_of(self.cluster())
    }
}

impl<'a> Check<'a> {
    pub(in crate::drivers::qcow2) fn new(
        header: &Header,
        places: &'a Places,
        repair: Repair,
        file: &'a mut dyn CheckedFile,
        tell: impl FnMut(fmt::Arguments<'_>) + 'a,
    ) -> Check<'a> {
        let shape = Shape {
            cluster_bits: header.cluster.trailing_zeros(),
            refcount_order: header.refcount_bits.trailing_zeros(),
            l2_entry: if header.extended_l2 { 16 } else { 8 },
            has_data_file: header.data_file.is_some(),
            l1: header.l1_table,
            most: u64::MAX >> (64 - header.refcount_bits),
        };
        let total = header.size.div_ceil(header.cluster);
        let found = Checked { total, ..Checked::default() };
        let refcount_table = header.refcount_table;
        let tell = Box::new(tell);
        Check {
            file,
            tell,
            repair,
            shape,
            places,
            refcount_table,
            found,
            shared: BTreeMap::new(),
            rebuild: false,
            repairs_copied: false,
        }
    }

    /// Checks and repairs. The caller clears the dirty and the corrupt bit if a repair left neither corruptions nor
    /// check errors.
    ///
    /// # Errors
    ///
    /// The check could not be finished.
    pub(in crate::drivers::qcow2) fn run(mut self) -> Result<Checked, CheckError> {
        if self.clusters() > MOST_CLUSTERS {
            return Err(CheckError::TooLarge);
        }
        for error in &self.places.errors {
            (self.tell)(format_args!("ERROR {error}"));
        }
        self.found.corruptions += self.places.errors.len() as u64;
        let incomplete = self.places.incomplete.len() as u64;
        let (what, found) = match self.repair.errors() {
            true => ("Repairing", &mut self.found.corruptions_fixed),
            false => ("ERROR", &mut self.found.corruptions),
        };
        *found += incomplete;
        for index in &self.places.incomplete {
            (self.tell)(format_args!("{what} snapshot table entry {index} is incomplete"));
        }
        let references = self.references(self.repair)?;
        let mut refcounts = Refcounts::read(self.file, &self.shape, self.refcount_table)?;
        self.compare(&mut refcounts, &references)?;
        if self.rebuild && self.repair.errors() {
            refcounts = self.rebuild(references)?;
        } else if self.repair != Repair::None {
            if self.rebuild {
                (self.tell)(format_args!("ERROR need to rebuild refcount structures"));
                return Err(CheckError::NeedsRebuild);
            }
            if refcounts.store(self.file)? {
                // What a copied flag relies on.
                self.file.sync()?;
            }
        }
        if self.repair.errors() && incomplete > 0 {
            self.replace_snapshot_table(&mut refcounts)?;
        }
        self.check_copied(&refcounts)?;
        if self.repair != Repair::None {
            self.file.sync()?;
        }
        Ok(self.found)
    }

    /// Clusters of the file.
    fn clusters(&self) -> u64 {
        self.file.len().div_ceil(self.shape.cluster())
    }

    /// The same check without repairs and messages, with the refcount table at another place.
    fn apart(&mut self, refcount_table: (u64, u64)) -> Check<'_> {
        Check {
            file: &mut *self.file,
            tell: Box::new(|_| {}),
            repair: Repair::None,
            shape: self.shape,
            places: self.places,
            refcount_table,
            found: Checked { total: self.found.total, ..Checked::default() },
            shared: BTreeMap::new(),
            rebuild: false,
            repairs_copied: false,
        }
    }

    /// Replaces the refcount structures, and counts what is still wrong.
    fn rebuild(&mut self, references: References) -> Result<Refcounts, CheckError> {
        (self.tell)(format_args!("Rebuilding refcount structure"));
        let refcounts = self.replace_refcounts(references)?;
        self.rebuild = false;
        let (before, errors) = (self.found, self.places.errors.len() as u64);
        let after = {
            let mut again = self.apart(self.refcount_table);
            // The old structures are not in use any more.
            let references = again.references(Repair::None)?;
            let mut in_file = Refcounts::read(again.file, &again.shape, again.refcount_table)?;
            again.compare(&mut in_file, &references)?;
            again.found
        };
        self.found = Checked {
            corruptions: after.corruptions + errors,
            corruptions_fixed: before.corruptions_fixed
                + before.corruptions.saturating_sub(after.corruptions + errors),
            leaks_fixed: before.leaks_fixed + before.leaks.saturating_sub(after.leaks),
            ..after
        };
        Ok(refcounts)
    }
}
