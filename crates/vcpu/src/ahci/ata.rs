//! ATA commands (ATA8-ACS).
#![allow(missing_docs, reason = "named as in the specification")]

pub const READ_DMA_EXT: u8 = 0x25;
pub const WRITE_DMA_EXT: u8 = 0x35;
pub const READ_FPDMA_QUEUED: u8 = 0x60;
pub const WRITE_FPDMA_QUEUED: u8 = 0x61;
pub const FLUSH_CACHE_EXT: u8 = 0xea;
pub const IDENTIFY_DEVICE: u8 = 0xec;
