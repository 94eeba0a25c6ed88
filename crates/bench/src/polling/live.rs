//! Measures one load under several choices of polling options.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Policy;
use super::loads::{Disk, LiveLoad};
use crate::figures::turns;
use crate::host::data_file;
use crate::host::ram_disk::RamDisk;
use crate::load::Client;
use crate::options::Options;
use crate::peers::compare::{Measured, Sample};
use crate::peers::contender::{Contender, Node, Polling, Setup};
use crate::peers::measure::own_sample;
use crate::peers::ringmill;
use crate::session::Session;

const SIZE: u64 = 256 << 20;

/// The daemon and its disks.
pub(crate) struct Live {
    /// The run.
    pub(crate) session: Session,
    ringmill: Contender,
    file: PathBuf,
    ram: RamDisk,
}

impl Live {
    /// Prepares the disks.
    pub(crate) fn new(options: &Options, session: Session) -> Result<Self> {
        let file = data_file::prepare(&session.directory, SIZE)?;
        Ok(Live { ringmill: ringmill(options)?, file, ram: RamDisk::new(SIZE)?, session })
    }

    /// Returns the rounds of each policy. Policies alternate their order.
    pub(crate) fn measure(
        &self,
        load: &LiveLoad,
        policies: &[Policy],
        rounds: usize,
    ) -> Result<Vec<Measured>> {
        let mut all = vec![Measured::default(); policies.len()];
        for round in 0..rounds {
            for (policy, measured) in turns(policies, &mut all, round) {
                let sample = self.sample(load, policy);
                let of = || format!("{}, {}", load.name, policy.name);
                measured.rounds.push(sample.with_context(of)?);
            }
        }
        Ok(all)
    }

    /// One measurement.
    fn sample(&self, load: &LiveLoad, policy: &Policy) -> Result<Sample> {
        let disks = std::iter::once(load.disk).chain(load.beside.iter().map(|(disk, _)| *disk));
        let nodes: Vec<Node> = disks.map(|disk| self.node(disk)).collect();
        let session = &self.session;
        let sockets = (0..nodes.len()).map(|i| session.sockets.path(&format!("{i}.sock")));
        let setup = Setup {
            sockets: sockets.collect(),
            nodes,
            polling: Polling::Given(policy.options),
            queues: load.load.queues,
            io_threads: load.io_threads,
        };
        let mut server = session.serve(&self.ringmill, &setup)?;
        let others = load.beside.iter().zip(1..);
        let others: Vec<Client> = others
            .map(|((_, load), export)| server.connect(export, &session.bound(load)))
            .collect::<Result<_>>()?;
        let measured = server.connect(0, &session.bound(&load.load))?;
        // One thread drives them all, as a client with few requests has few threads.
        let _others = Client::join(others).map(Client::start).transpose()?;
        let warm_up = session.run_time.min(Duration::from_millis(200));
        own_sample(server, measured.start()?, warm_up, session.run_time)
    }

    fn node(&self, disk: Disk) -> Node {
        match disk {
            Disk::Null => Node::Null,
            Disk::Ram => Node::Device(self.ram.path()),
            Disk::File => Node::File(self.file.clone()),
        }
    }
}
