//! Register accesses of any size, at any offset.

use vcpu::ahci::reg;

use crate::ahci::rig::*;

#[test]
fn the_generic_registers() {
    let rig = Rig::with(3, false);
    let port = &rig.ports[0];
    let cap = port.read_generic(reg::CAP);
    assert_eq!((cap & 0x1f, cap >> 8 & 0x1f), (2, 31), "ports and slots, counted from 0");
    assert_eq!(
        cap & (1 << 31 | 1 << 30 | 1 << 24 | 1 << 18),
        1 << 31 | 1 << 30 | 1 << 24 | 1 << 18
    );
    assert_eq!(port.read_generic(reg::PI), 0b111);
    assert_eq!(port.read_generic(reg::VS), 0x1_0300);
    // Read-only registers do not change; AHCI mode cannot be left.
    for register in [reg::CAP, reg::PI, reg::VS, 0x14, 0x24, 0x28, 0xa0] {
        let before = port.read_generic(register);
        port.write_generic(register, !before);
        assert_eq!(port.read_generic(register), before, "{register:#x}");
    }
    port.write_generic(reg::GHC, 0);
    assert_eq!(port.read_generic(reg::GHC), reg::GHC_AE);
}

#[test]
fn missing_ports() {
    let rig = Rig::new();
    for port in 1..32 {
        for register in (0..0x80).step_by(4) {
            let offset = 0x100 + port * 0x80 + register;
            rig.controller.ahci.mmio_write(offset, 4, u32::MAX.into());
            assert_eq!(rig.controller.ahci.mmio_read(offset, 4), 0);
        }
    }
}

#[test]
fn any_size_at_any_offset() {
    let rig = Rig::new();
    let ahci = &rig.controller.ahci;
    let (clb, fb) = (0x100, 0x108);
    ahci.mmio_write(clb, 8, 0x1122_3344_5566_7788);
    assert_eq!(ahci.mmio_read(clb, 4), 0x5566_7400, "aligned to 1 KiB");
    assert_eq!(ahci.mmio_read(clb, 8), 0x1122_3344_5566_7400);
    assert_eq!(ahci.mmio_read(clb + 3, 2), 0x4455, "over the bounds of a register");
    assert_eq!(ahci.mmio_read(clb + 1, 1), 0x74);
    ahci.mmio_write(clb + 3, 2, 0xaabb);
    assert_eq!(ahci.mmio_read(clb, 8), 0x1122_33aa_bb66_7400);
    ahci.mmio_write(fb + 1, 1, 0xff);
    assert_eq!(ahci.mmio_read(fb, 4) & 0xffff, 0xff00);
    // A byte write to a write-one-to-clear register clears only bits in the byte.
    assert_eq!(ahci.mmio_read(0x130, 4), 0, "the driver has cleared PxSERR");
    rig.ports[0].write(reg::PX_SCTL, 1);
    rig.ports[0].write(reg::PX_SCTL, 0);
    ahci.mmio_write(0x130 + 3, 1, 0xff);
    assert_eq!(ahci.mmio_read(0x130, 4), 1 << 16);
    // Not accesses at all.
    for (offset, size) in [(0, 0), (0, 9), (0x1fff, 2), (0x2000, 1), (u64::MAX, 8), (0, usize::MAX)]
    {
        ahci.mmio_write(offset, size, u64::MAX);
        assert_eq!(ahci.mmio_read(offset, size), 0);
    }
    assert_eq!(ahci.mmio_read(0x1ff8, 8), 0);
}
