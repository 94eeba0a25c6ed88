//! The workload on a virtio-blk queue.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use block::node::BlockNode;

use super::{GuestRun, VcpuKind, WakeUpConfig, patience, pause, structures_at};
use crate::clock;
use crate::machine::Machine;
use crate::virtio_blk::{GuestQueue, Op, QueueArea, VirtioBlk};

/// Length of the guest memory in use.
pub(super) fn memory(config: &WakeUpConfig) -> u64 {
    area(config).end()
}

fn area(config: &WakeUpConfig) -> QueueArea {
    let base = structures_at(config);
    QueueArea { base, depth: config.batch, request_size: config.request_size }
}

pub(super) fn run(
    config: &WakeUpConfig,
    machine: &Machine,
    disk: Arc<dyn BlockNode>,
    vcpu: VcpuKind,
) -> Result<GuestRun> {
    let mut queue = GuestQueue::new(machine.memory(), area(config), true)?;
    queue.suppress_signals();
    let setup = queue.setup();
    // For KVM's vCPU the requests are written once, as only their sectors change.
    let mut slots = match vcpu {
        VcpuKind::Thread => Vec::new(),
        VcpuKind::Kvm => submit_batch(config, &mut queue, 0)?,
    };
    let device = VirtioBlk::start_with(machine, &disk, &[setup])?;
    let mut run = match vcpu {
        VcpuKind::Thread => on_thread(config, &mut queue, &mut slots)?,
        #[cfg(target_arch = "x86_64")]
        VcpuKind::Kvm => kvm::run(config, machine, &queue.setup())?,
        #[cfg(not(target_arch = "x86_64"))]
        VcpuKind::Kvm => anyhow::bail!(super::NO_KVM),
    };
    drop(device);
    for slot in slots {
        run.last_batch.extend(queue.data(slot, config.request_size as usize)?);
    }
    Ok(run)
}

/// Adds a batch to the queue. In a new queue its slots begin at 0.
fn submit_batch(config: &WakeUpConfig, queue: &mut GuestQueue, batch: u64) -> Result<Vec<u16>> {
    let submit = |i| {
        let offset = config.offset(batch * u64::from(config.batch) + u64::from(i));
        let slot = queue.submit(Op::Read, offset, config.request_size)?;
        slot.context("the queue has no room for a batch")
    };
    (0..config.batch).map(submit).collect()
}

fn on_thread(
    config: &WakeUpConfig,
    queue: &mut GuestQueue,
    last_slots: &mut Vec<u16>,
) -> Result<GuestRun> {
    let began = clock::now_ns();
    let mut rung = Vec::with_capacity(config.requests() as usize);
    for batch in 0..config.batches() {
        pause(config.pause_ns());
        *last_slots = submit_batch(config, queue, batch)?;
        let now = clock::now_ns();
        queue.kick()?;
        rung.extend((0..config.batch).map(|_| now));
        while queue.in_flight() > 0 {
            let limit = clock::now_ns() + patience(config).as_nanos() as u64;
            let done = loop {
                if let Some(done) = queue.reap()? {
                    break done;
                }
                ensure!(clock::now_ns() < limit, "a request was not answered in time");
                std::thread::yield_now();
            };
            ensure!(done.ok, "a request failed");
            pause(config.pause_ns());
        }
    }
    let ended = clock::now_ns();
    Ok(GuestRun {
        began,
        ended,
        rung,
        doorbells: queue.kicks(),
        last_batch: Vec::new(),
        batches: Vec::new(),
    })
}

#[cfg(target_arch = "x86_64")]
mod kvm {
    use std::cell::Cell;

    use super::*;
    use crate::kvm::payload::Params;
    use crate::kvm::{MMIO_BASE, Mmio, Vcpu};
    use crate::virtio_blk::QueueSetup;
    use crate::wake_ups::on_kvm::run_payload;

    /// A device without registers: its kicks are handled by KVM.
    #[derive(Default)]
    struct NoRegisters(Cell<u64>);

    impl Mmio for NoRegisters {
        fn read(&self, _offset: u64, _size: usize) -> u64 {
            self.0.set(self.0.get() + 1);
            0
        }

        fn write(&self, _offset: u64, _size: usize, _value: u64) {
            self.0.set(self.0.get() + 1);
        }
    }

    pub(super) fn run(
        config: &WakeUpConfig,
        machine: &Machine,
        setup: &QueueSetup,
    ) -> Result<GuestRun> {
        let mut vcpu = Vcpu::new(machine.memory())?;
        vcpu.kick_by_eventfd(MMIO_BASE, &setup.kick)?;
        let guest = |user| {
            let addr = machine.memory().user_to_guest(user, 4);
            addr.context("a virtqueue outside of guest memory")
        };
        let area = area(config);
        let params = Params {
            device: 1,
            requests: area.slot(0),
            stride: area.slot(1) - area.slot(0),
            completions: guest(setup.config.used)?,
            avail: guest(setup.config.avail)?,
            mask: u64::from(setup.config.size) - 1,
            doorbell: MMIO_BASE,
            ..Params::default()
        };
        let registers = NoRegisters::default();
        let began = clock::now_ns();
        let (end, batches) = run_payload(config, &mut vcpu, params, &registers)?;
        ensure!(registers.0.get() == 0, "kicks left KVM instead of signalling the eventfd");
        let rung = batches.iter().flat_map(|&(at, _)| (0..config.batch).map(move |_| at)).collect();
        let ended = batches.last().map_or(began, |&(_, done)| done);
        Ok(GuestRun { began, ended, rung, doorbells: end.kicks, last_batch: Vec::new(), batches })
    }
}
