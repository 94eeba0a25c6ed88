//! Compares the NBD server with its peers: contenders alternate, row by row.

mod report;
mod rows;
mod servers;

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::host::{affinity, data_file, machine, syscalls};
use crate::load::nbd::Address;
use crate::load::{Client, Load};
use crate::options::RunOptions;
use crate::peers::compare::{self, Comparison};
use crate::peers::contender::Contender;
use crate::peers::fio::{Fio, Target, Terms};
use crate::peers::measure::{
    LoadSample, SocketDirectory, count_syscalls, fio_sample, make_directory, own_sample,
};
use crate::peers::server::Server;
use crate::peers::{build_ringmill, cpus};
use rows::{Disk, Row, Sender};
use servers::Serving;

/// Settings common to all measurements of a run.
struct Bench {
    directory: PathBuf,
    sockets: SocketDirectory,
    tree: PathBuf,
    direct: PathBuf,
    cached: PathBuf,
    fio: Fio,
    warm_up: Duration,
    run_time: Duration,
    client_cpu: Option<usize>,
    server_cpu: Option<usize>,
    count_syscalls: bool,
}

/// Measures and reports. Fails if a contender could not be measured, not because of figures.
pub(crate) fn run(options: &RunOptions) -> Result<()> {
    let quick = options.quick;
    let rounds = options.rounds(3);
    build_ringmill(&options.places)?;
    let mut names = options.contenders.clone();
    if names.is_empty() {
        names = servers::USUAL.map(String::from).into();
    }
    let contenders: Vec<Contender<Serving>> =
        names.iter().map(|name| servers::find(name, &options.places)).collect::<Result<_>>()?;
    let rows = compare::choose::<Bench>(rows::rows(quick), options)?;
    let directory = make_directory(&options.directory)?;
    let [client_cpu, server_cpu] = cpus(options.client_cpu, options.server_cpu)?;
    let conditions = machine::describe(&directory);
    let [direct, cached] = if quick { [64 << 20, 32 << 20] } else { [512 << 20, 256 << 20] };
    let bench = Bench {
        direct: data_file::prepare(&directory, direct)?,
        cached: data_file::prepare(&directory, cached)?,
        directory,
        sockets: SocketDirectory::new()?,
        tree: options.places.tree().path().to_owned(),
        fio: Fio::find_with_nbd()?,
        warm_up: Duration::from_millis(100),
        run_time: options.run_time(200, 700),
        client_cpu,
        server_cpu,
        count_syscalls: syscalls::can_count(),
    };
    // This thread reads /proc during measurements, so keep it off the servers' CPU.
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let results = bench.measure(rows, &contenders, rounds);
    let report = report::section(conditions, &bench, rounds, &contenders, &results)?;
    report.publish(options.json.as_deref())?;
    compare::check(&results, &bench.directory)
}

impl Comparison for Bench {
    type Row = Row;
    type Setup = Serving;

    fn name(row: &Row) -> &str {
        &row.name
    }

    fn sample(&self, contender: &Contender<Serving>, row: &Row) -> Result<LoadSample> {
        let (server, address) = self.start(contender, row)?;
        match row.sender {
            Sender::Own => {
                let running = Client::connect_nbd(&address, &self.bound(row))?.start()?;
                own_sample(server, running, self.warm_up, self.run_time)
            }
            Sender::Fio => {
                let terms = Terms {
                    // fio does not count requests of the ramp, but the server spends CPU time on them.
                    ramp: Duration::ZERO,
                    run_time: self.run_time,
                    cpu: self.client_cpu,
                    directory: &self.directory,
                };
                fio_sample(&self.fio, Target::Nbd(&address.uri()), &row.load, terms, server)
            }
        }
    }

    fn calls(&self, contender: &Contender<Serving>, row: &Row) -> Result<Option<f64>> {
        if !self.count_syscalls {
            return Ok(None);
        }
        let (server, address) = self.start(contender, row)?;
        let client = Client::connect_nbd(&address, &self.bound(row))?;
        count_syscalls(server, client, &self.directory, Duration::from_millis(200)).map(Some)
    }
}

impl Bench {
    fn start(&self, contender: &Contender<Serving>, row: &Row) -> Result<(Server, Address)> {
        let mut serving = self.serving(row.disk);
        if row.tcp {
            serving.address = Address::Tcp(free_port()?);
        }
        match row.disk {
            Disk::Direct => data_file::drop_from_cache(&serving.file)?,
            Disk::Cached => data_file::bring_into_cache(&serving.file)?,
        }
        let sockets = match &serving.address {
            Address::Unix(path) => vec![path.clone()],
            Address::Tcp(_) => Vec::new(),
        };
        let command = contender.command(&serving);
        let mut server =
            Server::spawn(&contender.name, &command, &sockets, self.server_cpu, &self.directory)?;
        server.wait_until(|| Ok(serving.address.is_served()))?;
        Ok((server, serving.address))
    }

    /// On a unix socket.
    fn serving(&self, disk: Disk) -> Serving {
        Serving {
            file: match disk {
                Disk::Direct => self.direct.clone(),
                Disk::Cached => self.cached.clone(),
            },
            direct: disk == Disk::Direct,
            address: Address::Unix(self.sockets.0.join("nbd.sock")),
        }
    }

    fn bound(&self, row: &Row) -> Load {
        Load { cpu: self.client_cpu, ..row.load.clone() }
    }
}

/// A TCP port without a listener a moment ago.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("looking for a free port")?;
    Ok(listener.local_addr().context("looking for a free port")?.port())
}
