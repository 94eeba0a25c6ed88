//! A queued request must never wait for an unrelated wake-up.
//!
//! A guest reads in batches, with pauses, from a disk whose loop has no other events but a rare timer. A virtio-blk queue
//! is kicked by an eventfd, which the loop watches. An AHCI port's doorbell is handled inline by the vCPU's thread, which
//! queues the requests on the loop. If that does not wake the loop, the requests wait for the timer.

mod on_ahci;
#[cfg(target_arch = "x86_64")]
mod on_kvm;
#[cfg(target_arch = "x86_64")]
mod on_nvme;
mod on_virtio_blk;
#[cfg(target_arch = "x86_64")]
pub mod round_trips;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use block::options::BlockdevOptions;
use event_loop::{Ablation, IoThreadConfig, LoopConfig, PollParams};

use crate::clock;
use crate::machine::{Machine, MachineConfig, direct};
use crate::submissions::SubmissionLog;
use crate::traffic::Traffic;

/// The workload.
#[derive(Debug, Clone)]
pub struct WakeUpConfig {
    /// The disk, at least [`bytes`](Self::bytes) long.
    pub disk: BlockdevOptions,
    /// Bytes read in total: a multiple of a batch.
    pub bytes: u64,
    /// Bytes per request: a multiple of 512.
    pub request_size: u32,
    /// Requests per batch, 1 to 32.
    pub batch: u16,
    /// The pause before each batch is submitted and after each completion.
    pub pause: Duration,
    /// Period of the loop's only other event.
    pub timer: Duration,
    /// CPUs for the loop and other traffic; empty for those of the caller. With two CPUs or more, a spinning vCPU is
    /// measured best on a CPU without other threads: the caller binds itself.
    pub io_cpus: Vec<usize>,
}

impl WakeUpConfig {
    /// The published workload: 128 MiB in batches of 16 reads of 128 KiB, pauses of 1 ms, a loop that sleeps up to 499 ms;
    /// with O_DIRECT.
    ///
    /// # Errors
    ///
    /// `path` is not a file or block device. The caller has to make sure that it is long enough and was written.
    pub fn published(path: &Path) -> Result<WakeUpConfig> {
        Ok(WakeUpConfig {
            disk: direct(path)?,
            bytes: 128 << 20,
            request_size: 128 << 10,
            batch: 16,
            pause: Duration::from_millis(1),
            timer: Duration::from_millis(499),
            io_cpus: Vec::new(),
        })
    }

    /// Returns the number of requests.
    pub fn requests(&self) -> u64 {
        self.bytes / u64::from(self.request_size)
    }

    /// Returns the number of batches.
    pub fn batches(&self) -> u64 {
        self.requests() / u64::from(self.batch)
    }

    /// Returns the sum of the pauses, the minimum time on any device.
    pub fn pauses(&self) -> Duration {
        self.pause * (self.batches() + self.requests()) as u32
    }

    fn pause_ns(&self) -> u64 {
        self.pause.as_nanos() as u64
    }

    /// First byte on the disk of request number `index`.
    fn offset(&self, index: u64) -> u64 {
        index * u64::from(self.request_size)
    }

    fn check(&self) -> Result<()> {
        let WakeUpConfig { bytes, request_size, batch, .. } = *self;
        ensure!((1..=32).contains(&batch), "batches of {batch}: 1 to 32 are possible");
        let size_is_good = request_size > 0 && request_size.is_multiple_of(512);
        ensure!(size_is_good, "requests of {request_size} bytes");
        let whole = bytes > 0 && bytes.is_multiple_of(u64::from(request_size) * u64::from(batch));
        ensure!(whole, "{bytes} bytes are no whole number of batches");
        Ok(())
    }
}

/// The configurations that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// virtio-blk, kicked by an eventfd.
    VirtioBlk,
    /// AHCI.
    Ahci,
    /// AHCI on a loop that queued requests do not wake.
    AhciWithoutWake,
    /// The same, with other traffic that keeps the loop awake.
    AhciWithoutWakeBusy,
}

impl Variant {
    /// All of them.
    pub const ALL: [Variant; 4] =
        [Variant::VirtioBlk, Variant::Ahci, Variant::AhciWithoutWake, Variant::AhciWithoutWakeBusy];

    /// Returns the time published for QEMU with the [published workload](WakeUpConfig::published).
    pub fn published(self) -> Duration {
        Duration::from_millis(match self {
            Variant::VirtioBlk => 1250,
            Variant::Ahci => 1300,
            Variant::AhciWithoutWake => 25760,
            Variant::AhciWithoutWakeBusy => 1230,
        })
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::VirtioBlk => "virtio-blk",
            Variant::Ahci => "AHCI",
            Variant::AhciWithoutWake => "AHCI without the wake-up",
            Variant::AhciWithoutWakeBusy => "AHCI without it, other traffic",
        })
    }
}

/// The kind of the vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VcpuKind {
    /// The calling thread, in Rust.
    Thread,
    /// A KVM vCPU on the calling thread, x86-64 only: AHCI doorbells are MMIO exits, virtio-blk kicks are ioeventfds.
    Kvm,
}

#[cfg(not(target_arch = "x86_64"))]
const NO_KVM: &str = "vCPUs of KVM's are there on x86-64 only";

impl VcpuKind {
    /// Checks whether this process can have such vCPUs.
    ///
    /// # Errors
    ///
    /// The reason why it cannot.
    pub fn usable(self) -> Result<()> {
        match self {
            VcpuKind::Thread => Ok(()),
            #[cfg(target_arch = "x86_64")]
            VcpuKind::Kvm => Ok(crate::kvm::usable()?),
            #[cfg(not(target_arch = "x86_64"))]
            VcpuKind::Kvm => anyhow::bail!(NO_KVM),
        }
    }
}

/// The measurements.
#[derive(Debug, Clone)]
pub struct WakeUpResult {
    /// From before the pause of the first batch to the end of the last pause.
    pub elapsed: Duration,
    /// The wait of each request from its doorbell until the loop submitted it to the disk, in the order of submission.
    pub waits: Vec<Duration>,
    /// Number of doorbells or kicks.
    pub doorbells: u64,
    /// The data of the last batch, request after request.
    pub last_batch: Vec<u8>,
}

impl WakeUpResult {
    /// Returns the longest wait of a request for its submission.
    pub fn longest_wait(&self) -> Duration {
        self.waits.iter().max().copied().unwrap_or_default()
    }

    /// Returns how many requests waited longer than `limit`.
    pub fn waited_longer_than(&self, limit: Duration) -> usize {
        self.waits.iter().filter(|&&wait| wait > limit).count()
    }
}

/// Results from the guest's side. Times are CLOCK_MONOTONIC, nanoseconds.
struct GuestRun {
    began: u64,
    ended: u64,
    /// When each request's doorbell was rung.
    rung: Vec<u64>,
    doorbells: u64,
    last_batch: Vec<u8>,
    /// KVM: when each batch was submitted and completed.
    batches: Vec<(u64, u64)>,
}

/// Period of other traffic.
const TRAFFIC: Duration = Duration::from_micros(100);

/// Time limit of a completion: twice the timer's period, plus a margin for a slow disk.
fn patience(config: &WakeUpConfig) -> Duration {
    2 * config.timer + Duration::from_secs(10)
}

/// Runs the workload on the calling thread. It spins in the pauses, as vCPUs do.
///
/// # Errors
///
/// The configuration is invalid, the disk or KVM cannot be used, or a request fails.
pub fn run(config: &WakeUpConfig, variant: Variant, vcpu: VcpuKind) -> Result<WakeUpResult> {
    config.check()?;
    vcpu.usable()?;
    let without_wake = matches!(variant, Variant::AhciWithoutWake | Variant::AhciWithoutWakeBusy);
    let event_loop = LoopConfig {
        name: "image".into(),
        // The loop of the published workload sleeps without polling.
        poll: PollParams::OFF,
        ablation: Ablation { no_wake: without_wake, ..Ablation::default() },
        ..LoopConfig::default()
    };
    let machine = Machine::with_timer(
        MachineConfig {
            memory: on_ahci::memory(config).max(on_virtio_blk::memory(config)),
            io_threads: vec![IoThreadConfig {
                event_loop,
                cpus: config.io_cpus.clone(),
                ..IoThreadConfig::default()
            }],
            disk: config.disk.clone(),
        },
        config.timer,
    )?;
    let size = machine.disk().geometry().size;
    ensure!(size >= config.bytes, "the disk has {size} bytes, {} are to be read", config.bytes);
    let log = SubmissionLog::new(machine.disk().clone(), config.requests() as usize);
    let traffic = match variant {
        Variant::AhciWithoutWakeBusy => {
            Some(Traffic::start(machine.loop_of(0), TRAFFIC, &config.io_cpus)?)
        }
        _ => None,
    };
    let GuestRun { began, ended, rung, doorbells, last_batch, batches: _ } = match variant {
        Variant::VirtioBlk => on_virtio_blk::run(config, &machine, log.clone(), vcpu)?,
        _ => on_ahci::run(config, &machine, log.clone(), vcpu)?,
    };
    drop(traffic);
    let submitted = log.times();
    let (announced, requests) = (rung.len() as u64, config.requests());
    ensure!(
        submitted.len() as u64 == requests && announced == requests,
        "{announced} requests announced, {} submitted, of {requests}",
        submitted.len()
    );
    let waits = rung.iter().zip(&submitted);
    let waits = waits.map(|(rung, at)| Duration::from_nanos(at.saturating_sub(*rung))).collect();
    let elapsed = Duration::from_nanos(ended.saturating_sub(began));
    Ok(WakeUpResult { elapsed, waits, doorbells, last_batch })
}

/// A pause of the thread that acts as a vCPU.
fn pause(ns: u64) {
    let until = clock::now_ns() + ns;
    while clock::now_ns() < until {
        std::hint::spin_loop();
    }
}

/// Address of a KVM vCPU's records, after its own memory.
const RECORDS_AT: u64 = 1 << 16;

/// Minimum address of the driver's structures.
fn structures_at(config: &WakeUpConfig) -> u64 {
    (RECORDS_AT + 16 * config.batches()).next_multiple_of(1 << 16)
}
