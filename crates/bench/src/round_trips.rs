//! `bench round-trips`: the time of one read from a guest that polls, by device, on a node that answers at once.
//!
//! The guest is a KVM vCPU on the first CPU, the device's I/O thread is on the second. No operating system is between.

use std::time::Duration;

use anyhow::{Context, Result};
use event_loop::PollParams;
use vcpu::machine::null_co;
use vcpu::wake_ups::round_trips::{self, Device, RoundTrips, RoundTripsConfig};

use crate::figures::median;
use crate::host::{affinity, machine};
use crate::options::Options;
use crate::report::{Section, Table};

/// How long the idle device is watched.
const IDLE: Duration = Duration::from_secs(2);
/// Bytes of a request.
const SIZE: u32 = 4096;

/// Measures and reports. Fails if a request is lost or fails, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rounds = options.rounds(5)?;
    let cpus = affinity::allowed()?;
    let guest = *cpus.first().context("no CPU")?;
    let config = RoundTripsConfig {
        disk: null_co(1 << 40),
        requests: 20_000,
        batch: 1,
        request_size: SIZE,
        pause: Duration::ZERO,
        has_numbers: false,
        poll: PollParams::default(),
        io_cpus: cpus.get(1).copied().into_iter().collect(),
        idle: IDLE,
    };
    let mut results = Device::ALL.map(|device| (device, Vec::new()));
    for _ in 0..rounds {
        for (device, results) in &mut results {
            let run = || round_trips::run(&config, *device);
            let result = affinity::while_bound_to(guest, run);
            results.push(result.with_context(|| device.to_string())?);
        }
    }
    let mut text = machine::describe(&options.directory()?);
    text.push(format!(
        "Method: {} reads of {} KiB per round, one at a time, {rounds} round(s), on a null node; the guest is a KVM vCPU that \
         polls, on a CPU of its own; polling of the I/O thread as by default. Figures are medians of the rounds. Idle: CPU of the \
         whole process over {} s after the reads",
        config.requests,
        SIZE >> 10,
        IDLE.as_secs()
    ));
    let tables = vec![table(&results, config.requests)];
    Section { heading: String::new(), text, tables }.publish(options.path("json").as_deref())
}

fn table(results: &[(Device, Vec<RoundTrips>)], requests: u64) -> Table {
    let mut table =
        Table::new(&["device", "answered", "p50 us", "p99 us", "doorbells", "idle CPU %"]);
    for (device, results) in results {
        let of = |figure: &dyn Fn(&RoundTrips) -> f64| median(results.iter().map(figure));
        let microseconds = |share| of(&|result| result.quantile(share).as_secs_f64() * 1e6);
        let answered: usize = results.iter().map(|result| result.times.len()).sum();
        let idle = results.iter().filter_map(|result| result.idle);
        let idle = median(idle.map(|(cpu, of)| 100.0 * cpu.as_secs_f64() / of.as_secs_f64()));
        table.row([
            device.to_string(),
            format!("{answered} of {}", requests * results.len() as u64),
            format!("{:.2}", microseconds(0.5)),
            format!("{:.2}", microseconds(0.99)),
            format!("{:.0}", of(&|result| result.doorbells as f64)),
            if idle.is_nan() { "-".into() } else { format!("{idle:.2}") },
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_medians_and_idle_time_where_it_was_watched() {
        let us = |times: &[u64]| times.iter().map(|&time| Duration::from_micros(time)).collect();
        let result = |idle| RoundTrips { times: us(&[1, 2, 3]), doorbells: 4, idle };
        let idle = Some((Duration::from_millis(1), Duration::from_secs(1)));
        let results =
            [(Device::Ahci, vec![result(None)]), (Device::Nvme, vec![result(idle), result(idle)])];
        let body = table(&results, 3).body;
        assert_eq!(body[0], ["AHCI", "3 of 3", "2.00", "3.00", "4", "-"]);
        assert_eq!(body[1], ["NVMe", "6 of 6", "2.00", "3.00", "4", "0.10"]);
    }
}
