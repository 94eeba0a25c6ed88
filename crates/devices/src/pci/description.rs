//! What a PCI function is.

/// Number of base address registers of a function.
pub const BARS: usize = 6;

/// Identification registers (PCI 3.0, 6.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Base class, subclass and programming interface.
    pub class: [u8; 3],
    /// Revision ID.
    pub revision: u8,
}

/// A memory BAR (PCI 3.0, 6.2.5). Sizes are in bytes: powers of two from 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// Below 4 GiB.
    Memory32 {
        /// Its size.
        size: u32,
    },
    /// Anywhere. Takes the next BAR's register too.
    Memory64 {
        /// Its size.
        size: u64,
    },
}

impl Bar {
    /// Returns the number of bytes.
    pub fn size(self) -> u64 {
        match self {
            Bar::Memory32 { size } => size.into(),
            Bar::Memory64 { size } => size,
        }
    }
}

/// The pin that level interrupts are raised on (PCI 3.0, 6.2.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptPin {
    /// INTA#.
    A = 1,
}

/// The MSI capability: 64-bit addresses, no mask bits (PCI 3.0, 6.8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Msi {
    /// Where the capability is: a multiple of 4 from 0x40 on.
    pub at: u8,
}

/// The MSI-X capability (PCI 3.0, 6.8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiX {
    /// Where the capability is: a multiple of 4 from 0x40 on.
    pub at: u8,
    /// Number of vectors, 1 to 2048.
    pub vectors: u16,
    /// Number of the BAR with table and pending bits, 0 to 5.
    pub bar: u8,
    /// Offset of the table in that BAR, in bytes: a multiple of 8.
    pub table: u32,
    /// Offset of the pending bits in that BAR, in bytes: a multiple of 8.
    pub pending: u32,
}

/// The Advanced Features capability: software can reset the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionReset {
    /// Where the capability is: a multiple of 4 from 0x40 on.
    pub at: u8,
}

/// A 16-bit register that the vendor defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VendorRegister {
    /// Its offset: a multiple of 2 from 0x40 on.
    pub at: u8,
    /// Its contents after a reset.
    pub value: u16,
    /// The bits that software may change, without effect.
    pub writable: u16,
}

/// A PCI function, header type 0 (PCI 3.0, 6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// Identification registers.
    pub identity: Identity,
    /// Base address registers.
    pub bars: [Option<Bar>; BARS],
    /// `None`: no level interrupts.
    pub pin: Option<InterruptPin>,
    /// One vector.
    pub msi: Option<Msi>,
    /// Vectors in a table.
    pub msix: Option<MsiX>,
    /// `None`: only its bus resets it.
    pub reset: Option<FunctionReset>,
    /// A register that drivers of this vendor's device expect.
    pub vendor_register: Option<VendorRegister>,
}

impl Description {
    /// Returns the bytes of BAR number `bar`; 0: there is none.
    pub fn bar_size(&self, bar: usize) -> u64 {
        self.bars.get(bar).copied().flatten().map_or(0, Bar::size)
    }
}
