//! The policies in the daemon, under real loads.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::Contender;
use crate::figures::median;
use crate::host::{affinity, data_file};
use crate::load::queue::Op;
use crate::peers::client::Client;
use crate::peers::contender::{Places, Polling, find};
use crate::peers::measure::{Bench, LoadSample, SocketDirectory, make_directory};
use crate::peers::rows::{Disk, Row, Work, paced, unpaced};
use crate::report::Table;

/// What the policies have shown, a sample per round.
#[derive(Debug)]
pub(crate) struct Live {
    /// By row; the samples are those of [`Contender::ALL`].
    pub(crate) rows: Vec<(String, Vec<Vec<LoadSample>>)>,
}

impl Live {
    /// The medians.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(&[
            "load",
            "policy",
            "req/s",
            "CPU us/req",
            "switches/req",
            "p50 us",
            "p99 us",
        ]);
        for (name, contenders) in &self.rows {
            for (contender, samples) in Contender::ALL.iter().zip(contenders) {
                let figure = |of: fn(&LoadSample) -> f64| median(samples.iter().map(of));
                table.row([
                    name.clone(),
                    contender.name().into(),
                    format!("{:.0}", figure(|sample| sample.iops)),
                    format!("{:.2}", figure(|sample| sample.cpu)),
                    format!("{:.3}", figure(|sample| sample.switches)),
                    format!("{:.1}", figure(|sample| sample.latency[0])),
                    format!("{:.1}", figure(|sample| sample.latency[1])),
                ]);
            }
        }
        table
    }

    /// The table as text.
    pub(crate) fn text(&self) -> String {
        self.table().text()
    }
}

fn rows() -> Vec<Row> {
    vec![
        paced(Disk::Null, 2_000, 1),
        paced(Disk::Null, 20_000, 1),
        paced(Disk::Null, 100_000, 1),
        paced(Disk::Null, 200_000, 1),
        // On and off: 32 together, 500 times a second.
        paced(Disk::Null, 16_000, 32),
        unpaced(Disk::Null, Op::Read, 1, 1),
        unpaced(Disk::File, Op::Read, 1, 1),
        unpaced(Disk::File, Op::Read, 8, 1),
    ]
}

/// Measures each policy in the daemon on each row; the policies take turns, forth and back.
pub(crate) fn live(rounds: usize, run_time: Duration, directory: &Path) -> Result<Live> {
    ensure!(rounds > 0, "--rounds has to be at least 1");
    let ringmill = find("ringmill", &Places::default())?;
    let directory = make_directory(directory)?;
    let cpus = affinity::allowed()?;
    let (client_cpu, server_cpu) = match cpus.as_slice() {
        [client, server, ..] => (Some(*client), Some(*server)),
        _ => (None, None),
    };
    let bench = Bench {
        data_file: data_file::prepare(&directory, 256 << 20)?,
        directory,
        sockets: SocketDirectory::new()?,
        warm_up: Duration::from_millis(200),
        run_time,
        client_cpu,
        server_cpu,
        client: Client::Own,
        count_syscalls: false,
    };
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let mut results = Vec::new();
    for row in rows() {
        let Work::Load(load) = &row.work else { continue };
        let mut samples = vec![Vec::new(); Contender::ALL.len()];
        for round in 0..rounds {
            let mut turns: Vec<_> = Contender::ALL.iter().zip(&mut samples).collect();
            if round % 2 == 1 {
                turns.reverse();
            }
            for (contender, samples) in turns {
                let polling = match contender {
                    Contender::None => Polling::Off,
                    Contender::Policy(_) => Polling::Policy(contender.name()),
                };
                samples.push(bench.load(&ringmill, row.disk, load, polling)?);
            }
        }
        results.push((row.name, samples));
    }
    Ok(Live { rows: results })
}
