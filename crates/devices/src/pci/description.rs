//! What a PCI function is.

/// Base address registers of a function.
pub const BARS: usize = 6;

/// Identification registers.
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

/// A memory BAR. Sizes are in bytes: powers of two from 16.
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
    /// Bytes.
    pub fn size(self) -> u64 {
        match self {
            Bar::Memory32 { size } => size.into(),
            Bar::Memory64 { size } => size,
        }
    }
}

/// The pin that level interrupts are raised on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterruptPin {
    /// INTA#.
    A = 1,
}

/// The MSI capability: 64-bit addresses, no mask bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Msi {
    /// Where the capability is: a multiple of 4 from 0x40 on.
    pub at: u8,
}

/// The MSI-X capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiX {
    /// Where the capability is: a multiple of 4 from 0x40 on.
    pub at: u8,
    /// Vectors, 1 to 2048.
    pub vectors: u16,
    /// The BAR with table and pending bits.
    pub bar: u8,
    /// Where the table begins there: a multiple of 8.
    pub table: u32,
    /// Where the pending bits begin there: a multiple of 8.
    pub pending: u32,
}

/// The Advanced Features capability: software can reset the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionReset {
    /// Where the capability is: a multiple of 4 from 0x40 on.
    pub at: u8,
}

/// A PCI function, header type 0.
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
}

impl Description {
    /// Bytes of a BAR; 0: there is none.
    pub fn bar_size(&self, bar: usize) -> u64 {
        self.bars.get(bar).copied().flatten().map_or(0, Bar::size)
    }
}
