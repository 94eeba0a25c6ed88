//! The workload on an AHCI port.

use std::sync::Arc;

use anyhow::{Result, ensure};
use block::node::BlockNode;

use super::{GuestRun, VcpuKind, WakeUpConfig, patience, pause, structures_at};
use crate::ahci::{AhciDevice, Command, PortArea, PortDriver, reg};
use crate::clock;
use crate::machine::Machine;

/// Where a Set Device Bits FIS is received (AHCI 1.3.1, section 4.2.1).
const SDB_FIS_AT: u64 = 0x58;

/// Length of the guest memory in use.
pub(super) fn memory(config: &WakeUpConfig) -> u64 {
    area(config).end()
}

fn area(config: &WakeUpConfig) -> PortArea {
    PortArea { base: structures_at(config), request_size: config.request_size }
}

pub(super) fn run(
    config: &WakeUpConfig,
    machine: &Machine,
    disk: Arc<dyn BlockNode>,
    vcpu: VcpuKind,
) -> Result<GuestRun> {
    let device = AhciDevice::start(machine, &[disk])?;
    let mut port = PortDriver::bring_up(device.controller(), machine.memory(), 0, area(config))?;
    // The guest polls.
    port.write(reg::PX_IE, 0);
    for slot in 0..config.batch as u8 {
        prepare(config, &mut port, slot, 0)?;
    }
    let mut run = match vcpu {
        VcpuKind::Thread => on_thread(config, &mut port)?,
        #[cfg(target_arch = "x86_64")]
        VcpuKind::Kvm => kvm::run(config, machine, &device)?,
        #[cfg(not(target_arch = "x86_64"))]
        VcpuKind::Kvm => anyhow::bail!(super::NO_KVM),
    };
    for slot in 0..config.batch as u8 {
        run.last_batch.extend(port.data(slot, config.request_size as usize)?);
    }
    Ok(run)
}

fn prepare(config: &WakeUpConfig, port: &mut PortDriver, slot: u8, index: u64) -> Result<()> {
    let size = config.request_size;
    port.prepare(slot, &Command::queued(slot, false, config.offset(index), size), size)
}

fn on_thread(config: &WakeUpConfig, port: &mut PortDriver) -> Result<GuestRun> {
    let memory = port.memory().clone();
    let fis = port.area().rfis() + SDB_FIS_AT;
    let began = clock::now_ns();
    let mut rung = Vec::with_capacity(config.requests() as usize);
    for batch in 0..config.batches() {
        pause(config.pause_ns());
        // As Linux's driver does: a doorbell for each command.
        for slot in 0..config.batch as u8 {
            let index = batch * u64::from(config.batch) + u64::from(slot);
            prepare(config, port, slot, index)?;
            rung.push(clock::now_ns());
            port.ring(1 << slot);
        }
        while port.issued() != 0 {
            let limit = clock::now_ns() + patience(config).as_nanos() as u64;
            while memory.read_u32(fis)? == 0 {
                ensure!(clock::now_ns() < limit, "a request was not answered in time");
                std::thread::yield_now();
            }
            // Cleared before the registers are read, so that a completion in between writes a new FIS.
            memory.write_bytes(fis, &[0; 4])?;
            for _ in 0..port.poll()?.count_ones() {
                pause(config.pause_ns());
            }
        }
    }
    let ended = clock::now_ns();
    Ok(GuestRun {
        began,
        ended,
        rung,
        doorbells: config.requests(),
        last_batch: Vec::new(),
        batches: Vec::new(),
    })
}

#[cfg(target_arch = "x86_64")]
mod kvm {
    use std::cell::RefCell;

    use devices::ahci::Ahci;

    use super::*;
    use crate::kvm::payload::Params;
    use crate::kvm::{MMIO_BASE, Mmio, Vcpu};
    use crate::wake_ups::on_kvm::{run_payload, sectors};

    /// The controller's registers, which record the times of doorbells.
    struct Registers {
        ahci: Arc<Ahci>,
        rung: RefCell<Vec<u64>>,
    }

    const PORT: u64 = reg::PORTS;

    impl Mmio for Registers {
        fn read(&self, offset: u64, size: usize) -> u64 {
            self.ahci.mmio_read(offset, size)
        }

        fn write(&self, offset: u64, size: usize, value: u64) {
            if offset == PORT + reg::PX_CI {
                let now = clock::now_ns();
                self.rung.borrow_mut().extend((0..value.count_ones()).map(|_| now));
            }
            self.ahci.mmio_write(offset, size, value);
        }
    }

    pub(super) fn run(
        config: &WakeUpConfig,
        machine: &Machine,
        device: &AhciDevice,
    ) -> Result<GuestRun> {
        let mut vcpu = Vcpu::new(machine.memory())?;
        let area = area(config);
        let params = Params {
            device: 0,
            requests: area.table(0),
            stride: area.table(1) - area.table(0),
            completions: area.rfis() + SDB_FIS_AT,
            doorbell: MMIO_BASE + PORT + reg::PX_CI,
            sact: MMIO_BASE + PORT + reg::PX_SACT,
            features_high: ((sectors(config) >> 8) & 0xff) << 24,
            ..Params::default()
        };
        let rung = RefCell::new(Vec::with_capacity(config.requests() as usize));
        let registers = Registers { ahci: device.controller().ahci.clone(), rung };
        let began = clock::now_ns();
        let (end, batches) = run_payload(config, &mut vcpu, params, &registers)?;
        let rung = registers.rung.into_inner();
        let ended = batches.last().map_or(began, |&(_, done)| done);
        Ok(GuestRun { began, ended, rung, doorbells: end.kicks, last_batch: Vec::new(), batches })
    }
}
