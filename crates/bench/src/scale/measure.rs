//! One measurement of one server with many exports.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::host::data_file;
use crate::host::footprint::{Footprint, slab};
use crate::load::{Client, Load, Running};
use crate::peers::compare::Figure;
use crate::peers::contender::{Contender, Node, Polling, Setup};
use crate::peers::measure::{connect, idle_clients, idle_sample, own_figures};
use crate::peers::rows;
use crate::peers::server::Server;
use crate::session::Session;

/// Requests in flight on each export when all are busy.
const DEPTH_OF_ALL: usize = 4;
/// Bytes of each export's file.
const FILE_SIZE: u64 = 256 << 10;

/// Settings common to all measurements of a run.
pub(super) struct Bench {
    /// The run.
    pub(super) session: Session,
    /// How long other exports have been idle before one is measured.
    pub(super) settle: Duration,
}

/// The footprint of an idle server with a client on each export.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Idle {
    /// Milliseconds until all listen.
    pub(super) start: f64,
    /// Its footprint.
    pub(super) footprint: Footprint,
    /// Growth of the machine's kernel objects since before the server's start, KiB, including those of the clients.
    pub(super) slab: f64,
    /// CPU time, percent of one CPU.
    pub(super) cpu: f64,
    /// Context switches per second: each wake-up is one.
    pub(super) switches: f64,
}

/// The results of a load.
#[derive(Debug, Clone, Copy)]
pub(super) struct Busy {
    /// Requests per second.
    pub(super) iops: f64,
    /// CPU time of the server per request, microseconds.
    pub(super) cpu: f64,
    /// Median latency, microseconds, of the median queue.
    pub(super) p50: f64,
    /// Median latency of the slowest queue, as a multiple.
    pub(super) slowest: f64,
}

impl Bench {
    fn setup(&self, nodes: Vec<Node>, polling: Polling) -> Setup {
        let socket = |i| self.session.sockets.path(&format!("{i}.sock"));
        let sockets = (0..nodes.len()).map(socket).collect();
        Setup { nodes, polling, queues: 1, io_threads: 1, sockets }
    }

    fn null(&self, exports: usize) -> Setup {
        self.setup(vec![Node::Null; exports], Polling::Default)
    }

    /// Measures an idle server of files.
    pub(super) fn idle(&self, contender: &Contender, exports: usize) -> Result<Idle> {
        let file = |i| Node::File(file(&self.session.directory, i));
        let setup = self.setup((0..exports).map(file).collect(), Polling::Default);
        let slab_before = slab()?;
        let begun = Instant::now();
        let mut server = self.session.serve(contender, &setup)?;
        server.listening(exports - 1)?;
        let start = begun.elapsed().as_secs_f64() * 1e3;
        let clients = idle_clients(&self.session, &mut server, 0..exports)?;
        std::thread::sleep(self.settle);
        let sample = idle_sample(&mut server, self.session.run_time)?;
        let footprint = Footprint::read(server.pid())?;
        let slab = slab()? as f64 - slab_before as f64;
        drop(clients);
        server.stop()?;
        let (cpu, switches) = (sample[Figure::CpuShare], sample[Figure::WakeUps]);
        Ok(Idle { start, footprint, slab, cpu, switches })
    }

    /// Measures one busy export of a null node at this depth, with all others idle.
    pub(super) fn one_busy(
        &self,
        contender: &Contender,
        exports: usize,
        depth: usize,
    ) -> Result<Busy> {
        let mut server = self.session.serve(contender, &self.null(exports))?;
        let idle = idle_clients(&self.session, &mut server, 1..exports)?;
        std::thread::sleep(self.settle);
        let load = self.session.bound(&Load { depth, ..rows::load() });
        let client = server.connect(0, &load)?;
        self.run(server, client, idle)
    }

    /// Measures busy exports of null nodes, driven by one client thread.
    pub(super) fn all_busy(&self, contender: &Contender, exports: usize) -> Result<Busy> {
        let mut server = self.session.serve(contender, &self.null(exports))?;
        let load = Load { depth: DEPTH_OF_ALL, ..rows::load() };
        let clients = connect(&self.session, &mut server, 0..exports, &load)?;
        self.run(server, clients.context("no exports")?, None)
    }

    /// Measures one export on one or two I/O threads, polling off.
    pub(super) fn threads(
        &self,
        contender: &Contender,
        io_threads: usize,
        load: &Load,
    ) -> Result<Busy> {
        let setup = self.setup(vec![Node::Null], Polling::Off);
        let setup = Setup { io_threads, queues: load.queues, ..setup };
        let mut server = self.session.serve(contender, &setup)?;
        let client = server.connect(0, &self.session.bound(load))?;
        self.run(server, client, None)
    }

    fn run(&self, mut server: Server, client: Client, beside: Option<Running>) -> Result<Busy> {
        let (warm_up, run_time) = (self.session.warm_up, self.session.run_time);
        let running = client.start()?;
        let (sample, mut p50) = own_figures(&mut server, running, warm_up, run_time)?;
        drop(beside);
        server.stop()?;
        p50.sort_by(f64::total_cmp);
        ensure!(p50[0] > 0.0, "one of {} queues was not served within {run_time:?}", p50.len());
        let (middle, last) = (p50[p50.len() / 2], p50[p50.len() - 1]);
        let (iops, cpu) = (sample[Figure::Iops], sample[Figure::Cpu]);
        Ok(Busy { iops, cpu, p50: middle, slowest: last / middle })
    }
}

/// The file of export `i`.
fn file(directory: &Path, i: usize) -> PathBuf {
    directory.join(format!("scale-{i}"))
}

/// A file per export, written from end to end; removed when dropped.
pub(super) struct Files(Vec<PathBuf>);

impl Files {
    /// Makes them.
    pub(super) fn new(directory: &Path, count: usize) -> Result<Self> {
        let mut files = Files(Vec::with_capacity(count));
        for path in (0..count).map(|i| file(directory, i)) {
            let context = || format!("writing {}", path.display());
            let mut file = File::create(&path).with_context(context)?;
            files.0.push(path.clone());
            data_file::fill(&mut file, FILE_SIZE).with_context(context)?;
        }
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}
