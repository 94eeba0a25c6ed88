//! The interrupt line, and how many commands share an interrupt.

use vcpu::ahci::{Command, reg};

use crate::ahci::rig::*;

/// Queued reads in all slots, held by the disk.
fn queued(rig: &mut Rig) {
    rig.disk().hold.set(true);
    for slot in 0..32 {
        let command = Command::queued(slot, false, 512 * u64::from(slot), 512);
        rig.port().prepare(slot, &command, 512).unwrap();
    }
    rig.port().ring(u32::MAX);
    rig.turn();
}

fn acknowledge(rig: &mut Rig) {
    rig.port().write(reg::PX_IS, u32::MAX);
    rig.port().write_generic(reg::IS, 1);
}

#[test]
fn a_batch_is_one_interrupt_and_one_fis() {
    let mut rig = Rig::new();
    queued(&mut rig);
    acknowledge(&mut rig);
    let stats = |rig: &Rig| {
        let stats = rig.controller.ahci.stats();
        (stats.batches.get(), stats.interrupts.get())
    };
    let before = stats(&rig);
    rig.let_go(20);
    assert_eq!(stats(&rig), (before.0 + 1, before.1 + 1));
    assert_eq!(rig.fis(SDB)[4..8], 0xf_ffffu32.to_le_bytes());
    assert_eq!(rig.port().read(reg::PX_SACT), 0xfff0_0000);
    // While the line is up, further batches do not raise it.
    rig.let_go(4);
    assert_eq!(stats(&rig), (before.0 + 2, before.1 + 1));
    acknowledge(&mut rig);
    assert!(!rig.controller.line.is_up());
    rig.let_go(8);
    assert_eq!(stats(&rig), (before.0 + 3, before.1 + 2));
    assert_eq!(rig.port().read(reg::PX_SACT), 0);
}

#[test]
fn without_batching_each_answer_would_be_one() {
    let mut rig = Rig::new();
    queued(&mut rig);
    let before = rig.controller.ahci.stats().batches.get();
    for _ in 0..32 {
        rig.let_go(1);
    }
    assert_eq!(rig.controller.ahci.stats().batches.get(), before + 32);
}

#[test]
fn the_line_follows_all_enable_bits() {
    let mut rig = Rig::new();
    let up = |rig: &Rig| rig.controller.line.is_up();
    acknowledge(&mut rig);
    assert!(!up(&rig));
    rig.port().write(reg::PX_IE, 0);
    rig.port().run(&command(0xe1), 0).unwrap();
    assert_eq!(rig.port().read(reg::PX_IS), reg::IS_DHRS);
    assert_eq!((rig.port().read_generic(reg::IS), up(&rig)), (0, false));
    // Enabled later.
    rig.port().write(reg::PX_IE, reg::IS_DHRS);
    assert_eq!((rig.port().read_generic(reg::IS), up(&rig)), (1, true));
    rig.port().write_generic(reg::GHC, reg::GHC_AE);
    assert!(!up(&rig));
    rig.port().write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
    assert!(up(&rig));
    // The port first. The bit in IS must be cleared separately, and is set again while the port has an interrupt.
    rig.port().write_generic(reg::IS, 1);
    assert_eq!((rig.port().read_generic(reg::IS), up(&rig)), (1, true));
    rig.port().write(reg::PX_IS, reg::IS_PSS);
    assert!(up(&rig), "another bit");
    rig.port().write(reg::PX_IS, reg::IS_DHRS);
    assert_eq!((rig.port().read(reg::PX_IS), up(&rig)), (0, true));
    rig.port().write_generic(reg::IS, 2);
    assert!(up(&rig), "another port's bit");
    rig.port().write_generic(reg::IS, 1);
    assert_eq!((rig.port().read_generic(reg::IS), up(&rig)), (0, false));
}

#[test]
fn link_changes_show_until_the_error_register_is_cleared() {
    let mut rig = Rig::new();
    rig.port().stop_list().unwrap();
    rig.port().write(reg::PX_SCTL, 1);
    rig.port().write(reg::PX_SCTL, 0);
    assert_eq!(
        rig.port().read(reg::PX_IS) & (reg::IS_PCS | reg::IS_PRCS),
        reg::IS_PCS | reg::IS_PRCS
    );
    assert!(rig.controller.line.is_up());
    rig.port().write(reg::PX_IS, u32::MAX);
    assert_ne!(rig.port().read(reg::PX_IS), 0, "these bits are shown, not kept");
    rig.port().write(reg::PX_SERR, 1 << 26);
    assert_eq!(rig.port().read(reg::PX_IS), reg::IS_PRCS);
    rig.port().write(reg::PX_SERR, 1 << 16);
    assert_eq!(rig.port().read(reg::PX_IS), 0);
}

#[test]
fn two_ports_share_the_line() {
    let mut rig = Rig::with(2, false);
    for port in 0..2 {
        rig.ports[port].write(reg::PX_IS, u32::MAX);
    }
    rig.ports[0].write_generic(reg::IS, 3);
    for port in [1, 0] {
        rig.ports[port].run(&command(0xe1), 0).unwrap();
    }
    assert_eq!(rig.ports[0].read_generic(reg::IS), 3);
    rig.ports[0].write(reg::PX_IS, u32::MAX);
    rig.ports[0].write_generic(reg::IS, 1);
    assert_eq!(rig.ports[0].read_generic(reg::IS), 2);
    assert!(rig.controller.line.is_up());
    rig.ports[1].write(reg::PX_IS, u32::MAX);
    rig.ports[1].write_generic(reg::IS, 2);
    assert!(!rig.controller.line.is_up());
}

/// The line's callback may access the registers, as an interrupt controller may under the machine lock. Changes that it
/// makes are reported after its return.
#[test]
fn the_callback_may_use_the_registers() {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, OnceLock, Weak};

    use devices::ahci::Ahci;

    let rig = Rig::new();
    let me: Arc<OnceLock<Weak<Ahci>>> = Arc::default();
    let calls = Arc::new(AtomicU32::new(0));
    let (there, called) = (me.clone(), calls.clone());
    let ahci = Ahci::new(1, rig.memory.clone(), move |level| {
        let nth = called.fetch_add(1, Ordering::Relaxed);
        assert_eq!(level, nth % 2 == 0, "up and down, in turn");
        let ahci = there.get().and_then(Weak::upgrade).unwrap();
        if level {
            ahci.mmio_write(0x04, 4, 0);
        }
    })
    .unwrap();
    me.set(Arc::downgrade(&ahci)).unwrap();
    let config = devices::ahci::DriveConfig {
        geometry: geometry(false),
        writable: true,
        write_cache: true,
        serial: String::new(),
        model: String::new(),
    };
    let drive =
        devices::ahci::Drive::attach(&rig.event_loop, &ahci, 0, rig.disks[0].clone(), config);
    ahci.mmio_write(0x114, 4, u32::MAX.into());
    for _ in 0..3 {
        ahci.mmio_write(0x04, 4, 2);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 6);
    drive.unwrap().detach(|| {});
}
