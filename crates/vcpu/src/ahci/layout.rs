//! Where a port has what in guest memory, and what a command looks like.

use super::ata;

/// Where a port's structures and its requests' data are in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortArea {
    /// The first byte, a multiple of 4096.
    pub base: u64,
    /// Bytes of the largest request.
    pub request_size: u32,
}

impl PortArea {
    const RFIS_AT: u64 = 0x400;
    const TABLES_AT: u64 = 0x1000;
    /// Room for a FIS and 56 PRD entries.
    pub(crate) const TABLE_SIZE: u64 = 0x400;
    pub(crate) const PRDT_AT: u64 = 0x80;

    /// The command list.
    pub fn list(&self) -> u64 {
        self.base
    }

    /// Where received FISes go.
    pub fn rfis(&self) -> u64 {
        self.base + Self::RFIS_AT
    }

    /// The command table of a slot.
    pub fn table(&self, slot: u8) -> u64 {
        self.base + Self::TABLES_AT + Self::TABLE_SIZE * u64::from(slot)
    }

    /// The data of a slot's request, page-aligned.
    pub fn data(&self, slot: u8) -> u64 {
        let size = u64::from(self.request_size).next_multiple_of(4096);
        self.table(32) + size * u64::from(slot)
    }

    /// The first byte behind it.
    pub fn end(&self) -> u64 {
        self.data(32)
    }
}

/// A command as the driver sends it: the fields of a Register FIS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Command {
    /// The ATA command.
    pub command: u8,
    /// FEATURES, 16 bits.
    pub features: u16,
    /// LBA, 48 bits; of 28-bit commands bits 27:24 go into `device`.
    pub lba: u64,
    /// COUNT, 16 bits.
    pub count: u16,
    /// DEVICE.
    pub device: u8,
    /// Data goes to the drive.
    pub write: bool,
}

/// DEVICE: the address is an LBA.
pub const LBA: u8 = 1 << 6;

impl Command {
    /// A read or write of whole sectors by DMA, 48-bit.
    pub fn dma(write: bool, offset: u64, len: u32) -> Command {
        let command = if write { ata::WRITE_DMA_EXT } else { ata::READ_DMA_EXT };
        let count = (len / 512) as u16;
        Command { command, lba: offset / 512, count, device: LBA, write, features: 0 }
    }

    /// A queued read or write of whole sectors, to be sent from slot `slot`.
    pub fn queued(slot: u8, write: bool, offset: u64, len: u32) -> Command {
        let command = if write { ata::WRITE_FPDMA_QUEUED } else { ata::READ_FPDMA_QUEUED };
        let features = (len / 512) as u16;
        let count = u16::from(slot) << 3;
        Command { command, features, lba: offset / 512, count, device: LBA, write }
    }

    /// The Register FIS.
    pub fn fis(&self) -> [u8; 20] {
        let [l0, l1, l2, l3, l4, l5, _, _] = self.lba.to_le_bytes();
        let [f0, f1] = self.features.to_le_bytes();
        let [c0, c1] = self.count.to_le_bytes();
        let mut fis = [0; 20];
        fis[..14].copy_from_slice(&[
            0x27,
            0x80,
            self.command,
            f0,
            l0,
            l1,
            l2,
            self.device,
            l3,
            l4,
            l5,
            f1,
            c0,
            c1,
        ]);
        fis
    }

    pub(crate) fn is_queued(&self) -> bool {
        matches!(self.command, ata::READ_FPDMA_QUEUED | ata::WRITE_FPDMA_QUEUED)
    }
}
