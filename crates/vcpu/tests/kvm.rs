//! The KVM vCPU and its program, apart from timing.
#![cfg(target_arch = "x86_64")]

use crate::common;

use std::time::Duration;

use common::has_kvm;
use event_loop::IoThreadConfig;
use vcpu::kvm::payload::{FAILED, Params, TIMED_OUT};
use vcpu::kvm::{MMIO_BASE, Mmio, RESERVED, Vcpu};
use vcpu::machine::{Machine, MachineConfig, null_co};
use vcpu::virtio_blk::{GuestQueue, Op, QueueArea, VirtioBlk};
use vcpu::wake_ups::{self, Variant, VcpuKind, WakeUpConfig};

/// No registers at all.
struct Nothing;

impl Mmio for Nothing {
    fn read(&self, _offset: u64, _size: usize) -> u64 {
        0
    }

    fn write(&self, _offset: u64, _size: usize, _value: u64) {}
}

const AREA: QueueArea = QueueArea { base: 2 * RESERVED, depth: 4, request_size: 4096 };
const DISK: u64 = 1 << 20;

fn machine() -> Machine {
    Machine::new(MachineConfig {
        memory: AREA.end(),
        io_threads: vec![IoThreadConfig::default()],
        disk: null_co(DISK),
    })
    .unwrap()
}

/// A queue with one request, and the parameters with which the guest's program sends it.
fn queue(machine: &Machine, vcpu: &Vcpu) -> (GuestQueue, Params) {
    let mut queue = GuestQueue::new(machine.memory(), AREA, true).unwrap();
    queue.submit(Op::Read, 0, AREA.request_size).unwrap();
    let config = queue.setup().config;
    let guest = |user| machine.memory().user_to_guest(user, 4).unwrap();
    let params = Params {
        device: 1,
        batches: 1,
        batch: 1,
        patience: vcpu.tsc().unwrap().ticks(10_000_000_000),
        records: RESERVED,
        requests: AREA.slot(0),
        stride: AREA.slot(1) - AREA.slot(0),
        completions: guest(config.used),
        avail: guest(config.avail),
        mask: u64::from(config.size) - 1,
        doorbell: MMIO_BASE,
        ..Params::default()
    };
    (queue, params)
}

#[test]
fn the_rings_indices_wrap_needs_kvm() {
    if !has_kvm() {
        return;
    }
    // Indices have 16 bits.
    let requests = 66_000;
    let config = WakeUpConfig {
        disk: null_co(1 << 30),
        bytes: requests * 512,
        request_size: 512,
        batch: 16,
        pause: Duration::ZERO,
        timer: Duration::from_millis(499),
        io_cpus: Vec::new(),
    };
    let result = wake_ups::run(&config, Variant::VirtioBlk, VcpuKind::Kvm).unwrap();
    assert_eq!(result.waits.len() as u64, requests);
    assert!(result.doorbells <= config.batches(), "{} kicks", result.doorbells);
}

#[test]
fn a_request_that_fails_is_noticed_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let machine = machine();
    let mut vcpu = Vcpu::new(machine.memory()).unwrap();
    let (queue, params) = queue(&machine, &vcpu);
    vcpu.kick_by_eventfd(MMIO_BASE, &queue.setup().kick).unwrap();
    let _device = VirtioBlk::start(&machine, &[queue.setup()]).unwrap();
    let params = Params { lba: DISK / 512, ..params };
    assert_eq!(vcpu.run(params, &Nothing).unwrap().outcome, FAILED);
}

#[test]
fn a_device_that_does_not_answer_is_noticed_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let machine = machine();
    let mut vcpu = Vcpu::new(machine.memory()).unwrap();
    let (_queue, params) = queue(&machine, &vcpu);
    let params = Params { patience: vcpu.tsc().unwrap().ticks(1_000_000), ..params };
    let end = vcpu.run(params, &Nothing).unwrap();
    assert_eq!((end.outcome, end.kicks), (TIMED_OUT, 1));
}

#[test]
fn an_access_to_nothing_is_an_error_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let machine = machine();
    let mut vcpu = Vcpu::new(machine.memory()).unwrap();
    let (_queue, params) = queue(&machine, &vcpu);
    // Mapped for the program, but neither memory nor registers.
    let error = vcpu.run(Params { doorbell: MMIO_BASE / 2, ..params }, &Nothing).unwrap_err();
    assert!(error.to_string().contains("0x20000000"), "{error}");
    // Not mapped at all: the vCPU cannot handle the fault.
    let mut vcpu = Vcpu::new(machine.memory()).unwrap();
    let error = vcpu.run(Params { doorbell: 2 * MMIO_BASE, ..params }, &Nothing).unwrap_err();
    assert!(error.to_string().contains("must not"), "{error}");
}
