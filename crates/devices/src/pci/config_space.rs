//! Configuration space: its bytes, and which bits software may change.

use super::description::{
    Bar, Description, FunctionReset, InterruptPin, Msi, MsiX, VendorRegister,
};

/// Bytes of a conventional function's configuration space.
pub const CONFIG_SPACE_SIZE: usize = 256;

/// Offsets of header type 0 (PCI 3.0, 6.1).
const VENDOR: usize = 0x00;
const DEVICE: usize = 0x02;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CLASS: usize = 0x09;
const CACHE_LINE: usize = 0x0c;
const LATENCY: usize = 0x0d;
const BAR0: usize = 0x10;
const SUBSYSTEM_VENDOR: usize = 0x2c;
const SUBSYSTEM: usize = 0x2e;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;

/// I/O space, memory space, bus master, SERR#, interrupt disable. AHCI 1.3.1 (2.1.2) and NVMe 1.4 (2.1.2) have software
/// change all of them. No function has I/O space.
const COMMAND_WRITABLE: u16 = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 8 | 1 << 10;
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// BAR type bits: 64-bit memory.
const BAR_64: u32 = 2 << 1;

const MSI: u8 = 0x05;
const MSI_X: u8 = 0x11;
/// Advanced Features (ECN for conventional PCI of 2006): length, capabilities, control, status.
const ADVANCED_FEATURES: u8 = 0x13;
const ADVANCED_FEATURES_SIZE: u8 = 6;
/// Transactions pending, function level reset.
const ADVANCED_FEATURES_THERE: u8 = 1 << 0 | 1 << 1;
/// Offset of the control byte, and the bit that resets. It reads as 0.
const ADVANCED_FEATURES_CONTROL: u8 = 4;
const INITIATE_RESET: u8 = 1 << 0;
/// MSI message control: enable; 64-bit addresses.
const MSI_ENABLE: u16 = 1 << 0;
const MSI_64: u16 = 1 << 7;
/// MSI-X message control: enable, mask all.
const MSI_X_WRITABLE: u16 = 1 << 15 | 1 << 14;

/// A function's configuration space.
#[derive(Clone)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SPACE_SIZE],
    /// The bits that software may change.
    writable: [u8; CONFIG_SPACE_SIZE],
    /// The contents after a reset.
    initial: [u8; CONFIG_SPACE_SIZE],
    /// The byte by which software resets the function.
    reset_at: Option<usize>,
}

impl ConfigSpace {
    /// Returns the space of a function after a power-on.
    pub fn new(of: &Description) -> Self {
        let mut space = ConfigSpace {
            bytes: [0; CONFIG_SPACE_SIZE],
            writable: [0; CONFIG_SPACE_SIZE],
            initial: [0; CONFIG_SPACE_SIZE],
            reset_at: of.reset.map(|reset| usize::from(reset.at + ADVANCED_FEATURES_CONTROL)),
        };
        let id = &of.identity;
        space.u16(VENDOR, id.vendor, 0);
        space.u16(DEVICE, id.device, 0);
        space.u16(COMMAND, 0, COMMAND_WRITABLE);
        space.u16(SUBSYSTEM_VENDOR, id.subsystem_vendor, 0);
        space.u16(SUBSYSTEM, id.subsystem, 0);
        space.u8(REVISION, id.revision, 0);
        let [base, sub, interface] = id.class;
        space.put(CLASS, &[interface, sub, base], &[0; 3]);
        space.u8(CACHE_LINE, 0, 0xff);
        space.u8(LATENCY, 0, 0xff);
        space.u8(INTERRUPT_LINE, 0, 0xff);
        match of.pin {
            Some(pin @ InterruptPin::A) => space.u8(INTERRUPT_PIN, pin as u8, 0),
            None => {}
        }
        space.bars(of);
        space.capabilities(of);
        if let Some(VendorRegister { at, value, writable }) = of.vendor_register {
            space.u16(at.into(), value, writable);
        }
        space.initial = space.bytes;
        space
    }

    fn bars(&mut self, of: &Description) {
        for (number, bar) in of.bars.iter().enumerate() {
            let at = BAR0 + 4 * number;
            match *bar {
                Some(Bar::Memory32 { size }) => self.u32(at, 0, !(size - 1)),
                Some(Bar::Memory64 { size }) => {
                    let mask = !(size - 1);
                    self.u32(at, BAR_64, mask as u32);
                    self.u32(at + 4, 0, (mask >> 32) as u32);
                }
                None => {}
            }
        }
    }

    fn capabilities(&mut self, of: &Description) {
        let mut next = 0;
        if let Some(FunctionReset { at }) = of.reset {
            let to = usize::from(at);
            self.u8(to, ADVANCED_FEATURES, 0);
            self.u8(to + 1, next, 0);
            self.u8(to + 2, ADVANCED_FEATURES_SIZE, 0);
            self.u8(to + 3, ADVANCED_FEATURES_THERE, 0);
            next = at;
        }
        if let Some(MsiX { at, vectors, bar, table, pending }) = of.msix {
            let to = usize::from(at);
            self.u8(to, MSI_X, 0);
            self.u8(to + 1, next, 0);
            self.u16(to + 2, vectors.saturating_sub(1), MSI_X_WRITABLE);
            self.u32(to + 4, table | u32::from(bar), 0);
            self.u32(to + 8, pending | u32::from(bar), 0);
            next = at;
        }
        if let Some(Msi { at }) = of.msi {
            let to = usize::from(at);
            self.u8(to, MSI, 0);
            self.u8(to + 1, next, 0);
            self.u16(to + 2, MSI_64, MSI_ENABLE);
            self.u32(to + 4, 0, !3);
            self.u32(to + 8, 0, !0);
            self.u16(to + 12, 0, !0);
            next = at;
        }
        if next != 0 {
            self.u8(CAPABILITIES, next, 0);
            self.u16(STATUS, STATUS_CAPABILITIES, 0);
        }
    }

    fn u8(&mut self, at: usize, value: u8, writable: u8) {
        self.put(at, &[value], &[writable]);
    }

    fn u16(&mut self, at: usize, value: u16, writable: u16) {
        self.put(at, &value.to_le_bytes(), &writable.to_le_bytes());
    }

    fn u32(&mut self, at: usize, value: u32, writable: u32) {
        self.put(at, &value.to_le_bytes(), &writable.to_le_bytes());
    }

    fn put(&mut self, at: usize, value: &[u8], writable: &[u8]) {
        let places = self.bytes.iter_mut().zip(&mut self.writable).skip(at);
        for ((byte, mask), (value, writable)) in places.zip(value.iter().zip(writable)) {
            (*byte, *mask) = (*value, *writable);
        }
    }

    /// Reads from byte `offset` on. Bytes beyond the space read as 0xff.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Ok(offset) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(self.bytes.iter().skip(offset)) {
            *to = *from;
        }
    }

    /// Writes from byte `offset` on. Returns whether software resets the function.
    ///
    /// Read-only bits, and bytes beyond the space, ignore the write. On a reset the caller resets
    /// the device, and this space.
    #[must_use]
    pub fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let Ok(offset) = usize::try_from(offset) else { return false };
        let places = self.bytes.iter_mut().zip(&self.writable).skip(offset);
        for ((byte, mask), new) in places.zip(data) {
            *byte = *byte & !mask | new & mask;
        }
        let control = self.reset_at.and_then(|at| data.get(at.checked_sub(offset)?));
        control.is_some_and(|control| control & INITIATE_RESET != 0)
    }

    /// Restores the contents of a power-on.
    pub fn reset(&mut self) {
        self.bytes = self.initial;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Identity;
    use super::*;

    fn function() -> Description {
        Description {
            identity: Identity {
                vendor: 0x1b36,
                device: 0x0010,
                subsystem_vendor: 0x1af4,
                subsystem: 0x1100,
                class: [0x01, 0x08, 0x02],
                revision: 2,
            },
            bars: [
                Some(Bar::Memory64 { size: 0x4000 }),
                None,
                None,
                None,
                None,
                Some(Bar::Memory32 { size: 0x2000 }),
            ],
            pin: Some(InterruptPin::A),
            msi: Some(Msi { at: 0x80 }),
            msix: Some(MsiX { at: 0x40, vectors: 65, bar: 0, table: 0x2000, pending: 0x3000 }),
            reset: Some(FunctionReset { at: 0x50 }),
            vendor_register: Some(VendorRegister { at: 0x92, value: 0x3f, writable: 0x3f }),
        }
    }

    fn read_u32(space: &ConfigSpace, at: u64) -> u32 {
        let mut bytes = [0; 4];
        space.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn firmware_finds_ids_class_and_capabilities() {
        let space = ConfigSpace::new(&function());
        assert_eq!(read_u32(&space, 0), 0x0010_1b36);
        assert_eq!(read_u32(&space, 8), 0x0108_0202);
        assert_eq!(read_u32(&space, 0x2c), 0x1100_1af4);
        assert_eq!(read_u32(&space, 0x3c), 0x0000_0100);
        let mut found = Vec::new();
        let mut at = read_u32(&space, 0x34) & 0xff;
        while at != 0 {
            let capability = read_u32(&space, at.into());
            found.push(capability as u8);
            at = capability >> 8 & 0xff;
        }
        assert_eq!(found, [MSI, MSI_X, ADVANCED_FEATURES]);
        assert_eq!(read_u32(&space, 0x50) >> 16, 0x0306);
        assert_eq!(read_u32(&space, 0x40) >> 16, 64, "vectors, less one");
        assert_eq!((read_u32(&space, 0x44), read_u32(&space, 0x48)), (0x2000, 0x3000));
    }

    /// AHCI 1.3.1, 2.1.2: drivers enable I/O space, memory space and bus mastering together, and may read them back.
    #[test]
    fn command_and_vendor_bits_are_changeable() {
        let mut space = ConfigSpace::new(&function());
        assert!(!space.write(4, &[7, 0]));
        assert_eq!(read_u32(&space, 4) & 0xffff, 7);
        assert_eq!(read_u32(&space, 0x90), 0x3f << 16);
        assert!(!space.write(0x92, &[0xc1, 0xff]));
        assert_eq!(read_u32(&space, 0x90), 1 << 16);
        space.reset();
        assert_eq!(read_u32(&space, 0x90), 0x3f << 16);
    }

    /// PCI 3.0, 6.2.5.1: software writes ones and reads the size back.
    #[test]
    fn bar_sizes_are_readable() {
        let mut space = ConfigSpace::new(&function());
        for at in (0x10..0x28).step_by(4) {
            assert!(!space.write(at, &[0xff; 4]));
        }
        let bars = [0x10, 0x14, 0x18, 0x24].map(|at| read_u32(&space, at));
        assert_eq!(bars, [0xffff_c004, 0xffff_ffff, 0, 0xffff_e000]);
        space.reset();
        assert_eq!(read_u32(&space, 0x10), BAR_64);
    }

    #[test]
    fn accesses_beyond_the_space_are_ignored() {
        let mut space = ConfigSpace::new(&function());
        assert!(!space.write(254, &[0xff; 8]) && !space.write(u64::MAX, &[0xff; 8]));
        let mut bytes = [0; 4];
        space.read(254, &mut bytes);
        assert_eq!(bytes, [0, 0, 0xff, 0xff]);
        space.read(u64::MAX, &mut bytes);
        assert_eq!(bytes, [0xff; 4]);
    }

    proptest! {
        #[test]
        fn writes_change_only_writable_bits(
            writes in prop::collection::vec((0u64..260, prop::collection::vec(any::<u8>(), 0..9)), 0..50),
        ) {
            let mut space = ConfigSpace::new(&function());
            let (before, writable) = (space.bytes, space.writable);
            for (offset, data) in writes {
                let at = (0x54u64.checked_sub(offset)).and_then(|at| data.get(at as usize));
                let resets = at.is_some_and(|control| control & 1 != 0);
                prop_assert_eq!(space.write(offset, &data), resets);
            }
            for ((now, then), mask) in space.bytes.iter().zip(before).zip(writable) {
                prop_assert_eq!(now & !mask, then & !mask);
            }
            space.reset();
            prop_assert_eq!(space.bytes, before);
        }
    }
}
