//! An NVMe controller behind its export, driven by shadow doorbells from a KVM vCPU.
#![cfg(target_arch = "x86_64")]

use crate::common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::has_kvm;
use event_loop::{PollParams, PollPolicy};
use vcpu::machine::{direct, null_co};
use vcpu::wake_ups::round_trips::{self, Device, RoundTrips, RoundTripsConfig};

const SECTOR: u32 = 512;

/// A disk whose sectors begin with their numbers, from `first` on.
fn disk(name: &str, sectors: u64, first: u64) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut bytes = vec![0; (sectors * u64::from(SECTOR)) as usize];
    for (sector, number) in bytes.chunks_exact_mut(SECTOR as usize).zip(first..) {
        sector[..8].copy_from_slice(&number.to_le_bytes());
    }
    std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
    path
}

fn config(disk: &Path, requests: u64) -> RoundTripsConfig {
    RoundTripsConfig { disk: direct(disk).unwrap(), has_numbers: true, ..null(requests) }
}

/// Without a file and without data.
fn null(requests: u64) -> RoundTripsConfig {
    RoundTripsConfig {
        disk: null_co(1 << 30),
        requests,
        batch: 1,
        request_size: SECTOR,
        pause: Duration::ZERO,
        has_numbers: false,
        poll: PollParams::default(),
        io_cpus: Vec::new(),
        idle: Duration::ZERO,
    }
}

fn run(config: &RoundTripsConfig) -> RoundTrips {
    round_trips::run(config, Device::Nvme).unwrap()
}

/// The guest verifies the data of each request, and that each is answered once.
#[test]
fn twenty_thousand_requests_are_answered_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let path = disk("nvme-20000", 20_000, 0);
    let batches = RoundTripsConfig { batch: 32, ..config(&path, 20_000) };
    assert_eq!(run(&batches).times.len() as u64 * u64::from(batches.batch), batches.requests);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_loop_that_polls_needs_few_registers_needs_kvm() {
    if !has_kvm() {
        return;
    }
    // A fixed window that outlasts what a busy machine does between two requests: on such a machine, the default
    // policy rather sleeps.
    let poll =
        PollParams { max_ns: 1_000_000_000, policy: PollPolicy::Fixed, ..PollParams::default() };
    let polled = run(&RoundTripsConfig { poll, ..null(20_000) });
    assert_eq!(polled.times.len(), 20_000);
    assert!(polled.doorbells < 10_000, "{} registers were written", polled.doorbells);
}

/// The guest writes no register: doorbells are memory that both have mapped. The thread does not poll of its own accord.
#[test]
fn mapped_doorbells_need_no_register_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let path = disk("nvme-mapped", 20_000, 0);
    for (pause, batch) in [(0, 32), (100, 1)] {
        let requests = if pause == 0 { 20_000 } else { 1000 };
        let (poll, pause) = (PollParams::OFF, Duration::from_micros(pause));
        let mapped = RoundTripsConfig { batch, poll, pause, ..config(&path, requests) };
        let done = round_trips::run(&mapped, Device::NvmeMapped).unwrap();
        assert_eq!(done.times.len() as u64 * u64::from(batch), requests);
        assert_eq!(done.doorbells, 0);
    }
    std::fs::remove_file(path).unwrap();
}

/// Two registers per request: the tail of the submission queue, and the head of the completion queue.
#[test]
fn trapped_doorbells_need_two_registers_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let path = disk("nvme-trapped", 1000, 0);
    let done = round_trips::run(&config(&path, 1000), Device::NvmeTrapped).unwrap();
    assert_eq!((done.times.len(), done.doorbells), (1000, 2000));
    std::fs::remove_file(path).unwrap();
}

/// A lost wake-up would be a request that is never answered.
#[test]
fn a_loop_that_sleeps_is_woken_by_the_register_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let path = disk("nvme-sleeps", 1000, 0);
    // Pauses about as long as the polling window let the guest race with a loop that falls asleep.
    for (poll, pause) in [
        (PollParams::OFF, Duration::from_millis(1)),
        (PollParams::default(), Duration::from_millis(1)),
        (PollParams::default(), Duration::from_micros(32)),
        (PollParams::default(), Duration::from_micros(60)),
    ] {
        let paused = RoundTripsConfig { poll, pause, ..config(&path, 1000) };
        let done = run(&paused);
        assert_eq!(done.times.len(), 1000, "{pause:?}");
        let is_off = poll.max_ns == 0;
        assert!(!is_off || done.doorbells > 0, "a loop that sleeps needs the register");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn wrong_data_is_noticed_needs_kvm() {
    if !has_kvm() {
        return;
    }
    let path = disk("nvme-wrong", 100, 1);
    let error = round_trips::run(&config(&path, 100), Device::Nvme).unwrap_err();
    assert!(error.to_string().contains("wrong data"), "{error:#}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn every_device_answers_and_idle_time_is_reported_needs_kvm() {
    if !has_kvm() {
        return;
    }
    for device in Device::ALL {
        let idle = Duration::from_millis(50);
        let config = RoundTripsConfig { idle, ..null(500) };
        let done = round_trips::run(&config, device).unwrap();
        assert_eq!(done.times.len(), 500, "{device}");
        assert!(done.quantile(0.5) > Duration::ZERO && done.quantile(0.5) <= done.quantile(1.0));
        let has_idle = !matches!(device, Device::VirtioBlk | Device::Ahci);
        assert_eq!(done.idle.is_some(), has_idle);
    }
}
