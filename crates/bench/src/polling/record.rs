//! Recorded traces: the waits of our own loop under a guest at a fixed depth.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use event_loop::{IoThreadConfig, LoopConfig, PollParams, PollPolicy};
use vcpu::load::{LoadConfig, Wait};
use vcpu::machine::{Machine, MachineConfig, direct, null_co, on_loop};
use vcpu::virtio_blk::Op;

use super::traces::{Load, RecordedWait, Trace};
use crate::host::ram_disk::RamDisk;
use crate::host::{affinity, data_file};

/// Waits per trace.
const WAITS: usize = 2_000;

/// Windows up to here while recording, so that an interval is the gap itself and holds no time to wake up.
const RECORD_WINDOW_NS: u64 = 1_000_000;

const RECORDED: [(&str, &str); 9] = [
    ("null-1", include_str!("recorded/null-1")),
    ("null-8", include_str!("recorded/null-8")),
    ("null-64", include_str!("recorded/null-64")),
    ("file-1", include_str!("recorded/file-1")),
    ("file-8", include_str!("recorded/file-8")),
    ("file-64", include_str!("recorded/file-64")),
    ("zram-1", include_str!("recorded/zram-1")),
    ("zram-8", include_str!("recorded/zram-8")),
    ("zram-64", include_str!("recorded/zram-64")),
];

/// How often a recording is replayed: policies learn, and 2,000 waits are soon over.
const REPLAYS: usize = 25;

/// The recorded traces.
pub(crate) fn recorded() -> impl Iterator<Item = Trace> {
    RECORDED.iter().map(|(name, text)| {
        let waits: Vec<RecordedWait> = text.lines().filter_map(parse).collect();
        let (disk, depth) = name.split_once('-').unwrap_or((name, ""));
        Trace {
            name: format!("recorded, {disk}, depth {depth}"),
            load: Load::Recorded(waits.repeat(REPLAYS)),
        }
    })
}

/// A line: the gap in nanoseconds, then `r` (ring), `q` (queue) and `f` (in flight afterwards).
fn parse(line: &str) -> Option<RecordedWait> {
    let (gap, flags) = line.split_once(' ')?;
    Some(RecordedWait {
        gap_ns: gap.parse().ok()?,
        by_ring: flags.contains('r'),
        by_queue: flags.contains('q'),
        in_flight: flags.contains('f'),
    })
}

/// Records all traces anew, into files of `into`.
pub(crate) fn record(into: &Path, directory: &Path) -> Result<()> {
    const SIZE: u64 = 256 << 20;
    std::fs::create_dir_all(directory)?;
    let file = data_file::prepare(directory, SIZE)?;
    let ram = RamDisk::new(SIZE)?;
    for (name, _) in RECORDED {
        let (disk, depth) = name.split_once('-').context("a name has a depth")?;
        let disk = match disk {
            "null" => null_co(SIZE),
            "file" => direct(&file)?,
            _ => direct(&ram.path())?,
        };
        let load = LoadConfig {
            jobs: 1,
            depth: depth.parse()?,
            size: 4096,
            op: Op::Read,
            wait: Wait::Signal,
            event_idx: true,
            warm_up: Duration::from_millis(200),
            measured: Duration::from_secs(2),
        };
        let poll = PollParams {
            policy: PollPolicy::Stepped,
            max_ns: RECORD_WINDOW_NS,
            ..PollParams::default()
        };
        let event_loop = LoopConfig { name: "io".into(), poll, ..LoopConfig::default() };
        let cpus = affinity::allowed()?;
        let io_thread = IoThreadConfig {
            event_loop,
            cpus: cpus.get(1).copied().into_iter().collect(),
            ..IoThreadConfig::default()
        };
        let machine = Machine::new(MachineConfig {
            memory: load.memory(),
            io_threads: vec![io_thread],
            disk,
        })?;
        on_loop(machine.loop_of(0), |event_loop| event_loop.record_waits(3 * WAITS))?;
        let cpu = *cpus.first().context("no CPU")?;
        affinity::while_bound_to(cpu, || load.run(&machine))?;
        let waits = on_loop(machine.loop_of(0), |event_loop| event_loop.record_waits(0))?;
        ensure!(waits.len() >= 3 * WAITS, "{name}: only {} waits", waits.len());
        let mut text = String::new();
        // Not the beginning, in which the window grows.
        for wait in &waits[waits.len() - WAITS..] {
            let flag = |set, flag| if set { flag } else { "" };
            let flags = flag(wait.by_ring, "r").to_owned()
                + flag(wait.by_others, "q")
                + flag(wait.in_flight, "f");
            writeln!(text, "{} {flags}", wait.interval_ns)?;
        }
        let path = into.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        eprintln!("{name}");
    }
    Ok(())
}
