//! The workload in small: a queued request must never wait for an unrelated wake-up.
//!
//! The bounds tolerate a busy machine: a wait for the timer takes most of a second.

use crate::common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use common::has_kvm;
use event_loop::sync::lock;
use fastrand::Rng;
use vcpu::wake_ups::{self, Variant, VcpuKind, WakeUpConfig, WakeUpResult};

/// Period of the loop's only other event, and the minimum wait for it, less the work on the previous batch, which takes
/// 20 ms on an idle machine.
const TIMER: Duration = Duration::from_secs(1);
const STALL: Duration = Duration::from_millis(250);

/// Guests spin: two at a time on two CPUs would test the scheduler.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A disk with each byte written.
fn disk(name: &str, len: usize) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut random = Rng::with_seed(len as u64);
    let bytes: Vec<u8> = (0..len / 8).flat_map(|_| random.u64(..).to_le_bytes()).collect();
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    path
}

fn run(name: &str, mib: u64, variant: Variant, vcpu: VcpuKind) -> WakeUpResult {
    let _alone = lock(&ONE_AT_A_TIME);
    let path = disk(name, (mib << 20) as usize);
    let published = WakeUpConfig::published(&path).unwrap();
    let config = WakeUpConfig { bytes: mib << 20, timer: TIMER, ..published };
    let result = wake_ups::run(&config, variant, vcpu).unwrap();
    assert!(result.elapsed >= config.pauses(), "faster than its pauses: {:?}", result.elapsed);
    assert_eq!(result.waits.len() as u64, config.requests());
    let expected = std::fs::read(&path).unwrap();
    let last = expected.len() - result.last_batch.len();
    assert!(result.last_batch == expected[last..], "the last batch has wrong data");
    std::fs::remove_file(&path).unwrap();
    println!("{variant}, {vcpu:?}: {:?}, longest wait {:?}", result.elapsed, result.longest_wait());
    result
}

fn median(result: &WakeUpResult) -> Duration {
    let mut waits = result.waits.clone();
    waits.sort();
    waits[waits.len() / 2]
}

#[test]
fn nothing_waits_with_virtio_blk() {
    let result = run("wake-ups-virtio", 4, Variant::VirtioBlk, VcpuKind::Thread);
    assert!(median(&result) < STALL, "{:?}", median(&result));
    // A device that checks its queue at that moment needs no kick.
    assert!(result.doorbells <= 2, "more than one kick per batch: {}", result.doorbells);
}

#[test]
fn nothing_waits_with_ahci() {
    let result = run("wake-ups-ahci", 4, Variant::Ahci, VcpuKind::Thread);
    assert!(median(&result) < STALL, "{:?}", median(&result));
}

#[test]
fn without_the_wake_up_requests_wait_for_the_timer() {
    let result = run("wake-ups-no-wake", 4, Variant::AhciWithoutWake, VcpuKind::Thread);
    assert!(median(&result) > STALL, "{:?}", median(&result));
}

#[test]
fn other_traffic_hides_the_missing_wake_up() {
    let result = run("wake-ups-busy", 4, Variant::AhciWithoutWakeBusy, VcpuKind::Thread);
    assert!(median(&result) < STALL, "{:?}", median(&result));
}

#[test]
fn all_of_it_on_a_kvm_vcpu_needs_kvm() {
    if !has_kvm() {
        return;
    }
    for variant in Variant::ALL {
        let result = run("wake-ups-kvm", 4, variant, VcpuKind::Kvm);
        if variant == Variant::AhciWithoutWake {
            assert!(median(&result) > STALL, "{variant}: {:?}", median(&result));
        } else {
            assert!(median(&result) < STALL, "{variant}: {:?}", median(&result));
        }
    }
}
