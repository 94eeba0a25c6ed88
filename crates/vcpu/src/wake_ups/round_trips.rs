//! The time of a read, one at a time, from a KVM vCPU that polls for its completion.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use block::node::BlockNode;
use block::options::BlockdevOptions;
use event_loop::{IoThreadConfig, LoopConfig, PollParams};
use exports::vfio_user::DoorbellMode;
use nix::time::{ClockId, clock_gettime};

use super::{VcpuKind, WakeUpConfig, on_ahci, on_nvme, on_virtio_blk};
use crate::machine::{Machine, MachineConfig};

/// How the guest reads.
#[derive(Debug, Clone)]
pub struct RoundTripsConfig {
    /// The disk, at least as long as the requests together.
    pub disk: BlockdevOptions,
    /// Number of requests.
    pub requests: u64,
    /// Requests in flight, 1 to 32.
    pub batch: u16,
    /// Bytes of a request: a multiple of 512, at most 4096.
    pub request_size: u32,
    /// The pause before each batch.
    pub pause: Duration,
    /// Each sector of the disk begins with its number, 64 bits. An NVMe guest then verifies the data of each request.
    pub has_numbers: bool,
    /// Polling of the I/O thread.
    pub poll: PollParams,
    /// CPUs for the I/O thread; empty for those of the caller.
    pub io_cpus: Vec<usize>,
    /// How long the idle device is watched after the requests; zero for not at all. NVMe only.
    pub idle: Duration,
}

/// The devices that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// virtio-blk, kicked by an eventfd if the event index asks for it.
    VirtioBlk,
    /// AHCI, whose doorbells are VM exits.
    Ahci,
    /// NVMe over vfio-user, with shadow doorbells. A register is written if the event index asks for it.
    Nvme,
    /// The same, with a register write for each doorbell.
    NvmeTrapped,
    /// The same with doorbells that the guest has mapped: the I/O thread never sleeps.
    NvmeMapped,
}

impl Device {
    /// All of them.
    pub const ALL: [Device; 5] =
        [Device::VirtioBlk, Device::Ahci, Device::Nvme, Device::NvmeTrapped, Device::NvmeMapped];
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Device::VirtioBlk => "virtio-blk",
            Device::Ahci => "AHCI",
            Device::Nvme => "NVMe",
            Device::NvmeTrapped => "NVMe, trapped doorbells",
            Device::NvmeMapped => "NVMe, mapped doorbells",
        })
    }
}

/// The measurements.
#[derive(Debug, Clone)]
pub struct RoundTrips {
    /// The time of each batch, from before its first doorbell to its last completion.
    pub times: Vec<Duration>,
    /// Number of kicks, or of writes to registers of doorbells.
    pub doorbells: u64,
    /// CPU time of this process while the device was idle, and how long that was.
    pub idle: Option<(Duration, Duration)>,
}

impl RoundTrips {
    /// Returns the time that this share of the batches does not exceed: 0.5 for the median.
    pub fn quantile(&self, share: f64) -> Duration {
        let mut times = self.times.clone();
        times.sort();
        let at = (times.len() as f64 * share) as usize;
        times.get(at).or(times.last()).copied().unwrap_or_default()
    }
}

/// Runs the guest on the calling thread.
///
/// # Errors
///
/// The configuration is invalid, KVM or the disk cannot be used, or a request fails, is lost, or has wrong data.
pub fn run(config: &RoundTripsConfig, device: Device) -> Result<RoundTrips> {
    let workload = WakeUpConfig {
        disk: config.disk.clone(),
        bytes: config.requests * u64::from(config.request_size),
        request_size: config.request_size,
        batch: config.batch,
        pause: config.pause,
        timer: Duration::ZERO,
        io_cpus: config.io_cpus.clone(),
    };
    workload.check()?;
    VcpuKind::Kvm.usable()?;
    let memory = [on_ahci::memory, on_virtio_blk::memory, on_nvme::memory];
    let memory = memory.map(|of| of(&workload)).into_iter().max().unwrap_or_default();
    let event_loop = LoopConfig { name: "image".into(), poll: config.poll, ..Default::default() };
    let cpus = config.io_cpus.clone();
    let machine = Machine::new(MachineConfig {
        memory,
        io_threads: vec![IoThreadConfig { event_loop, cpus, ..IoThreadConfig::default() }],
        disk: config.disk.clone(),
    })?;
    let size = machine.disk().geometry().size;
    let bytes = workload.bytes;
    ensure!(size >= bytes, "the disk has {size} bytes, {bytes} are to be read");
    let disk: Arc<dyn BlockNode> = machine.disk().clone();
    let (run, idle) = match device {
        Device::VirtioBlk => (on_virtio_blk::run(&workload, &machine, disk, VcpuKind::Kvm)?, None),
        Device::Ahci => (on_ahci::run(&workload, &machine, disk, VcpuKind::Kvm)?, None),
        Device::Nvme | Device::NvmeTrapped | Device::NvmeMapped => {
            let doorbells = match device {
                Device::NvmeTrapped => DoorbellMode::Trapped,
                Device::NvmeMapped => DoorbellMode::Mapped,
                Device::VirtioBlk | Device::Ahci | Device::Nvme => DoorbellMode::Auto,
            };
            let watch = || watch_idle(config.idle);
            on_nvme::run(&workload, &machine, disk, config.has_numbers, doorbells, watch)?
        }
    };
    if run.batches.len() as u64 != workload.batches() {
        bail!("{} of {} batches were answered", run.batches.len(), workload.batches());
    }
    let times = run.batches.iter();
    let times = times.map(|&(from, to)| Duration::from_nanos(to.saturating_sub(from))).collect();
    Ok(RoundTrips { times, doorbells: run.doorbells, idle })
}

/// CPU time of this process while the calling thread sleeps, and how long that was.
fn watch_idle(idle: Duration) -> Result<Option<(Duration, Duration)>> {
    if idle.is_zero() {
        return Ok(None);
    }
    let cpu = || clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).context("reading the CPU time");
    let (before, begin) = (Duration::from(cpu()?), std::time::Instant::now());
    std::thread::sleep(idle);
    Ok(Some((Duration::from(cpu()?).saturating_sub(before), begin.elapsed())))
}
