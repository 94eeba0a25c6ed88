//! Register offsets and bits of AHCI 1.3.1, section 3.

/// Bytes of the register BAR (ABAR): a power of two (AHCI 1.3.1, section 3).
///
/// The BAR has the generic registers and those of 32 ports.
pub const ABAR_SIZE: u64 = 0x2000;
/// Where the ports' registers begin, and how far apart they are (section 3.3).
pub(crate) const PORTS_AT: u64 = 0x100;
pub(crate) const PORT_SIZE: u64 = 0x80;
/// Most ports of a controller.
pub const MAX_PORTS: usize = 32;
/// Command slots of a port.
pub(crate) const SLOTS: usize = 32;

/// Generic host control (section 3.1).
pub(crate) const CAP: u64 = 0x00;
pub(crate) const GHC: u64 = 0x04;
pub(crate) const IS: u64 = 0x08;
pub(crate) const PI: u64 = 0x0c;
pub(crate) const VS: u64 = 0x10;

/// Version 1.3. Version 1.3.1 adds device sleep, which no port has.
pub(crate) const VERSION_1_3: u32 = 0x0001_0300;

/// CAP: 64-bit addressing, NCQ, command list override, third generation, AHCI only, 32 slots.
pub(crate) const CAP_S64A: u32 = 1 << 31;
pub(crate) const CAP_SNCQ: u32 = 1 << 30;
pub(crate) const CAP_SCLO: u32 = 1 << 24;
pub(crate) const CAP_ISS_GEN3: u32 = 3 << 20;
pub(crate) const CAP_SAM: u32 = 1 << 18;
pub(crate) const CAP_NCS_32: u32 = 31 << 8;

pub(crate) const GHC_HR: u32 = 1 << 0;
pub(crate) const GHC_IE: u32 = 1 << 1;
pub(crate) const GHC_AE: u32 = 1 << 31;

/// Port registers (section 3.3), from the port's first byte on.
pub(crate) const PX_CLB: u64 = 0x00;
pub(crate) const PX_CLBU: u64 = 0x04;
pub(crate) const PX_FB: u64 = 0x08;
pub(crate) const PX_FBU: u64 = 0x0c;
pub(crate) const PX_IS: u64 = 0x10;
pub(crate) const PX_IE: u64 = 0x14;
pub(crate) const PX_CMD: u64 = 0x18;
pub(crate) const PX_TFD: u64 = 0x20;
pub(crate) const PX_SIG: u64 = 0x24;
pub(crate) const PX_SSTS: u64 = 0x28;
pub(crate) const PX_SCTL: u64 = 0x2c;
pub(crate) const PX_SERR: u64 = 0x30;
pub(crate) const PX_SACT: u64 = 0x34;
pub(crate) const PX_CI: u64 = 0x38;

/// PxCLB is aligned to 1 KiB, PxFB to 256 bytes.
pub(crate) const CLB_MASK: u32 = !0x3ff;
pub(crate) const FB_MASK: u32 = !0xff;

/// PxIS and PxIE.
pub(crate) const PXI_DHRS: u32 = 1 << 0;
pub(crate) const PXI_PSS: u32 = 1 << 1;
pub(crate) const PXI_SDBS: u32 = 1 << 3;
pub(crate) const PXI_DPS: u32 = 1 << 5;
/// Shows PxSERR.DIAG.X.
pub(crate) const PXI_PCS: u32 = 1 << 6;
/// Shows PxSERR.DIAG.N.
pub(crate) const PXI_PRCS: u32 = 1 << 22;
pub(crate) const PXI_OFS: u32 = 1 << 24;
pub(crate) const PXI_IFS: u32 = 1 << 27;
pub(crate) const PXI_HBFS: u32 = 1 << 29;
pub(crate) const PXI_TFES: u32 = 1 << 30;
/// Bits of PxIS that are set by an event, and not derived.
pub(crate) const PXI_EVENTS: u32 =
    PXI_DHRS | PXI_PSS | PXI_SDBS | PXI_DPS | PXI_OFS | PXI_IFS | PXI_HBFS | PXI_TFES;
/// Bits of PxIE that exist.
pub(crate) const PXIE_MASK: u32 = 0xfdc0_00ff;

/// PxCMD.
pub(crate) const CMD_ST: u32 = 1 << 0;
pub(crate) const CMD_SUD: u32 = 1 << 1;
pub(crate) const CMD_POD: u32 = 1 << 2;
pub(crate) const CMD_CLO: u32 = 1 << 3;
pub(crate) const CMD_FRE: u32 = 1 << 4;
pub(crate) const CMD_CCS_SHIFT: u32 = 8;
pub(crate) const CMD_FR: u32 = 1 << 14;
pub(crate) const CMD_CR: u32 = 1 << 15;
pub(crate) const CMD_ATAPI: u32 = 1 << 24;
pub(crate) const CMD_DLAE: u32 = 1 << 25;
/// What a driver sets and clears as it likes.
pub(crate) const CMD_RW: u32 = CMD_ST | CMD_FRE | CMD_ATAPI | CMD_DLAE;

/// PxSSTS: interface active (bits 11:8), speed (7:4), device present and link up (3:0).
pub(crate) const SSTS_ACTIVE: u32 = 1 << 8;
pub(crate) const SSTS_SPEED_SHIFT: u32 = 4;
pub(crate) const SSTS_DET_UP: u32 = 3;
pub(crate) const SSTS_DET_OFFLINE: u32 = 4;
pub(crate) const GENERATION: u32 = 3;

/// PxSCTL.DET: what is asked of the link. The speed limit is in bits 7:4.
pub(crate) const SCTL_MASK: u32 = 0xfff;
pub(crate) const SCTL_DET_MASK: u32 = 0xf;
pub(crate) const SCTL_DET_COMRESET: u32 = 1;
pub(crate) const SCTL_DET_OFFLINE: u32 = 4;

/// PxSERR.DIAG: PhyRdy changed, COMINIT received.
pub(crate) const SERR_DIAG_N: u32 = 1 << 16;
pub(crate) const SERR_DIAG_X: u32 = 1 << 26;

/// Where received FISes go in the area at PxFB (section 4.2.1).
pub(crate) const RFIS_PIO_SETUP: u64 = 0x20;
pub(crate) const RFIS_D2H: u64 = 0x40;
pub(crate) const RFIS_SDB: u64 = 0x58;

/// PxSIG of an ATA device, and while there is none.
pub(crate) const SIG_ATA: u32 = 0x0000_0101;
pub(crate) const SIG_NONE: u32 = 0xffff_ffff;
