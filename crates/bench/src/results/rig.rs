//! The environment of `ring_flags` and `batched_signals`: a virtio-blk device on an I/O thread of this process, and
//! drivers on threads that act as
//! vCPUs.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use event_loop::{Ablation, IoThreadConfig, LoopConfig, PollParams, RingChoice};
use vcpu::load::{LoadConfig, LoadResult, Wait};
use vcpu::machine::{Machine, MachineConfig, direct, null_co};
use vcpu::virtio_blk::Op;

use crate::figures::turns;
use crate::host::ram_disk::RamDisk;
use crate::host::{affinity, data_file};
use crate::options::Options;

/// A disk to measure on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// `null-co`, which answers at once.
    Null,
    /// A loop device over memory: the fastest disk that completes asynchronously.
    Ram,
    /// A file on the machine's own disk.
    File,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Disk::Null => "null",
            Disk::Ram => "RAM disk",
            Disk::File => "file",
        })
    }
}

/// A load on a disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) disk: Disk,
    pub(crate) op: Op,
    pub(crate) depth: u16,
    pub(crate) jobs: u16,
    pub(crate) wait: Wait,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = match self.op {
            Op::Read => "randread",
            Op::Write => "randwrite",
        };
        write!(f, "{}, {op}, depth {}", self.disk, self.depth)?;
        match self.jobs {
            1 => Ok(()),
            jobs => write!(f, ", {jobs} jobs"),
        }
    }
}

/// The mechanism that is switched off.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Variant {
    pub(crate) ring: RingChoice,
    pub(crate) ablation: Ablation,
}

/// The results of one variant on one row: a figure per round.
#[derive(Debug, Clone, Default)]
pub(crate) struct Figures {
    /// Requests per second, with default polling.
    pub(crate) iops: Vec<f64>,
    /// Microseconds of the I/O thread's CPU time per request, without polling.
    pub(crate) cpu: Vec<f64>,
    /// Signals per request, with default polling.
    pub(crate) signals: Vec<f64>,
    /// Median latency in microseconds, with default polling.
    pub(crate) p50: Vec<f64>,
}

/// The available disks, and the duration of measurements.
pub(crate) struct Rig {
    ram: Option<RamDisk>,
    file: PathBuf,
    warm_up: Duration,
    measured: Duration,
    pub(crate) rounds: usize,
    cpus: Vec<usize>,
    /// Notes for the reader.
    pub(crate) notes: Vec<String>,
}

impl Rig {
    pub(crate) fn new(options: &Options) -> Result<Rig> {
        let size = if options.quick() { 64 << 20 } else { 1 << 30 };
        let mut notes = Vec::new();
        let ram = match RamDisk::new(size) {
            Ok(disk) => Some(disk),
            Err(error) => {
                notes.push(format!("No RAM disk: {error:#}. Rows that need it are left out."));
                None
            }
        };
        Ok(Rig {
            ram,
            file: data_file::prepare(&options.directory()?, size)?,
            warm_up: Duration::from_millis(if options.quick() { 50 } else { 200 }),
            measured: options.run_time(100, 800),
            rounds: options.rounds(5)?,
            cpus: affinity::allowed()?,
            notes,
        })
    }

    /// Whether the row's disk is available.
    pub(crate) fn has(&self, row: &Row) -> bool {
        row.disk != Disk::Ram || self.ram.is_some()
    }

    /// Measures each variant on one row. Variants alternate their order.
    pub(crate) fn compare(&self, row: &Row, variants: &[Variant]) -> Result<Vec<Figures>> {
        let mut all = vec![Figures::default(); variants.len()];
        for round in 0..self.rounds {
            for (variant, figures) in turns(variants, &mut all, round) {
                let polling = self.run(row, variant, PollParams::default())?;
                let off = PollParams::OFF;
                let sleeping = self.run(row, variant, off)?;
                figures.iops.push(polling.iops);
                figures.signals.push(polling.signals as f64 / polling.requests as f64);
                figures.p50.push(polling.latencies.value_at_quantile(0.5) as f64 / 1e3);
                let cpu = sleeping.io_cpu.as_secs_f64() * 1e6 / sleeping.requests as f64;
                figures.cpu.push(cpu);
            }
        }
        Ok(all)
    }

    fn run(&self, row: &Row, variant: &Variant, poll: PollParams) -> Result<LoadResult> {
        let load = LoadConfig {
            jobs: row.jobs,
            depth: row.depth,
            size: 4096,
            op: row.op,
            wait: row.wait,
            event_idx: true,
            warm_up: self.warm_up,
            measured: self.measured,
        };
        let disk = match (row.disk, &self.ram) {
            (Disk::Null, _) => null_co(1 << 30),
            (Disk::File, _) => direct(&self.file)?,
            (Disk::Ram, Some(disk)) => direct(&disk.path())?,
            (Disk::Ram, None) => anyhow::bail!("no RAM disk is available"),
        };
        let event_loop = LoopConfig {
            name: "io".into(),
            ring: variant.ring,
            ablation: variant.ablation,
            poll,
            ..LoopConfig::default()
        };
        let cpus = self.cpus.get(1).copied().into_iter().collect();
        let io_thread = IoThreadConfig { event_loop, cpus, ..IoThreadConfig::default() };
        let machine = Machine::new(MachineConfig {
            memory: load.memory(),
            io_threads: vec![io_thread],
            disk,
        })?;
        let cpu = *self.cpus.first().context("no CPU")?;
        // Threads that it starts inherit the CPU.
        let result = affinity::while_bound_to(cpu, || load.run(&machine));
        result.with_context(|| format!("{row}"))
    }
}
