//! Measures one load under several choices of polling options.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Contender;
use super::loads::{Disk, LiveLoad};
use crate::figures::turns;
use crate::host::ram_disk::RamDisk;
use crate::host::{affinity, data_file};
use crate::load::{Client, Load};
use crate::peers::contender::{self, Node, Places, Polling, Setup, find};
use crate::peers::cpus;
use crate::peers::measure::{LoadSample, SocketDirectory, make_directory, own_sample};
use crate::peers::server::Server;

const SIZE: u64 = 256 << 20;

/// Settings common to all measurements.
pub(super) struct Live {
    ringmill: contender::Contender,
    directory: PathBuf,
    sockets: SocketDirectory,
    file: PathBuf,
    ram: RamDisk,
    cpus: [Option<usize>; 2],
    run_time: Duration,
}

impl Live {
    /// Prepares the disks. Measures for `run_time` each.
    pub(super) fn new(run_time: Duration, directory: &Path) -> Result<Self> {
        let directory = make_directory(directory)?;
        let cpus = cpus(None, None)?;
        if let [Some(cpu), _] = cpus {
            affinity::bind_this_thread(cpu)?;
        }
        Ok(Live {
            ringmill: find("ringmill", &Places::default())?,
            file: data_file::prepare(&directory, SIZE)?,
            ram: RamDisk::new(SIZE)?,
            directory,
            sockets: SocketDirectory::new()?,
            cpus,
            run_time,
        })
    }

    /// Returns the samples of each contender, one per round. Contenders alternate their order.
    pub(super) fn measure(
        &self,
        load: &LiveLoad,
        contenders: &[Contender],
        rounds: usize,
    ) -> Result<Vec<Vec<LoadSample>>> {
        let mut samples = vec![Vec::new(); contenders.len()];
        for round in 0..rounds {
            for (contender, samples) in turns(contenders, &mut samples, round) {
                let sample = self.sample(load, contender);
                let of = || format!("{}, {}", load.name, contender.name);
                samples.push(sample.with_context(of)?);
            }
        }
        Ok(samples)
    }

    /// One measurement.
    fn sample(&self, load: &LiveLoad, contender: &Contender) -> Result<LoadSample> {
        let disks = std::iter::once(load.disk).chain(load.beside.iter().map(|(disk, _)| *disk));
        let nodes: Vec<Node> = disks.map(|disk| self.node(disk)).collect();
        let sockets = (0..nodes.len()).map(|i| self.sockets.0.join(format!("{i}.sock"))).collect();
        let setup = Setup {
            node: Node::Each(nodes),
            polling: Polling::Given(contender.options),
            queues: load.load.queues,
            io_threads: load.io_threads,
            sockets,
        };
        let mut server = Server::start(&self.ringmill, &setup, self.cpus[1], &self.directory)?;
        let bound = |load: &Load| Load { cpu: self.cpus[0], ..load.clone() };
        let others = load.beside.iter().zip(1..);
        let others: Vec<Client> = others
            .map(|((_, load), export)| server.connect(export, &bound(load)))
            .collect::<Result<_>>()?;
        let measured = server.connect(0, &bound(&load.load))?;
        // One thread drives them all, as a client with few requests has few threads.
        let _others = Client::join(others).map(Client::start).transpose()?;
        let warm_up = self.run_time.min(Duration::from_millis(200));
        own_sample(server, measured.start()?, warm_up, self.run_time)
    }

    fn node(&self, disk: Disk) -> Node {
        match disk {
            Disk::Null => Node::Null,
            Disk::Ram => Node::Device(self.ram.path()),
            Disk::File => Node::File(self.file.clone()),
        }
    }
}
