//! The workload on an NVMe controller behind its vfio-user export, from a KVM vCPU only.

use std::cell::RefCell;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use block::node::BlockNode;
use exports::vfio_user::DoorbellMode;

use super::on_kvm::run_payload;
use super::{GuestRun, WakeUpConfig, structures_at};
use crate::clock;
use crate::kvm::payload::{ALWAYS, Params};
use crate::kvm::{MMIO_BASE, Mmio, Vcpu};
use crate::machine::Machine;
use crate::nvme::{ENTRIES, NvmeArea, NvmeDriver, NvmeExport};

/// Length of the guest memory in use.
pub(super) fn memory(config: &WakeUpConfig) -> u64 {
    area(config).end()
}

fn area(config: &WakeUpConfig) -> NvmeArea {
    NvmeArea { base: structures_at(config) }
}

/// The controller's registers: each access is a message to the export, and writes are posted.
struct Registers {
    driver: RefCell<NvmeDriver>,
    failed: RefCell<Option<anyhow::Error>>,
}

impl Registers {
    fn access<T: Default>(&self, access: impl FnOnce(&mut NvmeDriver) -> Result<T>) -> T {
        access(&mut self.driver.borrow_mut()).unwrap_or_else(|error| {
            self.failed.borrow_mut().get_or_insert(error);
            T::default()
        })
    }
}

impl Mmio for Registers {
    fn read(&self, offset: u64, _size: usize) -> u64 {
        self.access(|driver| driver.read(offset)).into()
    }

    fn write(&self, offset: u64, _size: usize, value: u64) {
        self.access(|driver| driver.post(offset, value as u32));
    }
}

/// Runs the workload, then `after`, with the export still there. `has_numbers`: each sector of the disk begins with its
/// number, which the guest compares.
pub(super) fn run<R>(
    config: &WakeUpConfig,
    machine: &Machine,
    disk: Arc<dyn BlockNode>,
    has_numbers: bool,
    doorbells: DoorbellMode,
    after: impl FnOnce() -> Result<R>,
) -> Result<(GuestRun, R)> {
    let export = NvmeExport::start(machine, disk, doorbells)?;
    let area = area(config);
    let memory = machine.memory();
    let has_shadows = doorbells == DoorbellMode::Auto;
    let mut driver =
        NvmeDriver::bring_up(export.path(), memory, area, config.request_size, has_shadows)?;
    // Mapped doorbells are the next page of the guest's memory, and no register is ever written.
    let page = MMIO_BASE - 4096;
    let (memory, shadow, events) = match driver.take_doorbells(page)? {
        Some(region) => {
            let memory = memory.with_region(Arc::new(region)).context("adding the doorbells")?;
            (Arc::new(memory), page + NvmeArea::doorbell(), 0)
        }
        None if has_shadows => (memory.clone(), area.shadow(), area.events()),
        // Nothing reads the shadows.
        None => (memory.clone(), area.shadow(), ALWAYS),
    };
    ensure!(
        (events == 0) == (doorbells == DoorbellMode::Mapped),
        "the export maps other doorbells"
    );
    let mut vcpu = Vcpu::new(&memory)?;
    let params = Params {
        device: 2,
        requests: area.submissions(),
        completions: area.completions(),
        doorbell: MMIO_BASE + NvmeDriver::doorbell(),
        mask: u64::from(ENTRIES) - 1,
        shadow,
        events,
        data: area.data(0),
        has_numbers: has_numbers.into(),
        ..Params::default()
    };
    let registers = Registers { driver: RefCell::new(driver), failed: RefCell::default() };
    let began = clock::now_ns();
    let ran = run_payload(config, &mut vcpu, params, &registers);
    // The reason of a time-out.
    if let Some(error) = registers.failed.take() {
        return Err(error.context("a register of the controller's"));
    }
    let (end, batches) = ran?;
    let ended = batches.last().map_or(began, |&(_, done)| done);
    let rung = batches.iter().flat_map(|&(at, _)| (0..config.batch).map(move |_| at)).collect();
    let result = after()?;
    let (doorbells, last_batch) = (end.kicks, Vec::new());
    Ok((GuestRun { began, ended, rung, doorbells, last_batch, batches }, result))
}
