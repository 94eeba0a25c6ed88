//! Registers and limits (NVM Express 1.4, section 3.1).

/// Offsets of the registers.
pub(crate) const CAP: usize = 0x00;
pub(crate) const VS: usize = 0x08;
pub(crate) const INTMS: u64 = 0x0c;
pub(crate) const INTMC: u64 = 0x10;
pub(crate) const CC: u64 = 0x14;
pub(crate) const CSTS: u64 = 0x1c;
pub(crate) const AQA: u64 = 0x24;
pub(crate) const ASQ: u64 = 0x28;
pub(crate) const ACQ: u64 = 0x30;
/// Bytes of the registers before the doorbells that have a meaning.
pub(crate) const REGISTERS: usize = 0x38;
/// Where the doorbells begin, and the bytes of each (CAP.DSTRD is 0).
pub(crate) const DOORBELLS_AT: u64 = 0x1000;
pub(crate) const DOORBELL: u64 = 4;

/// Bytes of BAR 0: registers, doorbells (section 3.1), and the tables of MSI-X.
pub const BAR_SIZE: u64 = 0x4000;
/// Offset of the table of MSI-X in BAR 0, in bytes.
pub const MSIX_TABLE_AT: u32 = 0x2000;
/// Offset of the pending bits of MSI-X in BAR 0, in bytes.
pub const MSIX_PENDING_AT: u32 = 0x3000;

/// Maximum number of I/O queues.
///
/// Each has an interrupt vector, beside that of the admin queue: Cloud Hypervisor runs out of descriptors with
/// some hundreds.
pub const MAX_IO_QUEUES: u16 = 64;

/// The most entries of an I/O queue.
pub(crate) const MAX_ENTRIES: u32 = 1024;
/// The most entries of an admin queue (AQA has 12 bits).
pub(crate) const MAX_ADMIN_ENTRIES: u32 = 4096;
/// The page size, bytes: the only one that is offered (CAP.MPSMIN and CAP.MPSMAX are 0).
pub(crate) const PAGE: u64 = 4096;
/// MDTS: the most data of a command, as a power of two in pages; and in bytes.
pub(crate) const MDTS: u8 = 8;
pub(crate) const MAX_TRANSFER: u64 = PAGE << MDTS;
/// Bytes of a logical block, and their power of two.
pub(crate) const BLOCK: u64 = 512;
pub(crate) const BLOCK_SHIFT: u8 = 9;
/// Bytes of an entry of a submission queue and of a completion queue, and their powers of two.
pub(crate) const SUBMISSION: u64 = 64;
pub(crate) const SUBMISSION_SHIFT: u8 = 6;
pub(crate) const COMPLETION: u64 = 16;
pub(crate) const COMPLETION_SHIFT: u8 = 4;

/// The version that is spoken: 1.4.
pub(crate) const VERSION: u32 = 0x0001_0400;

/// CAP: MQES counts from 0; CQR; TO in units of 500 ms; CSS has the NVM command set.
const CAP_CQR: u64 = 1 << 16;
const CAP_TO: u64 = 120 << 24;
const CAP_CSS_NVM: u64 = 1 << 37;
pub(crate) const CAPABILITIES: u64 = (MAX_ENTRIES as u64 - 1) | CAP_CQR | CAP_TO | CAP_CSS_NVM;

/// The controller configuration (CC).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Configuration(pub(crate) u32);

impl Configuration {
    /// Bits that are kept; the others are reserved.
    const KEPT: u32 = 0x00ff_fff1;

    pub(crate) fn new(value: u32) -> Self {
        Configuration(value & Self::KEPT)
    }

    /// EN.
    pub(crate) fn is_enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// SHN: whether the driver announces a shutdown.
    pub(crate) fn is_shutdown(self) -> bool {
        self.0 >> 14 & 3 != 0
    }

    /// Whether CSS, MPS and AMS choose what is offered.
    pub(crate) fn is_valid(self) -> bool {
        let (css, mps, ams) = (self.0 >> 4 & 7, self.0 >> 7 & 0xf, self.0 >> 11 & 7);
        (css, mps, ams) == (0, 0, 0)
    }

    /// Whether IOSQES is the size of entries here.
    pub(crate) fn has_submission_size(self) -> bool {
        self.0 >> 16 & 0xf == u32::from(SUBMISSION_SHIFT)
    }

    /// Whether IOCQES is the size of entries here.
    pub(crate) fn has_completion_size(self) -> bool {
        self.0 >> 20 & 0xf == u32::from(COMPLETION_SHIFT)
    }
}

/// CSTS.
pub(crate) const CSTS_RDY: u32 = 1 << 0;
pub(crate) const CSTS_CFS: u32 = 1 << 1;
pub(crate) const CSTS_SHST_UNDER_WAY: u32 = 1 << 2;
pub(crate) const CSTS_SHST_COMPLETE: u32 = 2 << 2;
pub(crate) const CSTS_SHST: u32 = 3 << 2;

/// A doorbell (section 3.1.24 and 3.1.25).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DoorbellOf {
    /// The tail of the submission queue of this number.
    Submission(u16),
    /// The head of the completion queue of this number.
    Completion(u16),
}

impl DoorbellOf {
    /// The doorbell at an offset of BAR 0. `None`: none is there.
    pub(crate) fn at(offset: u64) -> Option<Self> {
        let at = offset.checked_sub(DOORBELLS_AT)?;
        if offset >= u64::from(MSIX_TABLE_AT) || !at.is_multiple_of(DOORBELL) {
            return None;
        }
        let number = u16::try_from(at / DOORBELL).ok()?;
        Some(match number % 2 {
            0 => DoorbellOf::Submission(number / 2),
            _ => DoorbellOf::Completion(number / 2),
        })
    }

    /// Where its shadow, and its event index, are in their pages.
    pub(crate) fn offset(self) -> u64 {
        let number = match self {
            DoorbellOf::Submission(qid) => 2 * u64::from(qid),
            DoorbellOf::Completion(qid) => 2 * u64::from(qid) + 1,
        };
        number * DOORBELL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_lie_between_registers_and_msix() {
        assert_eq!(DoorbellOf::at(0xffc), None);
        assert_eq!(DoorbellOf::at(0x1000), Some(DoorbellOf::Submission(0)));
        assert_eq!(DoorbellOf::at(0x1004), Some(DoorbellOf::Completion(0)));
        assert_eq!(DoorbellOf::at(0x1002), None);
        assert_eq!(DoorbellOf::at(0x2000), None);
        for bell in [DoorbellOf::Submission(7), DoorbellOf::Completion(9)] {
            assert_eq!(DoorbellOf::at(DOORBELLS_AT + bell.offset()), Some(bell));
        }
    }

    #[test]
    fn configurations_choose_what_is_offered() {
        let linux = Configuration::new(0x0046_0001);
        assert!(linux.is_enabled() && linux.is_valid() && !linux.is_shutdown());
        assert!(linux.has_submission_size() && linux.has_completion_size());
        assert!(!Configuration::new(0x0046_0081).is_valid(), "pages of 8 KiB");
        assert!(Configuration::new(0x0046_4001).is_shutdown());
    }
}
