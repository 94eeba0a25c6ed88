//! Registers (AHCI 1.3.1, section 3): generic ones, and those of a port from its first byte on.
#![allow(missing_docs, reason = "named as in the specification")]

pub const CAP: u64 = 0x00;
pub const GHC: u64 = 0x04;
pub const IS: u64 = 0x08;
pub const PI: u64 = 0x0c;
pub const VS: u64 = 0x10;
pub const PORTS: u64 = 0x100;
pub const PORT_SIZE: u64 = 0x80;
pub const PX_CLB: u64 = 0x00;
pub const PX_CLBU: u64 = 0x04;
pub const PX_FB: u64 = 0x08;
pub const PX_FBU: u64 = 0x0c;
pub const PX_IS: u64 = 0x10;
pub const PX_IE: u64 = 0x14;
pub const PX_CMD: u64 = 0x18;
pub const PX_TFD: u64 = 0x20;
pub const PX_SIG: u64 = 0x24;
pub const PX_SSTS: u64 = 0x28;
pub const PX_SCTL: u64 = 0x2c;
pub const PX_SERR: u64 = 0x30;
pub const PX_SACT: u64 = 0x34;
pub const PX_CI: u64 = 0x38;

pub const GHC_HR: u32 = 1;
pub const GHC_IE: u32 = 1 << 1;
pub const GHC_AE: u32 = 1 << 31;
pub const CMD_ST: u32 = 1;
pub const CMD_CLO: u32 = 1 << 3;
pub const CMD_FRE: u32 = 1 << 4;
pub const CMD_FR: u32 = 1 << 14;
pub const CMD_CR: u32 = 1 << 15;
pub const IS_DHRS: u32 = 1;
pub const IS_PSS: u32 = 1 << 1;
pub const IS_SDBS: u32 = 1 << 3;
pub const IS_DPS: u32 = 1 << 5;
pub const IS_PCS: u32 = 1 << 6;
pub const IS_PRCS: u32 = 1 << 22;
pub const IS_OFS: u32 = 1 << 24;
pub const IS_IFS: u32 = 1 << 27;
pub const IS_HBFS: u32 = 1 << 29;
pub const IS_TFES: u32 = 1 << 30;
/// What ends a command well, and what ends it badly.
pub const IE_ALL: u32 = 0xfdc0_00ff;
pub const IS_ERRORS: u32 = IS_TFES | IS_HBFS | IS_IFS | IS_OFS;
