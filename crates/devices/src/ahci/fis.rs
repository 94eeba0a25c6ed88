//! Frames between host and device (SATA 3.x, section 10.5) and the task file they carry.

/// Length of a Register FIS, in either direction, and of a PIO Setup FIS. A Set Device Bits FIS has 8 bytes.
pub(crate) const REG_FIS_SIZE: usize = 20;

/// Bytes of a block of a PIO transfer: one sector.
pub(crate) const PIO_BLOCK: u16 = 512;

pub(crate) const FIS_REG_H2D: u8 = 0x27;
const FIS_REG_D2H: u8 = 0x34;
const FIS_PIO_SETUP: u8 = 0x5f;
const FIS_SET_DEVICE_BITS: u8 = 0xa1;

/// The I bit: the device wants the host interrupted.
const INTERRUPT: u8 = 1 << 6;
/// The D bit of a PIO Setup FIS: from device to host.
const TO_HOST: u8 = 1 << 5;
/// The C bit of a host's Register FIS: a command, not the control register.
const COMMAND: u8 = 1 << 7;

/// ATA status bits.
pub(crate) const STATUS_ERR: u8 = 1 << 0;
pub(crate) const STATUS_DRQ: u8 = 1 << 3;
pub(crate) const STATUS_BSY: u8 = 1 << 7;
/// Ready, and (obsolete) seek complete: an idle device without an error.
pub(crate) const STATUS_READY: u8 = 0x50;
/// While the link is down (AHCI 1.3.1, 3.3.8).
pub(crate) const STATUS_NO_LINK: u8 = 0x7f;
/// The bits that a Set Device Bits FIS changes.
pub(crate) const STATUS_SDB_MASK: u8 = 0x77;

/// ATA error bits.
pub(crate) const ERROR_ABRT: u8 = 1 << 2;
pub(crate) const ERROR_IDNF: u8 = 1 << 4;
pub(crate) const ERROR_UNC: u8 = 1 << 6;
/// After a reset: diagnostics passed.
pub(crate) const ERROR_DIAG_PASSED: u8 = 1;

/// DEVICE: addresses are LBAs. The last address of 28 bits.
pub(crate) const DEVICE_LBA: u8 = 1 << 6;
const LAST_28: u64 = 0x0fff_ffff;

/// Device control: software reset.
const CONTROL_SRST: u8 = 1 << 2;

/// A host's Register FIS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegH2d {
    /// A command; else a write of the control register.
    pub(crate) is_command: bool,
    pub(crate) command: u8,
    pub(crate) features: u16,
    pub(crate) lba: u64,
    pub(crate) device: u8,
    pub(crate) count: u16,
    control: u8,
}

impl RegH2d {
    /// Returns `None` for other frame types, which a disk does not accept.
    pub(crate) fn from_bytes(b: &[u8; REG_FIS_SIZE]) -> Option<Self> {
        (b[0] == FIS_REG_H2D).then(|| RegH2d {
            is_command: b[1] & COMMAND != 0,
            command: b[2],
            features: u16::from_le_bytes([b[3], b[11]]),
            lba: u64::from_le_bytes([b[4], b[5], b[6], b[8], b[9], b[10], 0, 0]),
            device: b[7],
            count: u16::from_le_bytes([b[12], b[13]]),
            control: b[15],
        })
    }

    /// Whether the software reset bit is set.
    pub(crate) fn is_reset(&self) -> bool {
        self.control & CONTROL_SRST != 0
    }
}

/// The device's registers after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskFile {
    pub(crate) status: u8,
    pub(crate) error: u8,
    pub(crate) lba: u64,
    pub(crate) count: u16,
    pub(crate) device: u8,
}

impl TaskFile {
    /// Success.
    pub(crate) const GOOD: TaskFile =
        TaskFile { status: STATUS_READY, error: 0, lba: 0, count: 0, device: 0 };

    /// The signature of an ATA disk after a reset (ATA8-ACS, table 206): count 1, LBA 1.
    pub(crate) const SIGNATURE: TaskFile =
        TaskFile { status: STATUS_READY, error: ERROR_DIAG_PASSED, lba: 1, count: 1, device: 0 };

    /// A command that failed at `lba`.
    pub(crate) fn failed(error: u8, lba: u64) -> TaskFile {
        TaskFile { status: STATUS_READY | STATUS_ERR, error, lba, ..TaskFile::GOOD }
    }

    /// The answer to READ NATIVE MAX ADDRESS: the last sector (ATA8-ACS, 7.32 and 7.33).
    pub(crate) fn native_max(sectors: u64, ext: bool) -> TaskFile {
        let last = sectors.saturating_sub(1);
        if ext {
            return TaskFile { lba: last, device: DEVICE_LBA, ..TaskFile::GOOD };
        }
        let last = last.min(LAST_28);
        let (lba, device) = (last & 0xff_ffff, DEVICE_LBA | (last >> 24) as u8);
        TaskFile { lba, device, ..TaskFile::GOOD }
    }

    /// Writes bytes 2 to 13, which the device's frames share.
    fn put(&self, b: &mut [u8; REG_FIS_SIZE]) {
        let [l0, l1, l2, l3, l4, l5, _, _] = self.lba.to_le_bytes();
        let [c0, c1] = self.count.to_le_bytes();
        b[2..14].copy_from_slice(&[
            self.status,
            self.error,
            l0,
            l1,
            l2,
            self.device,
            l3,
            l4,
            l5,
            0,
            c0,
            c1,
        ]);
    }

    /// A device's Register FIS.
    pub(crate) fn reg_d2h(&self, interrupt: bool) -> [u8; REG_FIS_SIZE] {
        let mut b = [0; REG_FIS_SIZE];
        self.put(&mut b);
        b[0] = FIS_REG_D2H;
        b[1] = if interrupt { INTERRUPT } else { 0 };
        b
    }

    /// The PIO Setup FIS before the last block of a read, with `self` as the state after the read.
    pub(crate) fn pio_setup_in(&self) -> [u8; REG_FIS_SIZE] {
        self.pio_setup(INTERRUPT | TO_HOST)
    }

    /// The PIO Setup FIS before a block of a write. The drive is busy after the block, and requests an interrupt for each
    /// block but the first (SATA 3.x, section 11.8).
    pub(crate) fn pio_setup_out(is_first: bool) -> [u8; REG_FIS_SIZE] {
        let after = TaskFile { status: STATUS_READY | STATUS_BSY, ..TaskFile::GOOD };
        after.pio_setup(if is_first { 0 } else { INTERRUPT })
    }

    /// The PIO Setup FIS before a block of one sector, with `self` as the state after the block.
    fn pio_setup(&self, flags: u8) -> [u8; REG_FIS_SIZE] {
        let mut b = [0; REG_FIS_SIZE];
        TaskFile { status: STATUS_READY | STATUS_DRQ, ..*self }.put(&mut b);
        b[0] = FIS_PIO_SETUP;
        b[1] = flags;
        b[15] = self.status;
        b[16..18].copy_from_slice(&PIO_BLOCK.to_le_bytes());
        b
    }
}

/// The Set Device Bits FIS for finished queued commands.
pub(crate) fn set_device_bits(status: u8, error: u8, finished: u32) -> [u8; 8] {
    let [s0, s1, s2, s3] = finished.to_le_bytes();
    [FIS_SET_DEVICE_BITS, INTERRUPT, status & STATUS_SDB_MASK, error, s0, s1, s2, s3]
}
