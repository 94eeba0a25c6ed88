//! What drivers in the field do beyond their negotiation, and is served all the same.

use std::cell::{Cell, OnceCell};
use std::fmt;
use std::rc::Rc;

/// A deviation from the specification that leaves no doubt about what the driver means.
///
/// Section numbers are virtio 1.3's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quirk {
    /// An indirect table without VIRTIO_F_INDIRECT_DESC (2.7.5.3.1), as Windows' viostor and vioscsi sent them until
    /// 2017.
    Indirect,
    /// An indirect table with a successor, which is ignored (2.7.5.3.1).
    IndirectNext,
    /// A buffer of no bytes, which is ignored (2.7.5).
    EmptyBuffer,
}

impl fmt::Display for Quirk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quirk::Indirect => "sends indirect descriptors, which it has not negotiated",
            Quirk::IndirectNext => "sends indirect tables with a next descriptor, which is ignored",
            Quirk::EmptyBuffer => "sends buffers of no bytes, which are ignored",
        })
    }
}

/// Called with each kind of deviation once.
type Report = Rc<dyn Fn(Quirk)>;

/// The deviations of a queue's driver so far.
#[derive(Default)]
pub(crate) struct Quirks {
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub(crate) indirect: bool,
    /// A bit for each [`Quirk`] that was seen.
    seen: Cell<u8>,
    report: OnceCell<Report>,
}

impl Quirks {
    pub(crate) fn new(indirect: bool) -> Self {
        Quirks { indirect, ..Quirks::default() }
    }

    pub(crate) fn report_to(&self, report: Report) {
        // Set once, before the queue runs.
        let _ = self.report.set(report);
    }

    #[cold]
    pub(crate) fn note_indirect(&self, has_next: bool) {
        if !self.indirect {
            self.note(Quirk::Indirect);
        }
        if has_next {
            self.note(Quirk::IndirectNext);
        }
    }

    #[cold]
    pub(crate) fn note(&self, quirk: Quirk) {
        let bit = 1 << quirk as u8;
        let seen = self.seen.replace(self.seen.get() | bit);
        if seen & bit == 0
            && let Some(report) = self.report.get()
        {
            report(quirk);
        }
    }
}

impl fmt::Debug for Quirks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quirks").field("seen", &self.seen).finish_non_exhaustive()
    }
}
