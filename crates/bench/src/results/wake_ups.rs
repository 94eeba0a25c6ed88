//! A queued request never waits for an unrelated wake-up.

use std::time::Duration;

use anyhow::{Context, Result};
use vcpu::wake_ups::{self, Variant, VcpuKind, WakeUpConfig, WakeUpResult};

use super::section;
use crate::figures::Rounds;
use crate::goal::{Bound, Goal};
use crate::host::{affinity, data_file};
use crate::options::Options;
use crate::report::{Section, Table};

/// Maximum wait of a request for its submission.
const LONGEST_WAIT: Duration = Duration::from_millis(1);

/// Measures it.
pub(super) fn measure(options: &Options) -> Result<Section> {
    let rounds = options.rounds(3)?;
    let config = config(options)?;
    let mut goals = Vec::new();
    let mut text = vec![format!(
        "{} MiB read in requests of {} KiB, batches of {}, O_DIRECT, from a file; a pause of 1 ms \
             before each batch and after each completion; the disk's loop has a timer every {} ms and \
             nothing else, and does not poll. {rounds} round(s). The pauses alone take {:.2} s. \
             Published: QEMU, the whole workload of 128 MiB.",
        config.bytes >> 20,
        config.request_size >> 10,
        config.batch,
        config.timer.as_millis(),
        config.pauses().as_secs_f64()
    )];
    let mut vcpus = vec![("a thread", VcpuKind::Thread)];
    match VcpuKind::Kvm.usable() {
        Ok(()) => vcpus.push(("a KVM vCPU", VcpuKind::Kvm)),
        Err(why) => text.push(format!("Without KVM vCPUs: {why}.")),
    }
    let mut table = Table::new(&[
        "device",
        "vCPU",
        "seconds",
        "least..most",
        "longest wait for submission, ms",
        "requests that waited over 1 ms",
        "published, s",
    ]);
    let cpu = *affinity::allowed()?.first().context("no CPU")?;
    for (name, kind) in vcpus {
        let mut results = vec![Vec::new(); Variant::ALL.len()];
        for _ in 0..rounds {
            for (variant, results) in Variant::ALL.into_iter().zip(&mut results) {
                let run = || wake_ups::run(&config, variant, kind);
                let result = affinity::while_bound_to(cpu, run);
                results.push(result.with_context(|| format!("{variant}, {name}"))?);
            }
        }
        for (variant, results) in Variant::ALL.into_iter().zip(&results) {
            let time = Rounds::of(&seconds(results));
            table.row([
                variant.to_string(),
                name.into(),
                format!("{:.2}", time.median),
                time.range(2),
                format!("{:.3}", longest_wait(results)),
                format!("{} of {}", waited(results), config.requests() * rounds as u64),
                format!("{:.2}", variant.published().as_secs_f64()),
            ]);
        }
        let of = |wanted| {
            let at = Variant::ALL.iter().position(|&variant| variant == wanted);
            at.map_or(&[][..], |at| &results[at])
        };
        let time = |wanted| Rounds::of(&seconds(of(wanted))).median;
        let ahci = of(Variant::Ahci);
        goals.extend([
            Goal::new(
                format!("AHCI against virtio-blk, time, {name}"),
                Bound::AtMost(1.05),
                Some(time(Variant::Ahci) / time(Variant::VirtioBlk)),
                3,
            ),
            Goal::new(
                format!("AHCI, longest wait for submission, ms, {name}"),
                Bound::AtMost(LONGEST_WAIT.as_secs_f64() * 1e3),
                Some(longest_wait(ahci)),
                3,
            ),
            Goal::new(
                format!("without the wake-up the stall is there: times the time, {name}"),
                Bound::AtLeast(2.0),
                Some(time(Variant::AhciWithoutWake) / time(Variant::Ahci)),
                1,
            ),
        ]);
    }
    let heading = "A queued request never waits for an unrelated wake-up";
    Ok(section(heading, text, vec![table], &goals))
}

fn config(options: &Options) -> Result<WakeUpConfig> {
    let size = if options.quick() { 4 << 20 } else { 128 << 20 };
    let file = data_file::prepare(&options.directory()?, size)?;
    let mut config = WakeUpConfig::published(&file)?;
    config.bytes = size;
    config.io_cpus = affinity::allowed()?.get(1).copied().into_iter().collect();
    Ok(config)
}

fn seconds(results: &[WakeUpResult]) -> Vec<f64> {
    results.iter().map(|result| result.elapsed.as_secs_f64()).collect()
}

/// The longest wait of all rounds, milliseconds.
fn longest_wait(results: &[WakeUpResult]) -> f64 {
    let longest = results.iter().map(WakeUpResult::longest_wait).max();
    longest.unwrap_or_default().as_secs_f64() * 1e3
}

fn waited(results: &[WakeUpResult]) -> usize {
    results.iter().map(|result| result.waited_longer_than(LONGEST_WAIT)).sum()
}
